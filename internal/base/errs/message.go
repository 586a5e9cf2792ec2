package errs

import (
	"fmt"
	"strconv"
	"strings"
)

// Message is text for people: a hint about what they can do next, or a warning. The operations
// and parameters of Pando that it speaks of are data in it: each front end renders them as its
// users write them, by a [Renderer]. Printed or marshalled as it is, it has neutral words, those of
// no front end. The string holds the data in a form of its own: make messages of constants and
// other messages, and by [Messagef]; never convert them to string.
type Message string

// Part is a part of a message: a [Text], an [Operation], a [Parameter] or a [Variable].
type Part interface{ part() }

// Text is words that are the same in each front end.
type Text string

// Operation is something that Pando does, and that the person can ask for.
type Operation struct {
	Name string // as in ops of the command line: "umount", "golden rm"
	Args []Part // what it is done to (Text), and parameters
}

// Parameter is a parameter of an operation: of the one that failed, or of that which it is an
// argument of.
type Parameter struct {
	Name  string // "size"
	Value string // "", or what to set it to; a word in capitals stands for a value
}

// Variable is an environment variable of the program that the person runs: other front ends have
// none that a person could set.
type Variable string

func (Text) part()      {}
func (Operation) part() {}
func (Parameter) part() {}
func (Variable) part()  {}

// Run is the operation name, on args: parameters, and anything else as its default format.
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

// Param is a parameter, to be set to value if one is given.
func Param(name string, value ...string) Parameter {
	return Parameter{Name: name, Value: strings.Join(value, " ")}
}

// Renderer words the parts of messages as a front end writes them.
type Renderer interface {
	Operation(Operation) string
	Parameter(Parameter) string
	Variable(Variable) string
}

// A part in a Message stands between two NUL bytes: a letter that says what it is, and its
// fields. Arguments of an operation begin with such a letter too.
const (
	partMark  = "\x00"
	fieldMark = "\x01"
	valueMark = "\x02" // between the name of a parameter and its value
	kindOp    = "o"
	kindParam = "p"
	kindVar   = "v"
	kindText  = "t"
)

// quoteMarks keeps what stands in a message from being taken for data.
var quoteMarks = strings.NewReplacer("\x00", `\x00`, "\x01", `\x01`, "\x02", `\x02`)

// encodePart is a part as it stands in a Message.
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

// decodePart is what stands between two marks.
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

// Messagef makes a message. args may be parts and messages besides what fmt formats: for them the
// verb is %s.
func Messagef(format string, args ...any) Message {
	if false {
		_ = fmt.Sprintf(format, args...) // so that vet looks at the formats
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

// Parts are the parts of the message, in order.
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

// Render is the message in the words of a front end.
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

	return b.String()
}

// String is the message in words of no front end: see [Neutral].
func (m Message) String() string { return m.Render(Neutral{}) }

// MarshalText is String: an answer that is not rendered speaks of no front end either.
func (m Message) MarshalText() ([]byte, error) { return []byte(m.String()), nil }

// Neutral renders messages in words that are those of no front end: `operation "umount" of
// web`, `parameter "size"`.
type Neutral struct{}

// Operation names the operation, what it is done to, and its parameters.
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

// Parameter names the parameter, and what to set it to.
func (Neutral) Parameter(p Parameter) string {
	out := "parameter " + strconv.Quote(p.Name)
	if p.Value != "" {
		out += " set to " + p.Value
	}
	return out
}

// Variable names the variable.
func (Neutral) Variable(v Variable) string { return "environment variable " + string(v) }

// ShellWord makes s one word for a shell, for hints with commands that are not Pando's.
func ShellWord(s string) string {
	if strings.ContainsAny(s, " \t\n'\"\\$`!*?[](){}<>|&;~#") || s == "" {
		return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
	}
	return s
}
