package schematest

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"

	"pando/internal/api"

	"github.com/google/jsonschema-go/jsonschema"
)

// Check returns an error if what a command line with --json has printed is not what its schema says: results on
// standard output, and errors on standard error. Other lines there, such as warnings, are not looked at.
func Check(args []string, stdout, stderr []byte) error {
	if !slices.Contains(beforeDashes(args), "--json") || slices.Contains(args, "--shell") {
		return nil
	}

	err := checkErrors(stderr)
	command, known := commandOf(args)
	if !known || len(bytes.TrimSpace(stdout)) == 0 {
		return err
	}
	if command == "iostat" && slices.Contains(args, "--") {
		return err // standard output is that of the program
	}
	return errors.Join(err, checkValues(command, stdout))
}

// beforeDashes are the arguments before --, which are not those of another program.
func beforeDashes(args []string) []string {
	if i := slices.Index(args, "--"); i >= 0 {
		return args[:i]
	}
	return args
}

// commandOf returns the command of a command line.
func commandOf(args []string) (string, bool) {
	var words []string
	for i := 0; i < len(args); i++ {
		switch {
		case args[i] == "--pool":
			i++
		case !strings.HasPrefix(args[i], "-"):
			words = append(words, args[i])
		}
	}

	for n := min(3, len(words)); n > 0; n-- {
		command := strings.Join(words[:n], " ")
		if results[command] != nil || measurements[command] != nil {
			return command, true
		}
	}
	return "", false
}

// checkValues checks each value of JSON in a result.
func checkValues(command string, out []byte) error {
	alternatives, err := resolved(command)
	if err != nil {
		return err
	}
	for d := json.NewDecoder(bytes.NewReader(out)); ; {
		var v any
		if err := d.Decode(&v); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return fmt.Errorf("pando %s --json printed no JSON: %w in %s", command, err, out)
		}

		var failed []error
		for _, r := range alternatives {
			if err := r.Validate(v); err != nil {
				failed = append(failed, short(err))
			}
		}
		if at := emptyIn(v, ""); at != "" && results[command] != nil {
			return fmt.Errorf("pando %s --json printed an empty value: %s in %s", command, at, out)
		}
		if len(failed) == len(alternatives) {
			return fmt.Errorf("pando %s --json printed something else than its schema says: %w in %s", command,
				errors.Join(failed...), out)
		}
	}
}

// emptyIn returns the path of a value that is null or "" and should be absent; "" if there is none. Values of labels
// may be empty.
func emptyIn(v any, path string) string {
	switch v := v.(type) {
	case nil:
		return path + " is null"
	case string:
		if v == "" {
			return path + ` is ""`
		}
	case []any:
		for i, x := range v {
			if at := emptyIn(x, fmt.Sprintf("%s[%d]", path, i)); at != "" {
				return at
			}
		}
	case map[string]any:
		for k, x := range v {
			if k == "labels" {
				continue
			}
			if at := emptyIn(x, path+"."+k); at != "" {
				return at
			}
		}
	}
	return ""
}

// short is an error without the middle of a long text: it repeats all that was printed.
func short(err error) error {
	s := err.Error()
	if len(s) > 600 {
		s = s[:200] + " ... " + s[len(s)-400:]
	}
	return errors.New(s)
}

// checkErrors checks the lines of standard error that are errors.
func checkErrors(stderr []byte) error {
	r, err := resolveShape(a[api.Failure](), false)
	if err != nil {
		return err
	}
	for line := range bytes.Lines(stderr) {
		var v any
		if !bytes.HasPrefix(line, []byte(`{"error"`)) {
			continue
		}
		if err := json.Unmarshal(line, &v); err != nil {
			return fmt.Errorf("an error is no JSON: %w in %s", err, line)
		}
		if err := r.Validate(v); err != nil {
			return fmt.Errorf("an error is something else than its schema says: %w in %s", err, line)
		}
	}
	return nil
}

// resolved returns the schemas of what a command prints, of which one must hold.
func resolved(command string) (out []*jsonschema.Resolved, err error) {
	for _, s := range slices.Concat(results[command], measurements[command]) {
		r, err := resolveShape(s, measurements[command] != nil)
		if err != nil {
			return nil, err
		}
		out = append(out, r)
	}
	return out, nil
}

// known has the *jsonschema.Resolved of each shape.
var known sync.Map

// resolveShape returns the schema of a shape, in which no object may have a field that is not described. With nulls,
// lists may be null.
func resolveShape(s shape, nulls bool) (*jsonschema.Resolved, error) {
	if r, ok := known.Load(s); ok {
		return r.(*jsonschema.Resolved), nil
	}
	b := newBuilder(true)
	b.nulls = nulls
	root := b.shape(s)
	root.Defs = b.defs
	r, err := root.Resolve(nil)
	if err != nil {
		return nil, fmt.Errorf("the schema of %s: %w", s.of, err)
	}
	known.Store(s, r)
	return r, nil
}
