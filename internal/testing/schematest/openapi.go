package schematest

import (
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/front/rest"

	"github.com/google/jsonschema-go/jsonschema"
)

// document is an OpenAPI 3.1 document, as far as ours has parts.
type document struct {
	OpenAPI    string                          `json:"openapi"`
	Info       map[string]string               `json:"info"`
	Servers    []map[string]string             `json:"servers"`
	Paths      map[string]map[string]operation `json:"paths"`
	Components struct {
		Schemas map[string]*jsonschema.Schema `json:"schemas"`
	} `json:"components"`
}

type operation struct {
	ID         string            `json:"operationId"`
	Summary    string            `json:"summary"`
	Parameters []parameter       `json:"parameters,omitempty"`
	Body       *body             `json:"requestBody,omitempty"`
	Responses  map[string]answer `json:"responses"`
}

type parameter struct {
	Name        string             `json:"name"`
	In          string             `json:"in"`
	Description string             `json:"description"`
	Required    bool               `json:"required,omitempty"`
	Schema      *jsonschema.Schema `json:"schema"`
}

type body struct {
	Required bool               `json:"required"`
	Content  map[string]content `json:"content"`
}

type answer struct {
	Description string             `json:"description"`
	Content     map[string]content `json:"content,omitempty"`
}

type content struct {
	Schema *jsonschema.Schema `json:"schema"`
}

var pathParameter = regexp.MustCompile(`\{(\w+)\}`)

// OpenAPI is the description of the service.
func OpenAPI() ([]byte, error) {
	d := document{OpenAPI: "3.1.0", Paths: map[string]map[string]operation{},
		Info: map[string]string{"title": "Pando", "version": "1",
			"description": "Clones for users without root, over a unix socket. Objects may have further fields."},
		Servers: []map[string]string{{"url": "http://pando", "description": "through the socket of `pando serve`"}}}
	b := newBuilder(false)
	for _, r := range rest.Routes() {
		if d.Paths[r.Path] == nil {
			d.Paths[r.Path] = map[string]operation{}
		}
		d.Paths[r.Path][strings.ToLower(r.Method)] = b.operation(r)
	}
	d.Components.Schemas = b.defs
	raw, err := json.MarshalIndent(d, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("encode the description: %w", err)
	}

	// Only what requests and answers need.
	used := usedDefinitions(b, string(raw[:strings.Index(string(raw), `"components"`)]))
	maps.DeleteFunc(b.defs, func(name string, _ *jsonschema.Schema) bool { return !used[name] })
	if raw, err = json.MarshalIndent(d, "", "  "); err != nil {
		return nil, fmt.Errorf("encode the description: %w", err)
	}
	return []byte(strings.ReplaceAll(string(raw), `"#/$defs/`, `"#/components/schemas/`) + "\n"), nil
}

var definition = regexp.MustCompile(`"#/\$defs/(\w+)"`)

// usedDefinitions returns the definitions that a text refers to, and those that they refer to.
func usedDefinitions(b *builder, text string) map[string]bool {
	used := map[string]bool{}
	for queue := []string{text}; len(queue) > 0; queue = queue[1:] {
		for _, m := range definition.FindAllStringSubmatch(queue[0], -1) {
			if !used[m[1]] {
				used[m[1]] = true
				raw, _ := json.Marshal(b.defs[m[1]]) // it was encoded before
				queue = append(queue, string(raw))
			}
		}
	}
	return used
}

// operation describes a route.
func (b *builder) operation(r rest.Route) operation {
	o := operation{ID: r.ID, Summary: r.Summary, Responses: map[string]answer{}}
	for _, m := range pathParameter.FindAllStringSubmatch(r.Path, -1) {
		o.Parameters = append(o.Parameters, parameter{Name: m[1], In: "path", Required: true,
			Description: "name of what the path is about", Schema: &jsonschema.Schema{Type: "string"}})
	}
	for _, p := range r.Query {
		s := &jsonschema.Schema{Type: p.Type}
		if p.Many {
			s = &jsonschema.Schema{Type: "array", Items: s}
		}
		o.Parameters = append(o.Parameters, parameter{Name: p.Name, In: "query", Description: p.Description, Schema: s})
	}
	if r.Body != nil {
		s := b.ref(r.Body, "")
		needed := len(b.defs[strings.TrimPrefix(s.Ref, "#/$defs/")].Required) > 0
		o.Body = &body{Required: needed, Content: map[string]content{"application/json": {s}}}
	}

	o.Responses[strconv.Itoa(r.Status)] = answer{"what was asked for",
		map[string]content{"application/json": {b.ref(r.Answer, r.Kind)}}}
	problem := map[string]content{"application/problem+json": {b.ref(reflect.TypeFor[api.Problem](), "")}}
	var statuses []int
	for _, k := range errs.Kinds() {
		if s := k.Codes().HTTP; !slices.Contains(statuses, s) {
			statuses = append(statuses, s)
		}
	}
	for _, s := range statuses {
		var kinds []string
		for _, k := range errs.Kinds() {
			if k.Codes().HTTP == s {
				kinds = append(kinds, string(k))
			}
		}
		o.Responses[strconv.Itoa(s)] = answer{"error: " + strings.Join(kinds, ", "), problem}
	}
	return o
}

// Incompatible lists what programs that were written for one description could not do with another: operations,
// parameters and fields that are gone, have another type, may be absent, or have to be given.
func Incompatible(old, now []byte) (out []string, err error) {
	var was, is any
	if err := json.Unmarshal(old, &was); err != nil {
		return nil, fmt.Errorf("read the old description: %w", err)
	}
	if err := json.Unmarshal(now, &is); err != nil {
		return nil, fmt.Errorf("read the new description: %w", err)
	}
	c := comparison{inBodies: schemasOfBodies(was)}
	c.compare("", was, is)
	return c.found, nil
}

type comparison struct {
	inBodies map[string]bool // schemas that requests have
	found    []string
}

// compare compares two values at a path of the document.
func (c *comparison) compare(path string, was, is any) {
	switch was := was.(type) {
	case map[string]any:
		now, ok := is.(map[string]any)
		if !ok {
			c.found = append(c.found, path+" is gone")
			return
		}
		for _, key := range slices.Sorted(maps.Keys(was)) {
			at := path + "/" + key
			switch {
			case slices.Contains([]string{"description", "summary", "info", "title"}, key):
			case key == "required" && path != "" && !strings.HasSuffix(path, "/properties"):
				c.compareRequired(at, was[key], now[key])
			case key == "parameters":
				c.compare(at, byName(was[key]), byName(now[key]))
			case now[key] == nil:
				c.found = append(c.found, at+" is gone")
			default:
				c.compare(at, was[key], now[key])
			}
		}
		if now["required"] != nil && was["required"] == nil && !strings.HasSuffix(path, "/properties") {
			c.compareRequired(path+"/required", nil, now["required"])
		}
	case []any:
		now, ok := is.([]any)
		if !ok || len(now) < len(was) {
			c.found = append(c.found, path+" is shorter")
			return
		}
		for i := range was {
			c.compare(path+"/"+strconv.Itoa(i), was[i], now[i])
		}
	default:
		if !reflect.DeepEqual(was, is) {
			c.found = append(c.found, fmt.Sprintf("%s was %v, and is %v", path, was, is))
		}
	}
}

// compareRequired compares what has to be there: requests may ask for no more, and answers have no less.
func (c *comparison) compareRequired(path string, was, is any) {
	before, now := words(was), words(is)
	schema := strings.TrimSuffix(strings.TrimPrefix(path, "/components/schemas/"), "/required")
	request := c.inBodies[schema] || !strings.HasPrefix(path, "/components/")
	for _, w := range now {
		if request && !slices.Contains(before, w) {
			c.found = append(c.found, path+" demands "+w)
		}
	}
	for _, w := range before {
		if !request && !slices.Contains(now, w) {
			c.found = append(c.found, path+" lacks "+w)
		}
	}
}

// words are the strings in a list, or true as one.
func words(v any) (out []string) {
	if v == true {
		return []string{"it"}
	}
	list, _ := v.([]any)
	for _, w := range list {
		out = append(out, fmt.Sprint(w))
	}
	return out
}

// byName makes a list of parameters one by their names, so that their order does not matter.
func byName(v any) map[string]any {
	out := map[string]any{}
	list, _ := v.([]any)
	for _, p := range list {
		if p, ok := p.(map[string]any); ok {
			out[fmt.Sprint(p["name"])] = p
		}
	}
	return out
}

// schemasOfBodies are the names of schemas that bodies of requests have.
func schemasOfBodies(doc any) map[string]bool {
	out := map[string]bool{}
	var walk func(v any, body bool)
	walk = func(v any, body bool) {
		switch v := v.(type) {
		case map[string]any:
			for key, inner := range v {
				if name, is := inner.(string); is && key == "$ref" && body {
					out[strings.TrimPrefix(name, "#/components/schemas/")] = true
				}
				walk(inner, body || key == "requestBody")
			}
		case []any:
			for _, inner := range v {
				walk(inner, body)
			}
		}
	}
	walk(doc, false)
	return out
}
