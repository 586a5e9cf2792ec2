package service

import (
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"pando/internal/driver/plain"
)

// documentFile is the copy of the OpenAPI document in the repository, from which clients are made.
const documentFile = "../../../api/openapi.json"

// TestDocument holds the document against the copy in the repository. PANDO_UPDATE=1 writes it, unless it breaks
// clients of the copy.
func TestDocument(t *testing.T) {
	s := serve(t, newPool(t, plain.Name))
	kept, err := os.ReadFile(documentFile)
	if err != nil && os.Getenv("PANDO_UPDATE") == "" {
		t.Fatal(err)
	}

	if err == nil {
		for _, b := range breaks(t, kept, s.document) {
			t.Errorf("this breaks clients: %s", b)
		}
	}
	switch {
	case string(kept) == string(s.document) || t.Failed():
	case os.Getenv("PANDO_UPDATE") != "":
		must(t, os.WriteFile(documentFile, s.document, 0o644))
	default:
		t.Errorf("%s is not the document of this program: run make openapi", documentFile)
	}

	if status, body := s.raw("GET", documentPath, ""); status != 200 || body != string(s.document) {
		t.Errorf("the service has another document: %d, %d bytes", status, len(body))
	}
}

// node is a part of a JSON document.
type node = map[string]any

func parseDocument(t *testing.T, text []byte) node {
	t.Helper()
	var out node
	must(t, json.Unmarshal(text, &out))
	return out
}

// at returns what is below a node; nil if it is not there.
func at(n any, keys ...string) any {
	for _, k := range keys {
		m, _ := n.(node)
		n = m[k]
	}
	return n
}

// breaks lists what clients of the document before cannot bear in the document after: a route that is gone, a field of
// an answer that is gone or has another type, a field or parameter of a request that is gone, is required now, or has
// lost values.
func breaks(t *testing.T, before, after []byte) (out []string) {
	old, now := parseDocument(t, before), parseDocument(t, after)
	paths, _ := at(old, "paths").(node)
	for path, item := range paths {
		for method, op := range item.(node) {
			there := at(now, "paths", path, method)
			if there == nil {
				out = append(out, method+" "+path+" is gone")
				continue
			}
			out = append(out, parameterBreaks(method+" "+path, op, there)...)
			for status := range at(op, "responses").(node) {
				if at(there, "responses", status) == nil {
					out = append(out, fmt.Sprintf("%s %s: no status %s", method, path, status))
				}
			}
		}
	}

	schemas, _ := at(old, "components", "schemas").(node)
	for name, schema := range schemas {
		there := at(now, "components", "schemas", name)
		if there == nil {
			out = append(out, "the schema "+name+" is gone")
			continue
		}
		out = append(out, schemaBreaks(name, schema, there)...)
	}
	slices.Sort(out)
	return out
}

func parameterBreaks(where string, before, after any) (out []string) {
	find := func(op any, name string) any {
		all, _ := at(op, "parameters").([]any)
		for _, p := range all {
			if at(p, "name") == name {
				return p
			}
		}
		return nil
	}
	all, _ := at(before, "parameters").([]any)
	for _, p := range all {
		name := at(p, "name").(string)
		if find(after, name) == nil {
			out = append(out, where+": the parameter "+name+" is gone")
		}
	}
	all, _ = at(after, "parameters").([]any)
	for _, p := range all {
		name := at(p, "name").(string)
		if was := find(before, name); at(p, "required") == true && at(was, "required") != true {
			out = append(out, where+": the parameter "+name+" is required now")
		}
	}
	return out
}

func schemaBreaks(name string, before, after any) (out []string) {
	request := strings.HasSuffix(name, requestSuffix)
	required := func(s any) []any { r, _ := at(s, "required").([]any); return r }
	fields, _ := at(before, "properties").(node)
	for field, was := range fields {
		is := at(after, "properties", field)
		switch {
		case is == nil:
			out = append(out, name+"."+field+" is gone")
		case fmt.Sprint(at(was, "type"), at(was, "$ref")) != fmt.Sprint(at(is, "type"), at(is, "$ref")):
			out = append(out, name+"."+field+" has another type")
		case request && lost(at(was, "enum"), at(is, "enum")):
			out = append(out, name+"."+field+" has lost values")
		case !request && slices.Contains(required(before), any(field)) && !slices.Contains(required(after), any(field)):
			out = append(out, name+"."+field+" may be missing now")
		}
	}
	for _, field := range required(after) {
		if request && !slices.Contains(required(before), field) {
			out = append(out, fmt.Sprintf("%s.%v is required now", name, field))
		}
	}
	return out
}

// lost reports whether a list of values has become shorter.
func lost(before, after any) bool {
	was, _ := before.([]any)
	is, limited := after.([]any)
	return limited && (len(was) == 0 || slices.ContainsFunc(was, func(v any) bool { return !slices.Contains(is, v) }))
}

// TestBreaksAreFound changes a document in ways that break clients, and in ways that do not.
func TestBreaksAreFound(t *testing.T) {
	const before = `{"paths": {"/a": {"get": {"parameters": [{"name": "p"}], "responses": {"200": {}}}}},
		"components": {"schemas": {
		"Answer": {"properties": {"x": {"type": "string"}, "y": {"type": "integer"}}, "required": ["x"]},
		"ARequest": {"properties": {"z": {"type": "string", "enum": ["a", "b"]}}}}}}`
	for _, c := range []struct{ from, to, want string }{
		{`"/a"`, `"/b"`, "is gone"},
		{`"get"`, `"put"`, "is gone"},
		{`"name": "p"`, `"name": "q"`, "the parameter p is gone"},
		{`"name": "p"`, `"name": "p", "required": true`, "is required now"},
		{`"200"`, `"201"`, "no status 200"},
		{`"x": {"type": "string"}`, `"x": {"type": "integer"}`, "another type"},
		{`"y": {"type": "integer"}`, `"w": {"type": "integer"}`, "Answer.y is gone"},
		{`"required": ["x"]`, `"required": []`, "may be missing"},
		{`"enum": ["a", "b"]}}`, `"enum": ["a"]}}`, "lost values"},
		{`"enum": ["a", "b"]}}`, `"enum": ["a", "b"]}}, "required": ["z"]`, "ARequest.z is required"},
		{`"enum": ["a", "b"]}}`, `"enum": ["a", "b", "c"]}, "n": {"type": "string"}}`, ""},
		{`"y": {"type": "integer"}`, `"y": {"type": "integer"}, "w": {"type": "integer"}`, ""},
		{`"paths": {`, `"paths": {"/new": {"get": {}}, `, ""},
	} {
		after := strings.Replace(before, c.from, c.to, 1)
		got := strings.Join(breaks(t, []byte(before), []byte(after)), "; ")
		if c.want == "" && got != "" || !strings.Contains(got, c.want) {
			t.Errorf("%s -> %s: %q, want %q", c.from, c.to, got, c.want)
		}
	}
}

// TestPathsHaveTheirParameters: each part of a path in braces is a parameter, or handlers would not see it.
func TestPathsHaveTheirParameters(t *testing.T) {
	s := serve(t, newPool(t, plain.Name))
	part := regexp.MustCompile(`\{(\w+)\}`)
	paths := at(parseDocument(t, s.document), "paths").(node)
	for path, item := range paths {
		for method, op := range item.(node) {
			for _, m := range part.FindAllStringSubmatch(path, -1) {
				all, _ := at(op, "parameters").([]any)
				if !slices.ContainsFunc(all, func(p any) bool { return at(p, "name") == m[1] && at(p, "in") == "path" }) {
					t.Errorf("%s %s: %s is not a parameter", method, path, m[1])
				}
			}
		}
	}
}
