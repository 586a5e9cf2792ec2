package schematest

import (
	"flag"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write docs/json.md and docs/pando.schema.json")

// generatedBelow is the last line of docs/json.md that is written by hand.
const generatedBelow = "<!-- Generated from the types: go test ./internal/testing/schematest -update -->\n"

// TestPublished: the schema and the page in docs/ are those of the types.
func TestPublished(t *testing.T) {
	schema, err := Published()
	if err != nil {
		t.Fatal(err)
	}
	pageFile := filepath.Join(root(), "docs", "json.md")
	text, err := os.ReadFile(pageFile)
	if err != nil {
		t.Fatal(err)
	}
	byHand, _, is := strings.Cut(string(text), generatedBelow)
	if !is {
		t.Fatalf("%s lacks the line %s", pageFile, generatedBelow)
	}

	for file, want := range map[string]string{
		filepath.Join(root(), "docs", "pando.schema.json"): string(schema),
		pageFile: byHand + generatedBelow + "\n" + page(),
	} {
		if *update {
			if err := os.WriteFile(file, []byte(want), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		if got, err := os.ReadFile(file); err != nil || string(got) != want {
			t.Errorf("%s is not that of the types (%v): run go test ./internal/testing/schematest -update", file, err)
		}
	}
}

// TestDescribed: each field of the published schema says what it is, alone.
func TestDescribed(t *testing.T) {
	b := newBuilder(false)
	b.addResults()
	for name, d := range b.defs {
		for p, s := range d.Properties {
			if s.Description == "" {
				t.Errorf("%s.%s has no comment", name, p)
			}
			for _, begin := range []string{"of ", "that ", "which ", "whose ", "with ", "from ",
				"in ", "until ", "to ", "likewise"} {
				if strings.HasPrefix(s.Description, begin) {
					t.Errorf("%s.%s: the comment %q does not stand alone", name, p, s.Description)
				}
			}
		}
	}
	if len(thingsInOrder) != len(things) || slices.ContainsFunc(thingsInOrder, func(n string) bool {
		return things[n].of == nil
	}) {
		t.Errorf("the page has %v, but the things are others", thingsInOrder)
	}
}

// TestCheckRefuses: what is not as the schema says is found.
func TestCheckRefuses(t *testing.T) {
	version := `{"version":"1","go":"g","os":"linux","arch":"amd64","identity_format":1`
	for _, c := range []struct {
		args, stdout, stderr string
		ok                   bool
	}{
		{"version --json", version + "}", "", true},
		{"--pool /p version --json", version + "}", "pando: warning: x", true},
		{"version", "pando 1", "", true},
		{"version --json", "pando 1", "", false},
		{"version --json", version + `,"more":1}`, "", false},
		{"version --json", `{"version":"1"}`, "", false},
		{"version --json", strings.Replace(version, `"1"`, "null", 1) + "}", "", false},
		{"version --json", strings.Replace(version, `"g"`, `""`, 1) + "}", "", false},
		{"label ls x --json", `{"ref":"x","labels":{"a":""}}`, "", true},
		{"destroy x --json", "null", "", false},
		{"destroy x --json", "[]", "", true},
		{"history --json --follow", `{"seq":1,"at":"2026-01-02T03:04:05Z","event":"init","who_uid":0}` + "\n" +
			`{"seq":2,"at":"2026-01-02T03:04:05Z","event":"boot","who_uid":0}`, "", true},
		{"mount x --json", "", `{"error":{"kind":"not_found","message":"x"}}`, true},
		{"mount x --json", "", `{"error":{"kind":"not_found"}}`, false},
		{"mount x --json", "", `{"error":{"kind":"not_found","message":"x","more":1}}`, false},
	} {
		if err := Check(strings.Fields(c.args), []byte(c.stdout), []byte(c.stderr)); (err == nil) != c.ok {
			t.Errorf("%s: %s %s: %v", c.args, c.stdout, c.stderr, err)
		}
	}
}
