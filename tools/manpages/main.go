// Manpages writes a manual page for each command of pando, and for each topic of its help:
//
//	manpages -version 1.2.0 -date 2026-11-23 DIR
//
// Pages of commands go to DIR/man1, those of topics to DIR/man7. The texts are those that --help prints. The same
// arguments lead to the same bytes: nothing comes from the clock or from the host.
package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"pando/internal/front/cli"
)

func main() {
	version := flag.String("version", "dev", "version of pando")
	date := flag.String("date", "", "date of the pages, as 2006-01-02")
	flag.Parse()

	if err := write(flag.Args(), *version, *date); err != nil {
		fmt.Fprintln(os.Stderr, "manpages:", err)
		os.Exit(1)
	}
}

func write(args []string, version, date string) error {
	if len(args) != 1 {
		return errors.New("usage: manpages -version VERSION -date DATE DIR")
	}

	if _, err := time.Parse(time.DateOnly, date); err != nil {
		return fmt.Errorf("-date must be a date such as 2006-01-02: %w", err)
	}

	for _, p := range pages(cli.Commands(), version, date) {
		dir := filepath.Join(args[0], "man"+p.section)
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(dir, p.name+"."+p.section), p.text, 0o644); err != nil {
			return err
		}
	}

	return nil
}
