//go:build linux

// Newtests finds the tests that a change adds or edits, and runs them often: a test that fails now and then shows it
// before it has landed.
//
//	newtests [-isolate PROGRAM [-events FILE] [-for 2m] [-times 10]] COMMIT
//
// It compares the files of the work tree with a commit, and prints the package and the name of each top-level test that
// is new, or whose code is another one; comments and format do not count. With -isolate it runs them, at most as long
// as -for says: the events of an earlier run (`go test -json`) tell how long each takes, and others run once first.
// Then it says how often each has run, and which were left out because the time was used up. The exit status is 1 if a
// test failed.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"
)

func main() {
	isolate := flag.String("isolate", "", "program that runs test binaries: tools/isolate; default: only print the tests")
	events := flag.String("events", "", "what `go test -json` said in an earlier run")
	budget := flag.Duration("for", 2*time.Minute, "time for all tests")
	times := flag.Int("times", 10, "how often each runs")
	flag.Parse()
	if flag.NArg() != 1 {
		flag.Usage()
		os.Exit(2)
	}

	tests, err := changedTests(flag.Arg(0))
	if err != nil {
		fmt.Fprintln(os.Stderr, "newtests:", err)
		os.Exit(2)
	}
	if len(tests) == 0 && *isolate != "" {
		fmt.Println("no test is new or edited")
		return
	}
	if *isolate == "" {
		for _, t := range tests {
			fmt.Printf("%s\t%s\n", t.pkg, t.name)
		}
		return
	}

	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGHUP, syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	s := &stress{out: os.Stdout, isolate: *isolate, times: *times, tests: tests}
	if err := s.run(ctx, *events, *budget); err != nil {
		fmt.Fprintln(os.Stderr, "newtests:", err)
		os.Exit(1)
	}
}
