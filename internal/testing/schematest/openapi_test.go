package schematest

import (
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

var breaking = flag.Bool("breaking", false, "with -update: write a description of the service that breaks programs")

// TestOpenAPI: the description of the service is that of its routes and types, and programs that were written for the
// one before still work.
func TestOpenAPI(t *testing.T) {
	want, err := OpenAPI()
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(root(), "internal", "front", "rest", "openapi.json")
	got, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	broken, err := Incompatible(got, want)
	if err != nil {
		t.Fatal(err)
	}
	if len(broken) > 0 && !*breaking {
		t.Fatalf("programs that use the service would break:\n%s", strings.Join(broken, "\n"))
	}
	if *update {
		if err := os.WriteFile(file, want, 0o644); err != nil {
			t.Fatal(err)
		}
		got = want
	}
	if string(got) != string(want) {
		t.Errorf("%s is not that of the types: run go test ./internal/testing/schematest -update", file)
	}
}

// TestIncompatible: what breaks programs is found, and nothing else.
func TestIncompatible(t *testing.T) {
	old, err := OpenAPI()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ old, now, want string }{
		{`"operationId": "showPool"`, `"operationId": "pool"`, "was showPool"},
		{`"/v1/pool"`, `"/v1/pools"`, "is gone"},
		{`"name": "limit"`, `"name": "most"`, "limit is gone"},
		{"\"from\",\n", "\"from\",\n \"labels\",\n", "demands labels"},
		{`"owner_uid": {`, `"uid": {`, "owner_uid is gone"},
		{`"description": "size of the block device`, `"description": "how large it is`, ""},
		{`"/v1/pool": {`, `"/v1/more": {}, "/v1/pool": {`, ""},
	} {
		if !strings.Contains(string(old), c.old) {
			t.Errorf("the description has no %s", c.old)
			continue
		}
		got, err := Incompatible(old, []byte(strings.Replace(string(old), c.old, c.now, 1)))
		text := strings.Join(got, "\n")
		if err != nil || (c.want == "") != (text == "") || !strings.Contains(text, c.want) {
			t.Errorf("%s -> %s: %q, %v", c.old, c.now, text, err)
		}
	}
}
