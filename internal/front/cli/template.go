package cli

import (
	"bytes"
	"encoding/json"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"text/template"

	"pando/internal/base/errs"

	"github.com/spf13/cobra"
)

// formatFlag adds --format to a command that prints things with --json: it prints each of them as a template. The
// command cannot have the flags in without at the same time.
func (a *App) formatFlag(c *cobra.Command, without ...string) {
	var text string
	c.Flags().StringVar(&text, "format", "",
		"print each as the Go `TEMPLATE`, with the fields of --json: '{{.name}} {{.state}}'")
	_ = c.RegisterFlagCompletionFunc("format", cobra.NoFileCompletions)

	c.PreRunE = func(c *cobra.Command, _ []string) (err error) {
		if !c.Flags().Changed("format") {
			return nil
		}
		if a.json || a.quiet {
			return errs.New(errs.Invalid, c.Name(), "--format", "--format, --json and -q are three formats").
				WithHint("choose one of them")
		}
		for _, other := range without {
			if c.Flags().Changed(other) {
				return errs.New(errs.Invalid, c.Name(), "--format", "--format and --%s cannot be combined", other).
					WithHint("remove one of them")
			}
		}

		a.each, err = template.New("template").Option("missingkey=error").
			Funcs(template.FuncMap{"json": inJSON, "join": joined}).Parse(text)
		a.json = err == nil // the same is printed, in another form
		return wrongTemplate(err)
	}
}

// wrongTemplate is the error of a template that cannot be read or applied.
func wrongTemplate(err error) error {
	if err == nil {
		return nil
	}
	_, cause, _ := strings.Cut(err.Error(), "template: ")
	if m := unknownField.FindStringSubmatch(cause); m != nil {
		cause = "there is no field " + m[1]
	}
	return errs.New(errs.Invalid, "", "--format", "%s", cause).
		WithHint("write for example '{{.name}}'; --json shows the fields that there are")
}

// unknownField finds the name of a field that a template names and no value has.
var unknownField = regexp.MustCompile(`map has no entry for key "([^"]*)"`)

// inJSON is the function json of templates.
func inJSON(v any) (string, error) {
	raw, err := json.Marshal(v)
	return string(raw), err
}

// joined is the function join of templates: the elements of a list, with a separator between them.
func joined(list []any, separator string) string {
	words := make([]string, len(list))
	for i, v := range list {
		if s, is := v.(string); is {
			words[i] = s
		} else {
			words[i], _ = inJSON(v) // what was decoded can be encoded
		}
	}
	return strings.Join(words, separator)
}

// printEach prints a value, or each value of a list, as the template of --format says.
func (a *App) printEach(v any) error {
	list := reflect.ValueOf(v)
	if list.Kind() != reflect.Slice {
		list = reflect.ValueOf([]any{v})
	}
	for i := range list.Len() {
		fields, err := fieldsForTemplate(list.Index(i).Interface())
		if err != nil {
			return errs.Wrap("print", "--format", err)
		}
		var out bytes.Buffer
		if err := a.each.Execute(&out, fields); err != nil {
			return wrongTemplate(err)
		}
		if err := a.printf("%s\n", out.String()); err != nil {
			return err
		}
	}
	return nil
}

// fieldsForTemplate returns the fields of a value as --json prints them. Those that are absent are "".
func fieldsForTemplate(v any) (map[string]any, error) {
	raw, err := json.Marshal(rendered(v))
	if err != nil {
		return nil, err
	}

	d := json.NewDecoder(bytes.NewReader(raw))
	d.UseNumber() // sizes stay whole numbers
	fields := map[string]any{}
	if err := d.Decode(&fields); err != nil {
		return nil, err
	}

	for _, name := range jsonNames(reflect.TypeOf(v)) {
		if _, has := fields[name]; !has {
			fields[name] = ""
		}
	}
	return fields, nil
}

// jsonNames are the names of the fields of a struct in JSON.
func jsonNames(t reflect.Type) (out []string) {
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	for _, f := range reflect.VisibleFields(t) {
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		if name != "" && name != "-" && !slices.Contains(out, name) {
			out = append(out, name)
		}
	}
	return out
}
