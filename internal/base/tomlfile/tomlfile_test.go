package tomlfile

import (
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"pando/internal/base/errs"
)

type file struct {
	A     string
	Tasks []struct {
		B int
		C struct{ D string }
	} `toml:"task"`
}

const text = `a = "x"

[[task]]
b = 1

[[task]]  # the second
c.d = "y"
[[task]]
b = 2
[task.c]
d = "z"
`

// TestLines finds the lines of all keys.
func TestLines(t *testing.T) {
	var f file
	if err := Decode("test", "f", []byte(text), &f, "none"); err != nil || len(f.Tasks) != 3 || f.Tasks[2].C.D != "z" {
		t.Fatalf("%+v, %v", f, err)
	}
	want := Lines{"a": 1, "task.0": 3, "task.0.b": 4, "task.1": 6, "task.1.c.d": 7, "task.2": 8, "task.2.b": 9,
		"task.2.c": 10, "task.2.c.d": 11}
	if got := LinesOf([]byte(text)); !maps.Equal(got, want) {
		t.Errorf("got %v", got)
	}
}

// TestMistakes: errors say where a mistake is.
func TestMistakes(t *testing.T) {
	for bad, want := range map[string]string{
		"a = 1":                         "line 1",
		"\nx = 1":                       `line 2: there is no key "x" here`,
		"[[task]]\nb = 1\n\nc.e = \"\"": `line 4: there is no key "task.c.e" here`,
		"a = \"x":                       "line 1",
		"a = \"x\"\na = \"y\"":          "a",
	} {
		var f file
		err := Decode("read test", "f.toml", []byte(bad), &f, "use other keys")
		if !errs.Is(err, errs.Invalid) || !strings.HasPrefix(err.Error(), "read test f.toml: ") ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v", bad, err)
		}
		if strings.Contains(want, "no key") && errs.HintOf(err) != "use other keys" {
			t.Errorf("%q: hint %q", bad, errs.HintOf(err))
		}
	}

	dir := t.TempDir()
	if _, err := Read("read", "a test file", dir); !errs.Is(err, errs.Invalid) ||
		!strings.Contains(err.Error(), "not a test file") {
		t.Errorf("a directory: %v", err)
	}
	if _, err := Read("read", "a test file", filepath.Join(dir, "none")); !errs.Is(err, errs.NotFound) {
		t.Errorf("no file: %v", err)
	}
	name := filepath.Join(dir, "f")
	if err := os.WriteFile(name, make([]byte, maxBytes+1), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Read("read", "a test file", name); !errs.Is(err, errs.Invalid) {
		t.Errorf("a large file: %v", err)
	}
}
