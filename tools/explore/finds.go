//go:build linux

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"

	"pando/tools/testrun"
)

var (
	faultAt = regexp.MustCompile(`PANDO_FAULT_AT=[\w-]+`)
	// What the fuzzer has written to testdata/fuzz, now or before.
	fuzzInput = regexp.MustCompile(`(?:written to testdata/fuzz/|seed corpus entry: )(\w+/[\w.-]+)`)
)

// reportAll prints what failed, and returns how many finds there are of each test.
func (s *search) reportAll(u unit, r *testrun.Result) (map[string]int, error) {
	finds := map[string]int{}
	failed := r.Failures()
	for _, t := range failed {
		top, _, _ := strings.Cut(t.Name, "/")
		finds[top]++
		if err := s.report(u, t.Name, t.Output); err != nil {
			return nil, err
		}
	}
	if len(failed) > 0 || r.Status == 0 || r.Stopped {
		return finds, nil
	}

	// What isolate finds left behind belongs to no test, nor does what a binary says that dies.
	finds[u.items[0].name]++
	return finds, s.report(u, "", r.Output)
}

// report prints a find that is new: what failed, where its output is, and a line that repeats it.
func (s *search) report(u unit, test, output string) error {
	at, command := faultAt.FindString(output), u.command(test, output)
	key := command
	if at != "" {
		key = test + at // whatever shard and seed struck that step
	}
	if s.found[key] {
		return nil
	}
	s.found[key] = true
	if test == "" {
		test = u.items[0].name
	}
	name := strings.ReplaceAll(u.pkg.Name()+"."+test, "/", "_")
	path := filepath.Join(s.keep, name+"."+strconv.Itoa(len(s.found)))
	if err := os.MkdirAll(s.keep, 0o777); err != nil {
		return err
	}
	fmt.Fprintf(s.out, "FOUND  %s %s; its output is in %s; to repeat it:\n%s\n", u.pkg.Name(), test, path, command)
	return os.WriteFile(path, []byte(output), 0o666)
}

// command repeats a failure. Variables stand before make, which would take a $ in its arguments for its own.
func (u unit) command(test, output string) string {
	var words []string
	if u.draw.seed > 1 { // the default of faulttest
		words = append(words, "PANDO_SEED="+strconv.FormatUint(u.draw.seed, 10))
	}
	if u.draw.shard > 0 {
		words = append(words, "PANDO_SHARD="+strconv.Itoa(u.draw.shard))
	}
	if at := faultAt.FindString(output); at != "" {
		words = append(words, at)
	}

	pattern := u.pattern()
	if test != "" {
		pattern = exactly(test)
	}
	if input := fuzzInput.FindStringSubmatch(output); input != nil {
		pattern = exactly(input[1])
	}
	words = append(words, "RUN='"+strings.ReplaceAll(pattern, "'", `'\''`)+"'")
	return strings.Join(append(words, "make test PKG=./"+u.pkg.Name()), " ")
}
