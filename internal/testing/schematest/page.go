package schematest

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/google/jsonschema-go/jsonschema"
)

// thingsInOrder are the names of things, in the order of the page.
var thingsInOrder = []string{"volume", "snapshot", "generation", "golden", "pool", "event", "remote", "remote_volume",
	"point", "operation", "error"}

// page is the generated part of docs/json.md: the things, and what commands print.
func page() string {
	b := newBuilder(false)
	b.addResults()

	var out strings.Builder
	out.WriteString("## Things\n")
	for _, name := range thingsInOrder {
		fmt.Fprintf(&out, "\n### %s\n\n", name)
		b.writeFields(&out, name, nil)
	}

	// What commands print, and the definitions that only they need.
	out.WriteString("\n## What commands print\n\n| Command | Prints |\n| --- | --- |\n")
	for _, command := range slices.Sorted(maps.Keys(results)) {
		var words []string
		for _, s := range b.defs["pando "+command].AnyOf {
			words = append(words, typeWords(s))
		}
		fmt.Fprintf(&out, "| `pando %s` | %s |\n", command, strings.Join(words, "; or "))
	}

	out.WriteString("\n## Results\n")
	for _, name := range slices.Sorted(maps.Keys(b.defs)) {
		if things[name].of != nil || strings.HasPrefix(name, "pando ") {
			continue
		}
		fmt.Fprintf(&out, "\n### %s\n\n", name)
		base := b.baseOf(name)
		if base != "" {
			fmt.Fprintf(&out, "A [%s](#%s), and:\n\n", base, base)
		}
		b.writeFields(&out, name, b.defs[base])
	}
	return out.String()
}

// baseOf returns the thing that a definition has all fields of, "" if there is none.
func (b *builder) baseOf(name string) string {
	d := b.defs[name]
	for _, thing := range thingsInOrder {
		t := b.defs[thing]
		lacks := func(p string) bool { return d.Properties[p] == nil }
		named := slices.Contains(t.Required, "kind") || slices.Contains(t.Required, "name")
		if named && !slices.ContainsFunc(t.Required, lacks) && sameKind(d, t) {
			return thing
		}
	}
	return ""
}

// sameKind reports whether two definitions are of the same kind of object, or of none.
func sameKind(d, t *jsonschema.Schema) bool {
	x, y := d.Properties["kind"], t.Properties["kind"]
	if x == nil || y == nil {
		return x == y
	}
	return x.Const != nil && y.Const != nil && *x.Const == *y.Const || x.Const == nil && y.Const == nil
}

// writeFields writes a table of the fields of a definition, without those of base.
func (b *builder) writeFields(out *strings.Builder, name string, base *jsonschema.Schema) {
	out.WriteString("| Field | Type | What it is |\n| --- | --- | --- |\n")
	d := b.defs[name]
	for _, p := range d.PropertyOrder {
		if base != nil && base.Properties[p] != nil {
			continue
		}
		s := d.Properties[p]
		words := typeWords(s)
		if !slices.Contains(d.Required, p) {
			words += ", optional"
		}
		fmt.Fprintf(out, "| `%s` | %s | %s |\n", p, words, strings.ReplaceAll(s.Description, "|", `\|`))
	}
}

// typeWords says of what type a value is.
func typeWords(s *jsonschema.Schema) string {
	switch {
	case s.Ref != "":
		name := strings.TrimPrefix(s.Ref, "#/$defs/")
		return fmt.Sprintf("[%s](#%s)", name, name)
	case s.Const != nil:
		return fmt.Sprintf("`%q`", *s.Const)
	case len(s.AnyOf) > 0:
		var words []string
		for _, x := range s.AnyOf {
			words = append(words, typeWords(x))
		}
		return strings.Join(words, " or ")
	case s.Type == "array":
		return "list of " + typeWords(s.Items)
	case s.Format == "date-time":
		return "time"
	case s.Type == "object" && s.AdditionalProperties != nil:
		return "object of " + typeWords(s.AdditionalProperties)
	case s.Type != "":
		return s.Type
	}
	return "any"
}
