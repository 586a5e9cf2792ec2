// Testreport reads what `go test -json` printed, and says what gotestsum does not: which tests were skipped and
// why, which tests took longest, what each package cost, and, as the last line, the counts.
//
//	testreport [-usage FILE] [-status N] [-changed FILE] [-flaky FILE] [-keep DIR] EVENTS... [-- COMMAND...]
//
// It exits with 1 if anything failed. A package that began and did not end there has failed, and so has a run
// without any package or test.
//
// With a command, a test that failed is repeated if that says something: if an ordinary assertion failed in a package
// that the change under test does not touch. COMMAND -run PATTERN PACKAGE runs it alone and prints its events. If it
// passes twice it is flaky: the run passes, and the last lines name it. Builds that fail, races, leaks, differences of
// content, programs that die, packages that the change touches, and more than three tests are never forgiven, unless
// the list of known flaky tests has exactly that.
//
// With PANDO_TEST_REQUIRE_ALL=1 a test that is skipped for want of something that this host should have (root, a
// program, a kernel feature) counts as failed. Such tests say "SKIPPED: ..."; a test that does not apply, such as
// one of images for a driver that has none, says so in other words.
//
// PANDO_TEST_COUNTS names a file that gets the line with the counts, too, and PANDO_TEST_FLAKY one to which the lines
// about flaky tests are added.
package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"regexp"
	"slices"
	"strings"
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

// options are the flags and arguments.
type options struct {
	usage, changed, flaky, keep string
	status                      int
	events, again               []string
}

func parseOptions() (o options) {
	flag.StringVar(&o.usage, "usage", "", "what packages cost, as tools/isolate writes it")
	flag.StringVar(&o.changed, "changed", "", "names of changed files, or the line \"everything\"; default: everything")
	flag.StringVar(&o.flaky, "flaky", "", "list of known flaky tests")
	flag.StringVar(&o.keep, "keep", "out/flaky", "directory for the first output of flaky tests")
	flag.IntVar(&o.status, "status", 0, "exit status of the run")
	flag.Parse()

	o.events = flag.Args()
	if i := slices.Index(o.events, "--"); i >= 0 {
		o.events, o.again = o.events[:i], o.events[i+1:]
	}
	return o
}

func main() {
	o := parseOptions()
	r := newReport(os.Getenv("PANDO_TEST_REQUIRE_ALL") == "1")
	complain := func(err error) {
		if err != nil {
			fmt.Fprintln(os.Stderr, "testreport:", err)
			r.failed++
		}
	}

	err := r.readFiles(o.events)
	r.end()
	if err == nil && r.passed+r.failed+r.skipped == 0 {
		err = errors.New("no test ran: check the pattern in RUN")
	}
	if err == nil && r.failed == 0 && o.status != 0 {
		err = fmt.Errorf("no test failed, but the run did: exit status %d", o.status)
	}
	complain(err)

	r.printSkips(os.Stdout)
	r.printSlowest(os.Stdout)
	if o.usage != "" {
		complain(printUsage(os.Stdout, o.usage))
	}
	r.printRaces(os.Stdout)
	r.printTimeouts(os.Stdout)
	complain(r.repeat(o))

	fmt.Printf("\n%s", r.counts())
	if path := os.Getenv("PANDO_TEST_COUNTS"); path != "" {
		complain(os.WriteFile(path, []byte(r.counts()), 0o666))
	}
	if r.failed > 0 {
		os.Exit(1)
	}
}

// repeat repeats failed tests where that says something, and prints what became of them.
func (r *report) repeat(o options) error {
	known, err := readFlaky(o.flaky)
	if err != nil {
		return err
	}
	for _, f := range known {
		if warning := f.old(time.Now()); warning != "" {
			fmt.Printf("\nwarning: %s\n", warning)
		}
	}
	if len(o.again) == 0 || len(r.failures) == 0 {
		return nil
	}

	changed, err := readChanges(o.changed)
	if err != nil {
		return err
	}
	j := &judge{changed, known, o.again, o.keep}
	all, err := j.forgive(r)
	j.print(os.Stdout, all)
	return errors.Join(err, j.note(all, os.Getenv("PANDO_TEST_FLAKY")))
}

// event is a line of `go test -json`: see `go doc test2json`.
type event struct {
	Action  string
	Package string
	Test    string
	Elapsed float64 // seconds
	Output  string
}

var errNoEvents = errors.New("there is no package in the events")

// readFiles takes in the events of files, each of which must have come to a package.
func (r *report) readFiles(paths []string) error {
	if len(paths) == 0 {
		return errors.New("no files with events are named: testreport [-usage FILE] EVENTS")
	}

	for _, path := range paths {
		f, err := os.Open(path)
		if err != nil {
			return err
		}

		before := r.begun
		err = r.read(f)
		f.Close()
		if err == nil && r.begun == before {
			err = errNoEvents
		}
		if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
	}

	return nil
}

// read takes in events until their end. Lines that are none are what programs printed past test2json: gotestsum
// has shown them.
func (r *report) read(events io.Reader) error {
	lines := bufio.NewReader(events)
	for {
		line, err := lines.ReadBytes('\n')
		var e event
		if json.Unmarshal(line, &e) == nil && e.Package != "" {
			r.add(e)
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
	}
}
