// Package tomlfile reads files in TOML, and says in which line a mistake is.
package tomlfile

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"

	"pando/internal/base/errs"

	"github.com/pelletier/go-toml/v2"
	"github.com/pelletier/go-toml/v2/unstable"
)

// maxBytes limits the size of a file: a larger one is something else.
const maxBytes = 1 << 20

// Read reads the text of a file that is what: "a build file". NotFound, Permission, Invalid. Errors name op.
func Read(op, what, name string) ([]byte, error) {
	st, err := os.Stat(name)
	if err != nil {
		return nil, errs.Wrap(op, name, err)
	}
	if !st.Mode().IsRegular() || st.Size() > maxBytes {
		return nil, errs.New(errs.Invalid, op, name, "not %s: it must be a file of at most %s", what,
			errs.FormatBytes(maxBytes))
	}
	text, err := os.ReadFile(name)
	return text, errs.Wrap(op, name, err)
}

// CheckOwned refuses a file that anybody but root and the user of this process can change. Permission.
func CheckOwned(op, name string) error {
	st, err := os.Stat(name)
	if err != nil {
		return errs.Wrap(op, name, err)
	}
	if st.Mode().Perm()&0o022 != 0 {
		return errs.New(errs.Permission, op, name, "others may change it (mode %o), and it has commands that are run",
			st.Mode().Perm()).WithHint("run `chmod go-w %s`", errs.ShellWord(name))
	}
	if sys, ok := st.Sys().(*syscall.Stat_t); ok && sys.Uid != 0 && int(sys.Uid) != os.Geteuid() {
		return errs.New(errs.Permission, op, name, "it belongs to user %d, and has commands that are run", sys.Uid).
			WithHint("run `chown root %s`", errs.ShellWord(name))
	}
	return nil
}

// Decode decodes the text of the file name into v, which must have a field for each key. keys is the hint for a key
// that does not exist. Invalid, with the line. Errors name op.
func Decode(op, name string, text []byte, v any, keys string) error {
	err := toml.NewDecoder(bytes.NewReader(text)).DisallowUnknownFields().Decode(v)
	var unknown *toml.StrictMissingError
	var wrong *toml.DecodeError
	switch {
	case errors.As(err, &unknown) && len(unknown.Errors) > 0:
		line, _ := unknown.Errors[0].Position()
		return errs.New(errs.Invalid, op, name, "line %d: there is no key %q here", line,
			strings.Join(unknown.Errors[0].Key(), ".")).WithHint("%s", keys)
	case errors.As(err, &wrong):
		line, column := wrong.Position()
		return errs.New(errs.Invalid, op, name, "line %d, column %d: %s", line, column,
			strings.TrimPrefix(wrong.Error(), "toml: "))
	case err != nil:
		return errs.New(errs.Invalid, op, name, "%s", strings.TrimPrefix(err.Error(), "toml: "))
	}
	return nil
}

// Lines has the lines in which keys are, the first being 1. Keys of the third [[task]] begin with "task.2".
type Lines map[string]int

// LinesOf returns the lines of the keys in a text that Decode has read.
func LinesOf(text []byte) Lines {
	out := Lines{}
	counts := map[string]int{}
	table := ""
	var p unstable.Parser
	p.Reset(text)
	for p.NextExpression() {
		e := p.Expression()
		var parts []string
		line := 0
		for k := e.Key(); k.Next(); {
			if line == 0 {
				line = p.Shape(k.Node().Raw).Start.Line
			}
			parts = append(parts, string(k.Node().Data))
		}

		name := strings.Join(parts, ".")
		switch e.Kind {
		case unstable.ArrayTable:
			table = fmt.Sprintf("%s.%d", name, counts[name])
			counts[name]++
			out[table] = line
		case unstable.Table:
			if n := counts[parts[0]]; n > 0 {
				parts[0] = fmt.Sprintf("%s.%d", parts[0], n-1)
			}
			table = strings.Join(parts, ".")
			out[table] = line
		case unstable.KeyValue:
			if table != "" {
				name = table + "." + name
			}
			out[name] = line
		}
	}
	return out
}
