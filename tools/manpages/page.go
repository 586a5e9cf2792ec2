package main

import (
	"bytes"
	"fmt"
	"regexp"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// page is one manual page, in the language of man(7).
type page struct {
	name    string // without its section: pando-golden-import
	section string
	text    []byte
}

// pages returns the pages of a command and of all below it, in the order in which --help lists them.
func pages(c *cobra.Command, version, date string) []page {
	out := []page{render(c, version, date)}
	for _, sub := range listed(c) {
		out = append(out, pages(sub, version, date)...)
	}
	return out
}

// listed returns the commands and topics that --help of c lists. `pando help` itself has no page: man takes its place.
func listed(c *cobra.Command) []*cobra.Command {
	var out []*cobra.Command
	for _, sub := range c.Commands() {
		if sub.IsAvailableCommand() || isTopic(sub) {
			out = append(out, sub)
		}
	}
	return out
}

func isTopic(c *cobra.Command) bool { return c.IsAdditionalHelpTopicCommand() }

func name(c *cobra.Command) string { return strings.ReplaceAll(c.CommandPath(), " ", "-") }

func section(c *cobra.Command) string {
	if isTopic(c) {
		return "7"
	}
	return "1"
}

func reference(c *cobra.Command) string {
	return fmt.Sprintf(`\fB%s\fR(%s)`, escape(name(c)), section(c))
}

func render(c *cobra.Command, version, date string) page {
	c.InitDefaultHelpFlag()
	p := page{name: name(c), section: section(c)}
	var b bytes.Buffer
	fmt.Fprintf(&b, ".TH %q %s %s %q %q\n", strings.ToUpper(p.name), p.section, date, "pando "+version, "Pando")

	// Lines are filled, but words are not broken and spaces not stretched: commands stay as they are typed.
	b.WriteString(".nh\n.ad l\n.SH NAME\n")
	fmt.Fprintf(&b, "%s \\- %s\n", escape(p.name), escape(c.Short))

	if !isTopic(c) {
		b.WriteString(".SH SYNOPSIS\n")
		if c.Runnable() {
			synopsis(&b, c, strings.TrimPrefix(c.UseLine(), c.CommandPath()))
		}
		if c.HasAvailableSubCommands() {
			if c.Runnable() {
				b.WriteString(".br\n")
			}
			synopsis(&b, c, " COMMAND [flags]")
		}
	}

	b.WriteString(".SH DESCRIPTION\n")
	if c.Long != "" {
		prose(&b, c.Long)
	} else {
		prose(&b, c.Short+".")
	}

	if len(c.Aliases) > 0 {
		prose(&b, "Other names: "+c.NameAndAliases()+".")
	}

	commands(&b, c)
	if !isTopic(c) {
		flags(&b, "OPTIONS", c.NonInheritedFlags())
		flags(&b, "GLOBAL OPTIONS", c.InheritedFlags())
	}

	if c.HasExample() {
		b.WriteString(".SH EXAMPLES\n")
		verbatim(&b, strings.Split(strings.Trim(c.Example, "\n"), "\n"))
	}

	seeAlso(&b, c)
	p.text = b.Bytes()
	return p
}

func synopsis(b *bytes.Buffer, c *cobra.Command, arguments string) {
	fmt.Fprintf(b, "\\fB%s\\fR%s\n", escape(c.CommandPath()), escape(arguments))
}

// commands lists what is below c, in its groups.
func commands(b *bytes.Buffer, c *cobra.Command) {
	subs := listed(c)
	if len(subs) == 0 {
		return
	}

	b.WriteString(".SH COMMANDS\n")
	list := func(wanted func(*cobra.Command) bool) {
		for _, sub := range subs {
			if wanted(sub) {
				fmt.Fprintf(b, ".TP\n%s\n%s\n", reference(sub), escape(sub.Short))
			}
		}
	}

	for _, g := range c.Groups() {
		fmt.Fprintf(b, ".SS %s\n", escape(strings.TrimSuffix(g.Title, ":")))
		list(func(sub *cobra.Command) bool { return sub.GroupID == g.ID })
	}

	if len(c.Groups()) > 0 {
		b.WriteString(".SS Others\n")
	}

	list(func(sub *cobra.Command) bool { return sub.GroupID == "" })
}

// flags lists flags as pflag.FlagSet.FlagUsages does, with the same defaults.
func flags(b *bytes.Buffer, title string, set *pflag.FlagSet) {
	if !set.HasAvailableFlags() {
		return
	}

	fmt.Fprintf(b, ".SH %s\n", title)
	set.VisitAll(func(f *pflag.Flag) {
		if f.Hidden || f.Deprecated != "" {
			return
		}

		b.WriteString(".TP\n")
		if f.Shorthand != "" && f.ShorthandDeprecated == "" {
			fmt.Fprintf(b, "\\fB%s\\fR, ", escape("-"+f.Shorthand))
		}

		fmt.Fprintf(b, "\\fB%s\\fR", escape("--"+f.Name))
		value, usage := pflag.UnquoteUsage(f)
		if value != "" {
			fmt.Fprintf(b, " \\fI%s\\fR", escape(value))
		}

		if v := f.NoOptDefVal; v != "" && f.Value.Type() == "string" {
			b.WriteString(escape(fmt.Sprintf("[=%q]", v)))
		} else if v != "" && f.Value.Type() != "bool" {
			b.WriteString(escape("[=" + v + "]"))
		}

		b.WriteString("\n" + escape(usage+defaultOf(f)) + "\n")
	})
}

// defaultOf returns what pflag adds to the usage of a flag whose default is not the zero value.
func defaultOf(f *pflag.Flag) string {
	switch f.DefValue {
	case "", "0", "0s", "false", "[]", "<nil>":
		return ""
	}
	if f.Value.Type() == "string" {
		return fmt.Sprintf(" (default %q)", f.DefValue)
	}
	return fmt.Sprintf(" (default %s)", f.DefValue)
}

// seeAlso names the page above c, those below it and beside it, and the exit codes.
func seeAlso(b *bytes.Buffer, c *cobra.Command) {
	var refs []string
	if c.HasParent() {
		refs = append(refs, reference(c.Parent()))
	}

	for _, sub := range listed(c) {
		if !isTopic(sub) {
			refs = append(refs, reference(sub))
		}
	}

	if c.HasParent() && c.Parent().HasParent() {
		for _, sibling := range listed(c.Parent()) {
			if sibling != c {
				refs = append(refs, reference(sibling))
			}
		}
	}

	for _, topic := range listed(c.Root()) {
		if isTopic(topic) && topic != c {
			refs = append(refs, reference(topic))
		}
	}

	fmt.Fprintf(b, ".SH SEE ALSO\n%s\n", strings.Join(refs, ",\n"))
}

// prose writes text as paragraphs. Indented lines stay as they are.
func prose(b *bytes.Buffer, text string) {
	text = strings.ReplaceAll(strings.Trim(text, "\n"), "\t", "    ")
	for paragraph := range strings.SplitSeq(text, "\n\n") {
		lines := strings.Split(paragraph, "\n")
		for len(lines) > 0 {
			n := 0
			for indented := strings.HasPrefix(lines[0], " "); n < len(lines) && strings.HasPrefix(lines[n], " ") == indented; {
				n++
			}
			if strings.HasPrefix(lines[0], " ") {
				verbatim(b, lines[:n])
			} else {
				b.WriteString(".PP\n" + withCode(strings.Join(lines[:n], "\n")) + "\n")
			}
			lines = lines[n:]
		}
	}
}

// verbatim writes lines without filling them. What all of them are indented by becomes the page's own indentation.
func verbatim(b *bytes.Buffer, lines []string) {
	margin := -1
	for _, l := range lines {
		if n := len(l) - len(strings.TrimLeft(l, " ")); l != "" && (margin < 0 || n < margin) {
			margin = n
		}
	}
	b.WriteString(".PP\n.RS 4\n.nf\n")
	for _, l := range lines {
		b.WriteString(withCode(l[min(max(margin, 0), len(l)):]) + "\n")
	}
	b.WriteString(".fi\n.RE\n")
}

var code = regexp.MustCompile("`[^`]+`")

// withCode escapes text, and prints what stands in backquotes in bold type.
func withCode(text string) string {
	var b strings.Builder
	from := 0
	for _, m := range code.FindAllStringIndex(text, -1) {
		b.WriteString(characters(text[from:m[0]]) + `\fB` + characters(text[m[0]+1:m[1]-1]) + `\fR`)
		from = m[1]
	}
	return noRequest.ReplaceAllString(b.String()+characters(text[from:]), `\&.`)
}

// escape returns text that roff prints as it is. No line of it begins a request.
func escape(text string) string { return noRequest.ReplaceAllString(characters(text), `\&.`) }

var noRequest = regexp.MustCompile(`(?m)^\.`)

// special are the characters that roff prints as others, or not at all.
var special = strings.NewReplacer(`\`, `\e`, "-", `\-`, "'", `\(aq`, "`", `\(ga`, "^", `\(ha`, "~", `\(ti`)

// characters returns text as ASCII, with each character in the form in which roff prints it.
func characters(text string) string {
	var b strings.Builder
	for _, r := range special.Replace(text) {
		if r > '~' {
			fmt.Fprintf(&b, `\[u%04X]`, r)
		} else {
			b.WriteRune(r)
		}
	}
	return b.String()
}
