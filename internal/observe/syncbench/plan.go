package syncbench

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"pando/internal/base/errs"
)

// file is one to be laid out.
type file struct {
	name    string
	bytes   int64
	written bool // else only allocated
}

// plan is a profile with all numbers known.
type plan struct {
	Profile
	files    []file
	perFile  []string // fio's options, but where, how long and how it reports
	segments int      // files of each writer
}

// total is the size of all files.
func (d *definition) total(size int64, writers int) int64 {
	switch {
	case size > 0:
		return size
	case d.defaultBytes == 0:
		return d.segmentBytes * int64(writers)
	case d.Calls.Unwritten: // they cost nothing to make
		return max(d.defaultBytes, d.segmentBytes*int64(d.minSegments*writers))
	}
	return d.defaultBytes
}

// plan lays the files out: size bytes in all (0: the profile's), for so many writers. Invalid if a
// file would be too small to be like the database's.
func (d *definition) plan(size int64, writers int) (*plan, error) {
	p := &plan{Profile: d.Profile, segments: 1}
	p.Writers = writers
	total := d.total(size, writers)
	share := total / int64(writers)
	segment := share
	if d.minSegments > 1 {
		p.segments = max(int(share/d.segmentBytes), d.minSegments)
		segment = min(d.segmentBytes, share/int64(p.segments))
	} else if d.defaultBytes == 0 { // a file of a fixed size for each
		segment = min(share, d.segmentBytes)
	}

	// Whole writes only: the last one must not be shorter.
	unit := d.Calls.Sizes[len(d.Calls.Sizes)-1]
	span := (segment - d.head) / unit * unit
	if segment < d.minSegment {
		need := d.minSegment * int64(writers*p.segments)
		return nil, errs.New(errs.Invalid, op, d.Name,
			"%d bytes are too few for %d files like those of the database, which have at least "+
				"%d", total, writers*p.segments, d.minSegment).
			WithHint("use at least %s", errs.Param("size", strconv.FormatInt(need, 10)))
	}

	if !d.Calls.Unwritten {
		segment = d.head + span
	}

	switch {
	case d.Calls.Shared:
		p.files = []file{{name: strings.TrimPrefix(d.file, "--filename="), bytes: span * int64(writers), written: true}}
		p.perFile = append(p.perFile, fmt.Sprintf("--size=%d", span), fmt.Sprintf("--offset_increment=%d", span))
	case d.head > 0:
		p.perFile = append(p.perFile, fmt.Sprintf("--offset=%d", d.head), fmt.Sprintf("--size=%d", span))
	default:
		p.perFile = append(p.perFile, fmt.Sprintf("--nrfiles=%d", p.segments), fmt.Sprintf("--filesize=%d", span))
	}

	if !d.Calls.Shared {
		format := strings.TrimPrefix(d.file, "--filename_format=")
		for w := range writers {
			for i := range p.segments {
				name := strings.NewReplacer("$jobnum", strconv.Itoa(w), "$filenum", strconv.Itoa(i)).Replace(format)
				p.files = append(p.files, file{name: name, bytes: segment, written: !d.Calls.Unwritten})
			}
		}
	}

	p.File = 0
	for _, f := range p.files {
		p.File += f.bytes
	}

	p.perFile = append([]string{d.file}, append(p.perFile, d.options...)...)
	p.perFile = append(p.perFile, "--ioengine="+d.engine, fmt.Sprintf("--numjobs=%d", writers),
		// One process, which ends as one; no advice to the kernel that databases do not give.
		"--thread=1", "--invalidate=0", "--fadvise_hint=0")
	return p, nil
}

// arguments are fio's, for files in a directory.
func (p *plan) arguments(dir string, d time.Duration) []string {
	a := []string{"--name=" + p.Name, "--directory=" + strings.ReplaceAll(dir, ":", `\:`)}
	a = append(a, p.perFile...)
	return append(a, "--time_based=1", fmt.Sprintf("--runtime=%dms", d.Milliseconds()))
}

// command is what to run by hand: fio lays the files out itself, and removes them.
func (p *plan) command(dir string, d time.Duration) []string {
	return append([]string{"fio"}, append(p.arguments(dir, d), "--unlink=1")...)
}
