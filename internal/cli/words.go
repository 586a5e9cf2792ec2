package cli

import (
	"slices"

	"pando/internal/base/errs"
)

// renderMessage renders a message for the command line.
func renderMessage(m errs.Message) string { return m.Render(errs.CommandLine{}) }

// hintOf is the hint of an error in the words of the command line, or "".
func hintOf(err error) string { return renderMessage(errs.HintIn(err)) }

// renderArgs renders the messages among the arguments of a format.
func renderArgs(args []any) []any {
	out := slices.Clone(args)
	for i, a := range out {
		if m, ok := a.(errs.Message); ok {
			out[i] = renderMessage(m)
		}
	}
	return out
}

// rendered is v with each message that it holds, however deep, in the words of the command line.
// What v points to is changed.
func rendered(v any) any { return errs.Rendered(v, errs.CommandLine{}) }
