package errs

import (
	"fmt"
	"strconv"
	"strings"
)

// Message is text for users: a hint or a warning. The operations and parameters of Pando that
// it mentions are data in it, which each front end renders as its users write them, by a
// [Renderer]. Printed or marshalled directly, a message uses neutral words, which belong to no
// front end. The string has an internal encoding: make messages from constants and other
// messages, or by [Messagef], and never convert them to string.
type Message string

// Part is a part of a message: a [Text], an [Operation], a [Parameter] or a [Variable].
type Part interface{ part() }

// Text is text that is the same in every front end.
type Text string

// Operation is an operation of Pando that the user can run.
type Operation struct {
	Name string // as on the command line: "umount", "golden rm"
	Args []Part // its objects (Text) and parameters
}

// Parameter is a parameter of an operation: of the one that failed or, as an argument of an
// Operation, of that operation.
type Parameter struct {
	Name  string // "size"
	Value string // the value to set, or ""; a word in capitals is a placeholder
}

// Variable is an environment variable of the command line. Users of other front ends cannot set
// environment variables.
type Variable string

func (Text) part()      {}
func (Operation) part() {}
func (Parameter) part() {}
func (Variable) part()  {}

// Run returns the operation name with args. Parts are kept; anything else becomes text in its default format.
func Run(name string, args ...any) Operation {
	o := Operation{Name: name}
	for _, a := range args {
		if p, ok := a.(Part); ok {
			o.Args = append(o.Args, p)
		} else {
			o.Args = append(o.Args, Text(fmt.Sprint(a)))
		}
	}
	return o
}

// Param returns a parameter, with a value to set if one is given.
func Param(name string, value ...string) Parameter {
	return Parameter{Name: name, Value: strings.Join(value, " ")}
}

// Renderer renders the parts of messages as a front end writes them.
type Renderer interface {
	Operation(Operation) string
	Parameter(Parameter) string
	Variable(Variable) string
}

// A part in a Message is enclosed in two NUL bytes: a letter for its type, then its fields.
// Arguments of an operation begin with such a letter as well.
const (
	partMark  = "\x00"
	fieldMark = "\x01"
	valueMark = "\x02" // between the name of a parameter and its value
	kindOp    = "o"
	kindParam = "p"
	kindVar   = "v"
	kindText  = "t"
)

// quoteMarks escapes text, so that it cannot be mistaken for an encoded part.
var quoteMarks = strings.NewReplacer("\x00", `\x00`, "\x01", `\x01`, "\x02", `\x02`)

// encodePart returns a part as it is encoded in a Message.
func encodePart(p Part) string {
	switch p := p.(type) {
	case Operation:
		fields := []string{kindOp + quoteMarks.Replace(p.Name)}
		for _, a := range p.Args {
			fields = append(fields, encodeArg(a))
		}
		return partMark + strings.Join(fields, fieldMark) + partMark
	case Parameter:
		return partMark + encodeArg(p) + partMark
	case Variable:
		return partMark + kindVar + quoteMarks.Replace(string(p)) + partMark
	case Text:
		return quoteMarks.Replace(string(p))
	}

	return ""
}

func encodeArg(p Part) string {
	if p, ok := p.(Parameter); ok {
		return kindParam + quoteMarks.Replace(p.Name) + valueMark + quoteMarks.Replace(p.Value)
	}
	return kindText + encodePart(p)
}

// decodePart decodes the text between two marks.
func decodePart(s string) Part {
	if s == "" {
		return Text("")
	}

	switch kind, rest := s[:1], s[1:]; kind {
	case kindOp:
		fields := strings.Split(rest, fieldMark)
		o := Operation{Name: fields[0]}
		for _, f := range fields[1:] {
			o.Args = append(o.Args, decodePart(f))
		}
		return o
	case kindParam:
		name, value, _ := strings.Cut(rest, valueMark)
		return Parameter{Name: name, Value: value}
	case kindVar:
		return Variable(rest)
	default:
		return Text(rest)
	}
}

// Messagef formats a message. Besides the values that fmt formats, args may be parts and messages,
// with the verb %s.
func Messagef(format string, args ...any) Message {
	if false {
		_ = fmt.Sprintf(format, args...) // makes vet check the formats
	}

	plain := make([]any, len(args))
	for i, a := range args {
		switch a := a.(type) {
		case Message:
			plain[i] = string(a)
		case Part:
			plain[i] = encodePart(a)
		case string:
			plain[i] = quoteMarks.Replace(a)
		case error:
			plain[i] = quoteMarks.Replace(a.Error())
		default:
			plain[i] = a
		}
	}

	return Message(fmt.Sprintf(format, plain...))
}

// Parts returns the parts of the message, in order.
func (m Message) Parts() []Part {
	var parts []Part
	for i, s := range strings.Split(string(m), partMark) {
		switch {
		case i%2 == 1:
			parts = append(parts, decodePart(s))
		case s != "":
			parts = append(parts, Text(s))
		}
	}
	return parts
}

// Render returns the message in the words of a front end.
func (m Message) Render(r Renderer) string {
	var b strings.Builder
	for _, p := range m.Parts() {
		switch p := p.(type) {
		case Operation:
			b.WriteString(r.Operation(p))
		case Parameter:
			b.WriteString(r.Parameter(p))
		case Variable:
			b.WriteString(r.Variable(p))
		case Text:
			b.WriteString(string(p))
		}
	}

	return MaskURLs(b.String())
}

// String returns the message in neutral words: see [Neutral].
func (m Message) String() string { return m.Render(Neutral{}) }

// MarshalText returns String, so that marshalled messages use neutral words as well.
func (m Message) MarshalText() ([]byte, error) { return []byte(m.String()), nil }

// Neutral renders messages in words that belong to no front end: `operation "umount" of web`,
// `parameter "size"`.
type Neutral struct{}

// Operation names the operation, its objects and its parameters.
func (n Neutral) Operation(o Operation) string {
	var of, with []string
	for _, a := range o.Args {
		switch a := a.(type) {
		case Parameter:
			with = append(with, n.Parameter(a))
		case Text:
			of = append(of, string(a))
		}
	}

	out := "operation " + strconv.Quote(o.Name)
	if len(of) > 0 {
		out += " of " + strings.Join(of, ", ")
	}
	if len(with) > 0 {
		out += " with " + strings.Join(with, " and ")
	}

	return out
}

// Parameter names the parameter, and the value to set.
func (Neutral) Parameter(p Parameter) string {
	out := "parameter " + strconv.Quote(p.Name)
	if p.Value != "" {
		out += " set to " + p.Value
	}
	return out
}

// Variable names the variable.
func (Neutral) Variable(v Variable) string { return "environment variable " + string(v) }

// ShellWord quotes s as one word for a shell, for hints with commands of other programs.
func ShellWord(s string) string {
	if strings.ContainsAny(s, " \t\n'\"\\$`!*?[](){}<>|&;~#") || s == "" {
		return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
	}
	return s
}
