package main

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"pando/internal/front/cli"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

func words(s string) string { return strings.Join(strings.Fields(s), " ") }

// TestPagesSayWhatHelpSays renders all pages as man does. What --help prints must be there: each command, its usage,
// texts, examples and flags with their defaults. And the formatter must not complain about anything.
func TestPagesSayWhatHelpSays(t *testing.T) {
	if _, err := exec.LookPath("groff"); err != nil {
		t.Skip("SKIPPED: groff is not installed")
	}
	rendered := map[string]string{}
	for _, p := range pages(cli.Commands(), "1.2.0", "2026-11-23") {
		if _, twice := rendered[p.name]; twice {
			t.Errorf("there are two pages %s", p.name)
		}
		rendered[p.name] = format(t, p)
	}
	if len(rendered) < 60 {
		t.Errorf("only %d pages", len(rendered))
	}

	var check func(c *cobra.Command)
	check = func(c *cobra.Command) {
		if c.Name() == "help" || c.Hidden {
			return
		}
		text, found := rendered[name(c)]
		if !found {
			t.Errorf("%s has no manual page", c.CommandPath())
			return
		}
		c.InitDefaultHelpFlag()
		must := func(s string) {
			if !strings.Contains(text, words(s)) {
				t.Errorf("the page of %s does not say %q", c.CommandPath(), words(s))
			}
		}
		must(c.Short)
		must(strings.ReplaceAll(c.Long, "`", ""))
		must(c.Example)
		if c.Runnable() {
			must(c.UseLine())
		}
		if !isTopic(c) {
			// Without their line breaks, both are the same lists in the same order.
			must("OPTIONS " + c.NonInheritedFlags().FlagUsages())
			if c.HasAvailableInheritedFlags() {
				must("GLOBAL OPTIONS " + c.InheritedFlags().FlagUsages())
			}
		}
		for _, sub := range c.Commands() {
			check(sub)
		}
	}
	check(cli.Commands())
}

// format returns the words of a page, as man prints them.
func format(t *testing.T, p page) string {
	t.Helper()
	cmd := exec.Command("groff", "-man", "-Tutf8", "-ww", "-P-cbou", "-rLL=2000n", "-rLT=2000n")
	cmd.Stdin = bytes.NewReader(p.text)
	var complaints bytes.Buffer
	cmd.Stderr = &complaints
	out, err := cmd.Output()
	if err != nil || complaints.Len() > 0 {
		t.Errorf("%s: %v\n%s", p.name, err, complaints.String())
	}
	return words(string(out))
}

func TestWriteIsRepeatable(t *testing.T) {
	var digests [2]string
	for i := range digests {
		dir := t.TempDir()
		if err := write([]string{dir}, "1.2.0", "2026-11-23"); err != nil {
			t.Fatal(err)
		}
		for _, name := range []string{"man1/pando.1", "man1/pando-remote-key-add.1", "man7/pando-exit-codes.7"} {
			b, err := os.ReadFile(filepath.Join(dir, name))
			if err != nil {
				t.Fatal(err)
			}
			digests[i] += string(b)
		}
	}
	if digests[0] != digests[1] {
		t.Error("the same arguments made other pages")
	}
	if !strings.HasPrefix(digests[0], `.TH "PANDO" 1 2026-11-23 "pando 1.2.0" "Pando"`+"\n") {
		t.Errorf("the first line is %q", digests[0][:60])
	}
	if err := write([]string{t.TempDir()}, "1.2.0", "today"); err == nil {
		t.Error("-date today was accepted")
	}
}

func TestEscape(t *testing.T) {
	for text, want := range map[string]string{
		`a\b`:        `a\eb`,
		"--pool":     `\-\-pool`,
		".TH\n.SH x": `\&.TH` + "\n" + `\&.SH x`,
		"'it'~^`":    `\(aqit\(aq\(ti\(ha\(ga`,
		"…":          `\[u2026]`,
	} {
		if got := escape(text); got != want {
			t.Errorf("escape(%q) = %s, want %s", text, got, want)
		}
	}
	if got, want := withCode("see `pando gc`."), `see \fBpando gc\fR.`; got != want {
		t.Errorf("withCode: %s, want %s", got, want)
	}
}

func TestFlagsShowDefaultsAsHelpDoes(t *testing.T) {
	set := pflag.NewFlagSet("x", pflag.ContinueOnError)
	set.Int("many", 3, "so `N`")
	set.Int("none", 0, "zero")
	set.String("word", "auto", "a word")
	set.StringSlice("list", nil, "a list")
	_ = set.MarkHidden("none")
	var b bytes.Buffer
	flags(&b, "OPTIONS", set)
	want := `.SH OPTIONS
.TP
\fB\-\-list\fR \fIstrings\fR
a list
.TP
\fB\-\-many\fR \fIN\fR
so N (default 3)
.TP
\fB\-\-word\fR \fIstring\fR
a word (default "auto")
`
	if b.String() != want {
		t.Errorf("got\n%s\nwant\n%s", b.String(), want)
	}
}
