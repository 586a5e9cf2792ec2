package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
)

// usage is a line that tools/isolate writes.
type usage struct {
	Package                                 string
	WallSeconds, UserSeconds, SystemSeconds float64
	WrittenBytes                            int64
}

// printUsage prints what packages cost, dearest first, with their sum. What a package was neither in programs nor in
// the kernel for, it waited: for disks, for timers, or for a processor.
func printUsage(w io.Writer, path string) error {
	all, err := readUsage(path)
	if err != nil || len(all) == 0 {
		return err
	}

	slices.SortStableFunc(all, func(a, b usage) int { return cmp.Compare(b.WallSeconds, a.WallSeconds) })

	const shown = 10
	sum := usage{Package: fmt.Sprintf("all %d", len(all))}
	fmt.Fprintf(w, "\nPackages, in seconds:\n%8s %8s %8s %8s %10s\n", "wall", "user", "kernel", "waiting", "written")
	for i, u := range all {
		if i < shown || os.Getenv("PANDO_TEST_ALL_PACKAGES") != "" {
			u.print(w)
		}
		sum.WallSeconds += u.WallSeconds
		sum.UserSeconds += u.UserSeconds
		sum.SystemSeconds += u.SystemSeconds
		sum.WrittenBytes += u.WrittenBytes
	}

	sum.print(w)
	return nil
}

func (u usage) print(w io.Writer) {
	waiting := max(u.WallSeconds-u.UserSeconds-u.SystemSeconds, 0)
	fmt.Fprintf(w, "%8.1f %8.1f %8.1f %8.1f %6d MiB  %s\n", u.WallSeconds, u.UserSeconds, u.SystemSeconds, waiting,
		u.WrittenBytes>>20, u.Package)
}

// readUsage reads the lines. A missing file means no lines: isolate measures only as root.
func readUsage(path string) ([]usage, error) {
	f, err := os.Open(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}

	defer f.Close()

	var all []usage
	for lines := json.NewDecoder(f); ; {
		var u usage
		err := lines.Decode(&u)
		if err == io.EOF {
			return all, nil
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		all = append(all, u)
	}
}
