// Testreport reads what `go test -json` printed, and says what gotestsum does not: which tests were skipped and
// why, which tests took longest, what each package cost, and, as the last line, the counts.
//
//	testreport [-usage FILE] EVENTS...
//
// It exits with 1 if anything failed. A package that began and did not end there has failed, and so has a run
// without any package or test.
//
// With PANDO_TEST_REQUIRE_ALL=1 a test that is skipped for want of something that this host should have (root, a
// program, a kernel feature) counts as failed. Such tests say "SKIPPED: ..."; a test that does not apply, such as
// one of images for a driver that has none, says so in other words.
//
// PANDO_TEST_COUNTS names a file that gets the line with the counts, too.
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
	"strings"
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
	usageFile := flag.String("usage", "", "what packages cost, as tools/isolate writes it")
	flag.Parse()

	r := newReport(os.Getenv("PANDO_TEST_REQUIRE_ALL") == "1")
	err := r.readFiles(flag.Args())
	r.end()
	if err == nil && r.passed+r.failed+r.skipped == 0 {
		err = errors.New("no test ran: check the pattern in RUN")
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "testreport:", err)
		r.failed++
	}

	r.printSkips(os.Stdout)
	r.printSlowest(os.Stdout)
	if *usageFile != "" {
		if err := printUsage(os.Stdout, *usageFile); err != nil {
			fmt.Fprintln(os.Stderr, "testreport:", err)
			r.failed++
		}
	}

	r.printRaces(os.Stdout)
	fmt.Printf("\n%s", r.counts())
	if path := os.Getenv("PANDO_TEST_COUNTS"); path != "" {
		if err := os.WriteFile(path, []byte(r.counts()), 0o666); err != nil {
			fmt.Fprintln(os.Stderr, "testreport:", err)
			os.Exit(1)
		}
	}

	if r.failed > 0 {
		os.Exit(1)
	}
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
