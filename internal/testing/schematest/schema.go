package schematest

import (
	"encoding"
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"time"
	"unicode"

	"pando/internal/api"
	"pando/internal/driver"

	"github.com/google/jsonschema-go/jsonschema"
)

// builder makes schemas of types. Each struct becomes a definition.
type builder struct {
	closed bool // no object may have a field that is not described
	nulls  bool // a list without elements may be null, as in old reports of measurements
	defs   map[string]*jsonschema.Schema
	names  map[shape]string
	text   *comments
}

func newBuilder(closed bool) *builder {
	b := &builder{closed: closed, defs: map[string]*jsonschema.Schema{}, names: map[shape]string{}, text: &comments{}}
	for _, name := range slices.Sorted(maps.Keys(things)) {
		b.names[things[name]] = name
	}
	for _, name := range slices.Sorted(maps.Keys(things)) {
		b.define(name, things[name])
	}
	return b
}

// addResults adds what commands print to the definitions.
func (b *builder) addResults() {
	for _, command := range slices.Sorted(maps.Keys(results)) {
		forms := &jsonschema.Schema{}
		for _, s := range results[command] {
			forms.AnyOf = append(forms.AnyOf, b.shape(s))
		}
		b.defs["pando "+command] = forms
	}
}

// shape is the schema of a shape.
func (b *builder) shape(s shape) *jsonschema.Schema {
	if !s.list {
		return b.ref(s.of, s.kind)
	}

	items := &jsonschema.Schema{}
	for _, k := range s.kinds() {
		items.AnyOf = append(items.AnyOf, b.ref(s.of, k))
	}
	if len(items.AnyOf) == 1 {
		items = items.AnyOf[0]
	}
	return &jsonschema.Schema{Type: "array", Items: items}
}

// kinds are the kinds of objects that a shape contains; "" alone: none.
func (s shape) kinds() (out []api.Kind) {
	for _, k := range strings.Split(string(s.kind), ",") {
		out = append(out, api.Kind(k))
	}
	return out
}

// ref refers to the definition of a struct, and makes it if there is none.
func (b *builder) ref(t reflect.Type, kind api.Kind) *jsonschema.Schema {
	if t == reflect.TypeFor[api.Object]() {
		t = reflect.TypeFor[api.Detail]() // what only some commands tell may be absent
	}
	s := shape{of: t, kind: kind}
	name, known := b.names[s]
	if !known {
		name = snake(t.Name())
		if kind != "" && len(kindsOf(t)) > 1 {
			name += "_" + string(kind)
		}
		if _, taken := b.defs[name]; taken {
			name = t.PkgPath()[strings.LastIndex(t.PkgPath(), "/")+1:] + "_" + name
		}
		b.names[s] = name
		b.define(name, s)
	}
	return &jsonschema.Schema{Ref: "#/$defs/" + name}
}

// kindsOf are the kinds of objects in a type that commands print.
func kindsOf(t reflect.Type) (out []api.Kind) {
	for _, all := range results {
		for _, s := range all {
			for _, k := range s.kinds() {
				if s.of == t && !slices.Contains(out, k) {
					out = append(out, k)
				}
			}
		}
	}
	return out
}

// define makes the definition of a struct.
func (b *builder) define(name string, s shape) {
	d := &jsonschema.Schema{Type: "object", Properties: map[string]*jsonschema.Schema{}}
	b.defs[name] = d
	if b.closed {
		d.AdditionalProperties = &jsonschema.Schema{Not: &jsonschema.Schema{}}
	}

	for _, f := range fieldsOf(s.of) {
		if !f.has(s.kind) {
			continue
		}
		p := b.field(f)
		if s.kind != "" && f.name == "kind" {
			p = &jsonschema.Schema{Const: jsonschema.Ptr[any](string(s.kind))}
		}
		p.Description = b.text.of(f)
		d.Properties[f.name] = p
		d.PropertyOrder = append(d.PropertyOrder, f.name)
		if !f.optional || s.kind != "" && slices.Contains(strings.Split(f.Tag.Get("always"), ","), string(s.kind)) {
			d.Required = append(d.Required, f.name)
		}
	}
}

// field is the schema of a field.
func (b *builder) field(f field) *jsonschema.Schema {
	t, null := f.Type, false
	if t.Kind() == reflect.Pointer {
		t, null = t.Elem(), !f.optional
	}
	s := b.value(t, api.Kind(f.Tag.Get("is")))
	if null {
		s = &jsonschema.Schema{AnyOf: []*jsonschema.Schema{{Type: "null"}, s}}
	}
	return s
}

// forms are the schemas of types that encode themselves.
var forms = map[reflect.Type]func() *jsonschema.Schema{
	reflect.TypeFor[time.Time](): func() *jsonschema.Schema {
		return &jsonschema.Schema{Type: "string", Format: "date-time"}
	},
	reflect.TypeFor[json.RawMessage](): func() *jsonschema.Schema { return &jsonschema.Schema{} },
	reflect.TypeFor[driver.Labels](): func() *jsonschema.Schema {
		return &jsonschema.Schema{Type: "object", AdditionalProperties: &jsonschema.Schema{Type: "string"}}
	},
	reflect.TypeFor[driver.LabelSelector](): func() *jsonschema.Schema {
		return &jsonschema.Schema{Type: "array", Items: &jsonschema.Schema{Type: "string"}}
	},
}

// value is the schema of values of a type; kind is that of the objects in it.
func (b *builder) value(t reflect.Type, kind api.Kind) *jsonschema.Schema {
	if form := forms[t]; form != nil {
		return form()
	}
	if t.Implements(reflect.TypeFor[encoding.TextMarshaler]()) {
		return &jsonschema.Schema{Type: "string"}
	}

	encodesItself := t.Implements(reflect.TypeFor[json.Marshaler]())
	switch t.Kind() {
	case reflect.Bool:
		return &jsonschema.Schema{Type: "boolean"}
	case reflect.String:
		return &jsonschema.Schema{Type: "string"}
	case reflect.Float32, reflect.Float64:
		return &jsonschema.Schema{Type: "number"}
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		return &jsonschema.Schema{Type: "integer"}
	case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		return &jsonschema.Schema{Type: "integer", Minimum: jsonschema.Ptr(0.0)}
	case reflect.Pointer:
		return b.value(t.Elem(), kind)
	case reflect.Slice, reflect.Array:
		list := &jsonschema.Schema{Type: "array", Items: b.value(t.Elem(), kind)}
		if b.nulls {
			return &jsonschema.Schema{AnyOf: []*jsonschema.Schema{{Type: "null"}, list}}
		}
		return list
	case reflect.Map:
		return &jsonschema.Schema{Type: "object", AdditionalProperties: b.value(t.Elem(), kind)}
	case reflect.Struct:
		if encodesItself {
			return &jsonschema.Schema{Type: "object"}
		}
		return b.ref(t, kind)
	}
	return &jsonschema.Schema{}
}

// field is a field of a struct in JSON.
type field struct {
	reflect.StructField
	in       reflect.Type // struct that declares it
	name     string
	optional bool // it may be absent
}

// has reports whether objects of a kind have the field; "": it is no object.
func (f field) has(kind api.Kind) bool {
	of := f.Tag.Get("of")
	return kind == "" || of == "" || slices.Contains(strings.Split(of, ","), string(kind))
}

// fieldsOf are the fields of a struct in JSON, with those of structs that are embedded in it.
func fieldsOf(t reflect.Type) []field {
	var out []field
	at := map[string]int{} // place in out, by name
	depth := map[string]int{}
	var walk func(t reflect.Type, level int)
	walk = func(t reflect.Type, level int) {
		for i := range t.NumField() {
			sf := t.Field(i)
			tag := sf.Tag.Get("json")
			if sf.Anonymous && tag == "" {
				inner := sf.Type
				if inner.Kind() == reflect.Pointer {
					inner = inner.Elem()
				}
				walk(inner, level+1)
				continue
			}
			if !sf.IsExported() || tag == "-" {
				continue
			}

			name, options, _ := strings.Cut(tag, ",")
			if name == "" {
				name = sf.Name
			}
			f := field{StructField: sf, in: t, name: name, optional: strings.Contains(options, "omit")}
			if i, has := at[name]; !has {
				at[name], depth[name] = len(out), level
				out = append(out, f)
			} else if level < depth[name] {
				out[i], depth[name] = f, level
			}
		}
	}
	walk(t, 0)
	return out
}

// snake writes a name as JSON does: PoolResized is pool_resized.
func snake(name string) string {
	var b strings.Builder
	for i, r := range name {
		begins := i > 0 && (!unicode.IsUpper(rune(name[i-1])) || i+1 < len(name) && unicode.IsLower(rune(name[i+1])))
		if unicode.IsUpper(r) && begins {
			b.WriteByte('_')
		}
		b.WriteRune(unicode.ToLower(r))
	}
	return b.String()
}

// schema is the whole schema.
func (b *builder) schema() *jsonschema.Schema {
	return &jsonschema.Schema{
		Schema: "https://json-schema.org/draft/2020-12/schema",
		Title:  "What pando prints with --json",
		Description: "The definition with the name of a command, such as \"pando golden import\", is what it prints. " +
			"Objects may have further fields.",
		Defs: b.defs,
	}
}

// Published is the schema as it is published.
func Published() ([]byte, error) {
	b := newBuilder(false)
	b.addResults()
	raw, err := json.MarshalIndent(b.schema(), "", "  ")
	if err != nil {
		return nil, fmt.Errorf("encode the schema: %w", err)
	}
	return append(raw, '\n'), nil
}
