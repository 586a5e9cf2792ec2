package main

import (
	"errors"
	"fmt"
	"os"
	"regexp"
	"strings"
	"time"
)

// The list of known flaky tests is short, and its entries are for a while: they wait for somebody to find the cause.
const (
	maxKnown = 10
	oldEntry = 30 * 24 * time.Hour
)

// flaky is a line of the list: a test that is known to fail at times, and how.
type flaky struct {
	pkg, test string
	signature *regexp.Regexp // in its output
	since     time.Time
	suspicion string
}

// isListed reports whether a failure is one of a flaky test.
func (f failure) isListed(known flaky) bool {
	return f.test != "" && f.pkg == known.pkg && f.test == known.test && known.signature.MatchString(f.output)
}

// readFlaky reads the list. Its lines have five fields with tabs in between: package, top-level test, signature (a
// regular expression), date, suspicion. Lines that begin with # are comments. No path: no list.
func readFlaky(path string) (known []flaky, err error) {
	if path == "" {
		return nil, nil
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}

	n := 0
	for line := range strings.Lines(string(text)) {
		n++
		line = strings.TrimSuffix(line, "\n")
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		entry, err := parseFlaky(line)
		if err != nil {
			return nil, fmt.Errorf("%s:%d: %w", path, n, err)
		}
		known = append(known, entry)
	}

	if len(known) > maxKnown {
		return nil, fmt.Errorf("%s lists %d flaky tests, more than %d: find the cause of some", path, len(known), maxKnown)
	}
	return known, nil
}

func parseFlaky(line string) (f flaky, err error) {
	fields := strings.Split(line, "\t")
	if len(fields) != 5 {
		return f, fmt.Errorf("%d fields, want 5: package, test, signature, date, suspicion", len(fields))
	}
	f.pkg, f.test, f.suspicion = fields[0], fields[1], fields[4]

	var serr, derr error
	f.signature, serr = regexp.Compile(fields[2])
	f.since, derr = time.Parse(time.DateOnly, fields[3])
	if err := errors.Join(serr, derr); err != nil {
		return f, err
	}
	isTop := strings.HasPrefix(f.test, "Test") && !strings.Contains(f.test, "/")
	if f.pkg == "" || !isTop || fields[2] == "" || f.suspicion == "" {
		return f, errors.New("each field must be set, and the test be a top-level one")
	}
	return f, nil
}

// old returns a warning about an entry that has been there for long, or "".
func (f flaky) old(now time.Time) string {
	if age := now.Sub(f.since); age > oldEntry {
		return fmt.Sprintf("%s %s has been listed as flaky for %d days: find its cause", f.pkg, f.test, int(age.Hours()/24))
	}
	return ""
}
