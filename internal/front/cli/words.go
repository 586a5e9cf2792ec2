package cli

import (
	"reflect"
	"slices"
	"strings"
	"sync"

	"pando/internal/base/errs"
)

// commandLine renders messages as commands, flags and variables that can be typed.
type commandLine struct{}

// Operation is a command that can be pasted: `pando golden rm web`.
func (c commandLine) Operation(o errs.Operation) string {
	words := []string{"pando", o.Name}
	for _, a := range o.Args {
		switch a := a.(type) {
		case errs.Text:
			words = append(words, string(a))
		case errs.Parameter:
			words = append(words, c.Parameter(a))
		}
	}
	return "`" + strings.Join(words, " ") + "`"
}

// Parameter is a flag, and its value if the message gives one.
func (commandLine) Parameter(p errs.Parameter) string {
	if p.Value == "" {
		return "--" + p.Name
	}
	return "--" + p.Name + " " + p.Value
}

// Variable is the name of a variable of the environment.
func (commandLine) Variable(v errs.Variable) string { return string(v) }

// renderMessage renders a message for the command line.
func renderMessage(m errs.Message) string { return m.Render(commandLine{}) }

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
func rendered(v any) any {
	if v == nil || !holdsMessages(reflect.TypeOf(v)) {
		return v
	}
	out := reflect.New(reflect.TypeOf(v)).Elem() // a value that can be changed
	out.Set(reflect.ValueOf(v))
	render(out)
	return out.Interface()
}

var messageType = reflect.TypeFor[errs.Message]()

// render changes v, which can be set.
func render(v reflect.Value) {
	if !holdsMessages(v.Type()) {
		return
	}

	switch v.Kind() {
	case reflect.String:
		v.SetString(renderMessage(v.Interface().(errs.Message)))
	case reflect.Pointer:
		if !v.IsNil() {
			render(v.Elem())
		}
	case reflect.Interface:
		if !v.IsNil() {
			v.Set(reflect.ValueOf(rendered(v.Interface())))
		}
	case reflect.Struct:
		for i := range v.NumField() {
			if v.Field(i).CanSet() {
				render(v.Field(i))
			}
		}
	case reflect.Slice, reflect.Array:
		for i := range v.Len() {
			render(v.Index(i))
		}
	case reflect.Map:
		for _, k := range v.MapKeys() {
			if x := rendered(v.MapIndex(k).Interface()); x != nil {
				v.SetMapIndex(k, reflect.ValueOf(x))
			}
		}
	}
}

// holdsMessages reports whether values of a type can hold messages: most results hold none, and
// some are long.
func holdsMessages(t reflect.Type) bool {
	known, done := holders.Load(t)
	if !done {
		known, _ = holders.LoadOrStore(t, typeHoldsMessages(t, map[reflect.Type]bool{}))
	}
	return known.(bool)
}

var holders sync.Map // of reflect.Type to bool

func typeHoldsMessages(t reflect.Type, seen map[reflect.Type]bool) bool {
	if seen[t] {
		return false
	}

	seen[t] = true
	switch t.Kind() {
	case reflect.String:
		return t == messageType
	case reflect.Interface:
		return true
	case reflect.Pointer, reflect.Slice, reflect.Array, reflect.Map:
		return typeHoldsMessages(t.Elem(), seen)
	case reflect.Struct:
		for i := range t.NumField() {
			if f := t.Field(i); f.IsExported() && typeHoldsMessages(f.Type, seen) {
				return true
			}
		}
	}

	return false
}
