package errs

import "strings"

// CommandLine renders messages as commands, flags and variables that can be typed.
type CommandLine struct{}

// Operation is a command that can be pasted: `pando golden rm web`.
func (c CommandLine) Operation(o Operation) string {
	words := []string{"pando", o.Name}
	for _, a := range o.Args {
		switch a := a.(type) {
		case Text:
			words = append(words, string(a))
		case Parameter:
			words = append(words, c.Parameter(a))
		}
	}
	return "`" + strings.Join(words, " ") + "`"
}

// Parameter is a flag, and its value if the message gives one.
func (CommandLine) Parameter(p Parameter) string {
	if p.Value == "" {
		return "--" + p.Name
	}
	return "--" + p.Name + " " + p.Value
}

// Variable is the name of a variable of the environment.
func (CommandLine) Variable(v Variable) string { return string(v) }
