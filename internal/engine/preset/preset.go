// Package preset knows directories of programs that must not be cloned as they are: what identifies one copy of them,
// or belongs to a process that ran on them. Each preset is a file of rules, embedded or given by the user. Rules only
// concern the copy that becomes a generation, never its source.
package preset

import (
	"bufio"
	"bytes"
	"embed"
	"errors"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"

	"pando/internal/base/errs"
	"pando/internal/driver"
)

//go:embed *.rules
var embedded embed.FS

const (
	suffix  = ".rules"
	opRead  = "read preset"
	maxSize = 64 << 10 // of a file of rules
)

// Rules are what a preset says.
type Rules struct {
	Name    string
	About   string
	Overlay driver.OverlayPolicy // of goldens; "": as the user says

	owner     string    // program that uses the directory, for errors
	needs     []string  // patterns; without a match for each, this is another kind of directory
	locked    []string  // patterns of files that the owner keeps locked by flock(2) while it runs
	unmounted bool      // mounts below the directory mean that it is in use
	removals  []removal // from the copy
}

// removal removes what matches a pattern.
type removal struct {
	pattern   string
	filesOnly bool // no directories
}

// Names lists the embedded presets, sorted.
func Names() []string {
	files, _ := embedded.ReadDir(".") // of what was embedded, always there
	var out []string
	for _, f := range files {
		out = append(out, strings.TrimSuffix(f.Name(), suffix))
	}
	return out
}

// Load reads an embedded preset or, if name contains a slash, the user's file of that path. NotFound, Invalid.
func Load(name string) (*Rules, error) {
	if strings.Contains(name, "/") {
		b, err := readFile(name)
		if err != nil {
			return nil, err
		}
		return parse(name, b)
	}

	b, err := embedded.ReadFile(name + suffix)
	if err != nil {
		return nil, errs.New(errs.NotFound, opRead, name, "there is no preset of this name").
			WithHint("choose %s, or name a file of rules by a path such as ./%s%s", strings.Join(Names(), " or "), name,
				suffix)
	}
	return parse(name, b)
}

// readFile reads the user's file of rules.
func readFile(name string) ([]byte, error) {
	st, err := os.Stat(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, errs.New(errs.NotFound, opRead, name, "it does not exist")
	}
	if err != nil {
		return nil, errs.Wrap(opRead, name, err)
	}

	if !st.Mode().IsRegular() || st.Size() > maxSize {
		return nil, errs.New(errs.Invalid, opRead, name, "not a regular file of at most %s", errs.FormatBytes(maxSize))
	}

	b, err := os.ReadFile(name)
	return b, errs.Wrap(opRead, name, err)
}

// parse reads rules, one on each line. Invalid.
func parse(name string, b []byte) (*Rules, error) {
	r := &Rules{Name: name, owner: "a program"}
	line := 0
	for s := bufio.NewScanner(bytes.NewReader(b)); s.Scan(); {
		line++
		text := strings.TrimSpace(s.Text())
		if text == "" || text[0] == '#' {
			continue
		}

		word, value, _ := strings.Cut(text, " ")
		if why := r.add(word, strings.TrimSpace(value)); why != "" {
			return nil, errs.New(errs.Invalid, opRead, name, "line %d: %s: %q", line, why, text).
				WithHint("docs/presets.md lists the rules")
		}
	}
	return r, nil
}

// add adds a rule. It returns what is wrong with it, or "".
func (r *Rules) add(word, value string) string {
	if (value == "") != (word == "unmounted") {
		return "a rule is a word and a value, and unmounted has none"
	}

	switch word {
	case "about":
		r.About = value
	case "owner":
		r.owner = value
	case "unmounted":
		r.unmounted = true
	case "overlay":
		p, err := driver.ParseOverlayPolicy(opRead, value)
		if err != nil {
			return "not a policy for overlays"
		}
		r.Overlay = p
	case "needs", "locked", "remove", "remove-files":
		if !validPattern(value) {
			return "not a path inside the directory"
		}
		r.addPattern(word, value)
	default:
		return "unknown rule"
	}

	return ""
}

func (r *Rules) addPattern(word, value string) {
	switch word {
	case "needs":
		r.needs = append(r.needs, value)
	case "locked":
		r.locked = append(r.locked, value)
	default:
		r.removals = append(r.removals, removal{pattern: value, filesOnly: word == "remove-files"})
	}
}

// validPattern reports whether a pattern is a relative path that stays inside, with wildcards as in path.Match.
func validPattern(p string) bool {
	if path.IsAbs(p) || path.Clean(p) != p || p == "." {
		return false
	}
	return !slices.ContainsFunc(strings.Split(p, "/"), func(part string) bool {
		_, err := path.Match(part, "")
		return part == ".." || err != nil
	})
}
