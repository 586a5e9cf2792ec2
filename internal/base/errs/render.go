package errs

import (
	"reflect"
	"sync"
)

// Rendered returns v with each message that it holds, however deep, rendered by r. What v points to is changed.
func Rendered(v any, r Renderer) any {
	if v == nil || !holdsMessages(reflect.TypeOf(v)) {
		return v
	}
	out := reflect.New(reflect.TypeOf(v)).Elem() // a value that can be changed
	out.Set(reflect.ValueOf(v))
	render(out, r)
	return out.Interface()
}

var messageType = reflect.TypeFor[Message]()

// render changes v, which can be set.
func render(v reflect.Value, r Renderer) {
	if !holdsMessages(v.Type()) {
		return
	}

	switch v.Kind() {
	case reflect.String:
		v.SetString(v.Interface().(Message).Render(r))
	case reflect.Pointer:
		if !v.IsNil() {
			render(v.Elem(), r)
		}
	case reflect.Interface:
		if !v.IsNil() {
			v.Set(reflect.ValueOf(Rendered(v.Interface(), r)))
		}
	case reflect.Struct:
		for i := range v.NumField() {
			if v.Field(i).CanSet() {
				render(v.Field(i), r)
			}
		}
	case reflect.Slice, reflect.Array:
		for i := range v.Len() {
			render(v.Index(i), r)
		}
	case reflect.Map:
		for _, k := range v.MapKeys() {
			if x := Rendered(v.MapIndex(k).Interface(), r); x != nil {
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
