// Testsum runs `go test -json` with its arguments and says in few words how it
// went: a line a package, the output of what failed, what was skipped and why,
// and at the end a line with the counts.
//
//	testsum -events [FILE...]
//
// runs nothing, and reads what `go tool test2json` has printed from the files,
// or from standard input if there are none. A package that begins and does not
// end there has failed, and so has a run without any package.
//
// With PANDO_TEST_REQUIRE_ALL=1 a test that is skipped for want of something
// that this host should have (root, a program, a kernel feature) counts as
// failed. Such tests say "SKIPPED: ..."; a test that does not apply, such as one
// of images for a driver that has none, says so in other words.
//
// PANDO_TEST_COUNTS names a file that gets the line with the counts, too.
package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"
)

// mayBeMissing are reasons to skip that say nothing bad about a host.
var mayBeMissing = regexp.MustCompile(strings.Join([]string{
	`SKIPPED: no C compiler`,
	`SKIPPED: the headers of this system do not know them`,
	`SKIPPED: the filesystem of the temporary directory takes 65,002 hard links`,
	`SKIPPED: before Linux 6\.8 the kernel`,
	`SKIPPED: this kernel does not swap on it`,
	`SKIPPED: no overlays here`,
	`SKIPPED: nothing known in /usr/sbin`,
	`SKIPPED: .* needs the capability CAP_SYS_RESOURCE`,
}, "|"))

func main() {
	s := newSummary(os.Stdout, os.Getenv("PANDO_TEST_REQUIRE_ALL") == "1")
	stop := make(chan struct{})
	go s.tellStillRunning(stop)
	var err error
	if len(os.Args) > 1 && os.Args[1] == "-events" {
		err = s.readFiles(os.Args[2:])
	} else {
		err = s.goTest(os.Args[1:])
	}
	close(stop)
	s.endAll()
	if err != nil {
		fmt.Fprintln(os.Stderr, "testsum:", err)
		s.failed++
	}
	s.finish()
	if path := os.Getenv("PANDO_TEST_COUNTS"); path != "" {
		if err := os.WriteFile(path, []byte(s.counts()), 0o666); err != nil {
			fmt.Fprintln(os.Stderr, "testsum:", err)
			os.Exit(1)
		}
	}
	if s.failed > 0 {
		os.Exit(1)
	}
}

// goTest takes in the events of go test with some arguments.
func (s *summary) goTest(args []string) error {
	cmd := exec.Command("go", append([]string{"test", "-json"}, args...)...)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	err = s.read(out)
	if werr := cmd.Wait(); err == nil {
		var exit *exec.ExitError
		if !errors.As(werr, &exit) {
			err = werr
		} else if s.failed == 0 {
			err = fmt.Errorf("go test failed without saying which test: %w", werr)
		}
	}
	return err
}

// readFiles takes in the events in files, or those on standard input.
func (s *summary) readFiles(paths []string) error {
	if len(paths) == 0 {
		return s.readAll(os.Stdin)
	}
	for _, p := range paths {
		f, err := os.Open(p)
		if err != nil {
			return err
		}
		err = s.readAll(f)
		f.Close()
		if err != nil {
			return fmt.Errorf("%s: %w", p, err)
		}
	}
	return nil
}

var errNoEvents = errors.New("there is no package in the events")

// readAll takes in the events of a run that must have come to a package.
func (s *summary) readAll(r io.Reader) error {
	before := s.begun
	if err := s.read(r); err != nil {
		return err
	}
	if s.begun == before {
		return errNoEvents
	}
	return nil
}

// event is a line of `go test -json`: see `go doc test2json` and, for builds,
// `go help buildjson`.
type event struct {
	Action      string
	Package     string
	ImportPath  string
	Test        string
	Elapsed     float64
	Output      string
	FailedBuild string
}

// test is a test or subtest that has begun.
type test struct {
	out    strings.Builder
	parent bool // it has subtests, which count in its place
	done   bool
}

type pack struct {
	start                   time.Time
	tests                   map[string]*test
	out                     strings.Builder // of the package itself
	passed, failed, skipped int
	failures                []string // names, in order
}

type skip struct {
	reason string
	names  []string
}

type summary struct {
	mu                      sync.Mutex
	w                       io.Writer
	requireAll              bool
	packs                   map[string]*pack
	builds                  map[string]*strings.Builder
	skips                   []*skip
	last                    time.Time // something was printed
	begun                   int       // packages
	passed, failed, skipped int
}

func newSummary(w io.Writer, requireAll bool) *summary {
	return &summary{w: w, requireAll: requireAll, packs: map[string]*pack{}, builds: map[string]*strings.Builder{}, last: time.Now()}
}

// read takes in the events until their end.
func (s *summary) read(r io.Reader) error {
	lines := bufio.NewReader(r)
	for {
		line, err := lines.ReadBytes('\n')
		if len(line) > 0 {
			var e event
			if jerr := json.Unmarshal(line, &e); jerr != nil {
				fmt.Fprintf(s.w, "%s", line) // not an event: pass it on
			} else {
				s.take(e)
			}
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

func (s *summary) take(e event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e.Action == "build-output" {
		b := s.builds[e.ImportPath]
		if b == nil {
			b = &strings.Builder{}
			s.builds[e.ImportPath] = b
		}
		b.WriteString(e.Output)
		return
	}
	if e.Package == "" {
		return
	}
	p := s.packs[e.Package]
	if p == nil {
		p = &pack{start: time.Now(), tests: map[string]*test{}}
		s.packs[e.Package] = p
		s.begun++
	}
	if e.Test != "" {
		p.take(s, e)
		return
	}
	switch e.Action {
	case "output":
		p.out.WriteString(e.Output)
	case "pass", "fail", "skip":
		s.endPackage(p, e)
		delete(s.packs, e.Package)
	}
}

// take takes in an event of a test.
func (p *pack) take(s *summary, e event) {
	t := p.tests[e.Test]
	if t == nil {
		t = &test{}
		p.tests[e.Test] = t
		if i := strings.LastIndexByte(e.Test, '/'); i > 0 && p.tests[e.Test[:i]] != nil {
			p.tests[e.Test[:i]].parent = true
		}
	}
	switch e.Action {
	case "output":
		t.out.WriteString(e.Output)
	case "pass":
		t.done = true
		if !t.parent {
			p.passed++
		}
	case "skip":
		t.done = true
		if !t.parent {
			s.skip(p, e, reason(t.out.String()))
		}
	case "fail":
		t.done = true
		// A test that fails because a subtest did says nothing new.
		if !slices.ContainsFunc(p.failures, func(n string) bool { return strings.HasPrefix(n, e.Test+"/") }) {
			p.failed++
		}
		p.failures = append(p.failures, e.Test)
	}
}

func (s *summary) skip(p *pack, e event, why string) {
	name := strings.TrimPrefix(e.Package, "pando/") + " " + e.Test
	if s.requireAll && strings.HasPrefix(why, "SKIPPED") && !mayBeMissing.MatchString(why) {
		p.failed++
		p.failures = append(p.failures, e.Test)
		p.tests[e.Test].out.WriteString("    it was skipped, and this run must not skip it (PANDO_TEST_REQUIRE_ALL)\n")
		return
	}
	p.skipped++
	i := slices.IndexFunc(s.skips, func(k *skip) bool { return k.reason == why })
	if i < 0 {
		i = len(s.skips)
		s.skips = append(s.skips, &skip{reason: why})
	}
	s.skips[i].names = append(s.skips[i].names, name)
}

var place = regexp.MustCompile(`^\s*[\w.-]+\.go:\d+: (.*)`)

// reason finds what a test said when it skipped itself.
func reason(out string) string {
	why := "no reason given"
	for line := range strings.Lines(out) {
		if m := place.FindStringSubmatch(strings.TrimRight(line, "\n")); m != nil && !strings.HasPrefix(why, "SKIPPED") {
			why = m[1]
		}
	}
	return why
}

// died is how Go says that a whole program ends.
var died = regexp.MustCompile(`(?m)^(panic|fatal error): `)

func (s *summary) endPackage(p *pack, e event) {
	name := strings.TrimPrefix(e.Package, "pando/")
	if e.Action == "fail" {
		for _, n := range slices.Sorted(maps.Keys(p.tests)) {
			t := p.tests[n]
			switch {
			case !t.done: // it was running when the program died or ran out of time
				t.out.WriteString("    it did not end\n")
				if !t.parent {
					p.failed++
				}
				p.failures = append(p.failures, n)
			case died.MatchString(t.out.String()) && !slices.Contains(p.failures, n):
				// Why it died may stand with any test that ran then.
				p.failures = append(p.failures, n)
			}
		}
		if p.failed == 0 {
			p.failed++ // the build, or something outside of tests
		}
	}
	verdict := "ok  "
	if p.failed > 0 {
		verdict = "FAIL"
	}
	counts := "no tests"
	if n := p.passed + p.failed + p.skipped; n > 0 {
		counts = fmt.Sprintf("%d passed", p.passed)
		if p.failed > 0 {
			counts += fmt.Sprintf(", %d failed", p.failed)
		}
		if p.skipped > 0 {
			counts += fmt.Sprintf(", %d skipped", p.skipped)
		}
	}
	fmt.Fprintf(s.w, "%s %7.1fs  %-28s %s\n", verdict, e.Elapsed, name, counts)
	s.last = time.Now()
	if p.failed > 0 {
		if b := s.builds[e.FailedBuild]; b != nil {
			fmt.Fprint(s.w, b.String())
		}
		for _, n := range p.failures {
			fmt.Fprint(s.w, indent(p.tests[n].out.String()))
		}
		fmt.Fprint(s.w, indent(p.out.String()))
	}
	s.passed, s.failed, s.skipped = s.passed+p.passed, s.failed+p.failed, s.skipped+p.skipped
}

// endAll counts as failed what has not come to its end: the machine that ran it
// may have died.
func (s *summary) endAll() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, name := range slices.Sorted(maps.Keys(s.packs)) {
		p := s.packs[name]
		p.out.WriteString("the tests of this package did not come to their end\n")
		s.endPackage(p, event{Action: "fail", Package: name, Elapsed: time.Since(p.start).Seconds()})
	}
	clear(s.packs)
}

func indent(text string) string {
	var b strings.Builder
	for line := range strings.Lines(text) {
		b.WriteString("      " + line)
	}
	return b.String()
}

// tellStillRunning prints something now and then, so that nobody thinks that it
// hangs.
func (s *summary) tellStillRunning(stop <-chan struct{}) {
	const quiet = 30 * time.Second
	tick := time.NewTicker(quiet / 3)
	defer tick.Stop()
	for {
		select {
		case <-stop:
			return
		case <-tick.C:
		}
		s.mu.Lock()
		if time.Since(s.last) > quiet {
			var names []string
			for n, p := range s.packs {
				names = append(names, fmt.Sprintf("%s (%d s)", strings.TrimPrefix(n, "pando/"), int(time.Since(p.start).Seconds())))
			}
			slices.Sort(names)
			fmt.Fprintf(s.w, "...            running: %s\n", strings.Join(names, ", "))
			s.last = time.Now()
		}
		s.mu.Unlock()
	}
}

func (s *summary) finish() {
	if len(s.skips) > 0 {
		fmt.Fprintf(s.w, "\n%d tests were SKIPPED:\n", s.skipped)
		for _, k := range s.skips {
			fmt.Fprintf(s.w, "  %s\n", k.reason)
			for i, n := range k.names {
				if i == 4 && len(k.names) > 5 {
					fmt.Fprintf(s.w, "      and %d more\n", len(k.names)-i)
					break
				}
				fmt.Fprintf(s.w, "      %s\n", n)
			}
		}
		fmt.Fprintln(s.w)
	}
	fmt.Fprint(s.w, s.counts())
}

func (s *summary) counts() string {
	return fmt.Sprintf("%d passed, %d failed, %d skipped\n", s.passed, s.failed, s.skipped)
}
