package syncbench

import (
	"bufio"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"pando/internal/testing/testfs"
)

// wrapFio puts a script before fio in PATH, which gets the real fio as $FIO.
func wrapFio(t *testing.T, script string) {
	t.Helper()
	real, err := exec.LookPath("fio")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	text := "#!/bin/bash\nFIO=" + real + "\n[ \"$1\" != --version ] || exec $FIO --version\n" + script + "\n"
	if err := testfs.WriteProgram(filepath.Join(dir, "fio"), []byte(text)); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
}

// TestCallsOfEveryProfile: what strace sees of a run, of every profile, is what the profile says, and
// nothing else that writes or syncs.
func TestCallsOfEveryProfile(t *testing.T) {
	need(t, "fio", "strace")
	dir, traces := testfs.Ext4(t, 192<<20), t.TempDir()
	// Its first argument is the name of the profile.
	wrapFio(t, `exec strace -f -qq -y -s 0 --seccomp-bpf -o `+traces+`/"${1#--name=}"`+
		` -e trace=openat,open,creat,write,writev,pwrite64,pwritev,pwritev2,sendfile,`+
		`copy_file_range,splice,`+
		`fsync,fdatasync,sync,syncfs,msync,sync_file_range,lseek,`+
		`ftruncate,fallocate,fadvise64,io_submit,io_uring_enter,mmap $FIO "$@"`)
	for _, p := range Profiles() {
		if p.Calls.Unwritten {
			smallSegments(t, p.Name)
		}
	}
	t.Run("profiles", func(t *testing.T) {
		for _, p := range Profiles() {
			t.Run(p.Name, func(t *testing.T) {
				t.Parallel()
				checkCalls(t, dir, filepath.Join(traces, p.Name), p)
			})
		}
	})
	empty(t, dir)
}

// checkCalls runs a profile, whose calls are traced to a file, and checks them.
func checkCalls(t *testing.T, dir, trace string, p Profile) {
	t.Helper()
	c := quick(dir, p.Name)
	switch {
	case p.Calls.Unwritten:
		c.SizeBytes = 384 << 10
	case p.Calls.Order == Sequential:
		c.SizeBytes = 512 << 10 // so that it comes round
		if p.Calls.Sizes[0] < 4096 {
			c.SizeBytes = 256 << 10
		}
	}
	for try := 1; ; try++ {
		r := measure(t, c)
		calls := readTrace(t, trace)
		enoughFiles := times(calls, "openat") >= 3 || p.Calls.Write != "write"
		enoughSyncs := times(calls, p.Calls.Sync) > 0 || p.Calls.Sync == ""
		comesRound := p.Calls.Unwritten || p.Calls.Order != Sequential ||
			r.Runs[0].Writes*p.Calls.Sizes[0] > r.Profile.File
		if enoughFiles && enoughSyncs && comesRound || try == 7 {
			check(t, r, calls)
			return
		}
		c.Duration *= 2 // a slow machine, or one that does other things
	}
}

// times counts how often a system call was made. That of openat is for a file to be written.
func times(trace map[string][]call, name string) (n int) {
	for _, calls := range trace {
		for _, c := range calls {
			if c.name == name {
				n++
			}
		}
	}
	return n
}

// call is a system call on a file of the benchmark.
type call struct {
	name   string
	file   string
	flags  string // of openat
	size   int64
	offset int64 // -1: the call has none
}

var (
	traceLine = regexp.MustCompile(`^(\d+) +(\w+)\((.*)$`)
	onFile    = regexp.MustCompile(`^\d+<[^>]*/` + regexp.QuoteMeta(Prefix) + `\w+/([^>]+)>(?:, )?(.*)$`)
	openFile  = regexp.MustCompile(`^AT_FDCWD<[^>]*>, "([^"]*)"\.*, ([A-Z_|]+)`)
)

// readTrace finds the calls of each thread on files of the benchmark.
func readTrace(t *testing.T, path string) map[string][]call {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	out := map[string][]call{}
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		m := traceLine.FindStringSubmatch(lines.Text())
		if m == nil {
			continue // the end of a call that was shown before, a signal
		}
		thread, c := m[1], call{name: m[2], offset: -1}
		if c.name == "openat" || c.name == "open" || c.name == "creat" {
			o := openFile.FindStringSubmatch(m[3])
			if o == nil || o[1] == "." || filepath.IsAbs(o[1]) && !strings.Contains(o[1], Prefix) {
				continue // fio looks at the directory, too
			}
			c.file, c.flags = filepath.Base(o[1]), o[2]
			out[thread] = append(out[thread], c)
			continue
		}
		o := onFile.FindStringSubmatch(m[3])
		if o == nil {
			continue
		}
		c.file = o[1]
		args := strings.Split(strings.TrimSuffix(o[2], " <unfinished ...>"), ", ")
		number := func(i int) int64 {
			if i >= len(args) {
				t.Fatalf("%s: no argument %d", lines.Text(), i)
			}
			s, _, _ := strings.Cut(args[i], ")")
			n, err := strconv.ParseInt(s, 10, 64)
			if err != nil {
				t.Fatalf("%s: %v", lines.Text(), err)
			}
			return n
		}
		switch c.name {
		case "pwrite64":
			c.size, c.offset = number(1), number(2)
		case "write":
			c.size = number(1)
		}
		out[thread] = append(out[thread], c)
	}
	if err := lines.Err(); err != nil {
		t.Fatal(err)
	}
	return out
}

// check compares a trace with what the report says that was done.
func check(t *testing.T, r *Report, trace map[string][]call) {
	t.Helper()
	d, err := define(r.Profile.Name)
	if err != nil {
		t.Fatal(err)
	}
	says := r.Profile.Calls
	flags := strings.Join(append([]string{"O_RDWR", "O_CREAT"}, says.OpenFlags...), "|")
	sizes, names, starts := map[int64]int64{}, map[string]int64{}, map[int64]bool{}
	writers := 0
	for thread, calls := range trace {
		var writes, since, syncs, inFile int64
		next, file := int64(-1), ""
		seen := map[int64]bool{}
		for i, c := range calls {
			where := fmt.Sprintf("thread %s, call %d, %+v", thread, i, c)
			names[c.name]++
			switch c.name {
			case "openat":
				if c.flags != flags {
					t.Fatalf("%s: flags %s, want %s", where, c.flags, flags)
				}
				if says.Write == "write" { // its offset is the file's
					if file != "" && inFile != r.span(d)/says.Sizes[0] {
						t.Fatalf("%s: %d writes to %s before the next file", where, inFile, file)
					}
					file, inFile = c.file, 0
				}
			case says.Write:
				if since == int64(says.PerSync) && says.Sync != "" {
					t.Fatalf("%s: more than %d writes before a sync", where, says.PerSync)
				}
				writes++
				since++
				sizes[c.size]++
				switch {
				case says.Write == "write":
					if inFile++; c.file != file {
						t.Fatalf("%s: not to %s, which is open", where, file)
					}
				case says.Order == Random:
					if c.offset%says.Sizes[0] != 0 || c.offset >= r.Profile.File {
						t.Fatalf("%s: not a page", where)
					}
					if seen[c.offset] {
						t.Fatalf("%s: a page for the second time, after %d of %d", where, len(seen), r.Profile.File/says.Sizes[0])
					}
					if seen[c.offset] = true; int64(len(seen)) == r.Profile.File/says.Sizes[0] {
						clear(seen)
					}
				case c.file == file && c.offset == next:
				default:
					// A new file, or the start of the same one once it is full.
					if file != "" && next != starting(starts, next, says, r, d)+r.span(d) {
						t.Fatalf("%s: the last write ended at %d of %s", where, next, file)
					}
					starts[c.offset] = true
				}
				file, next = c.file, c.offset+c.size
			case says.Sync:
				if since == 0 && c.file == first(says) && i > 0 && calls[i-1].name == "openat" && calls[i-1].file == c.file {
					continue // it has come round
				}
				if since != int64(says.PerSync) || c.file != file {
					t.Fatalf("%s: after %d writes, of which the last one was to %s", where, since, file)
				}
				since = 0
				syncs++
			default:
				t.Fatalf("%s: neither %s nor %s", where, says.Write, says.Sync)
			}
		}
		if writes > 0 {
			writers++
		}
	}
	if passed := names["openat"]; says.Write == "write" && passed < 3 {
		t.Errorf("only %d files were written: a slow machine?", passed)
	}
	if writers != r.Profile.Writers {
		t.Errorf("%d threads wrote, want %d", writers, r.Profile.Writers)
	}
	var want []int64
	if says.Write == "write" || says.Order == Random {
		// No starts.
	} else if says.Shared {
		for w := range r.Profile.Writers {
			want = append(want, int64(w)*r.span(d))
		}
	} else {
		want = []int64{says.First}
	}
	if got := slices.Sorted(maps.Keys(starts)); !slices.Equal(got, want) {
		t.Errorf("files are written from %d on, want %d", got, want)
	}
	if got := slices.Sorted(maps.Keys(sizes)); !slices.Equal(got, says.Sizes) {
		t.Errorf("writes of %d bytes, want %d", got, says.Sizes)
	}
	var total int64
	for _, n := range sizes {
		total += n
	}
	run := r.Runs[0]
	t.Logf("%v; fio counts %d writes, %d syncs", names, run.Writes, run.Syncs)
	// fio does not count what it ends with, at most a write and a sync of each writer.
	if n := total - run.Writes; n < 0 || n > int64(r.Profile.Writers) {
		t.Errorf("%d writes, fio counts %d", total, run.Writes)
	}
	if says.Sync != "" {
		if n := names[says.Sync] - run.Syncs; n < 0 || n > int64(r.Profile.Writers) || run.Syncs == 0 {
			t.Errorf("%d syncs, fio counts %d", names[says.Sync], run.Syncs)
		}
	} else if run.Syncs != run.Writes {
		t.Errorf("%d syncs of %d writes", run.Syncs, run.Writes)
	}
}

// first is the first file of the only writer of several files.
func first(says Calls) string {
	if says.Again {
		return "log.0.0"
	}
	return ""
}

// span is how much of a file, or of its part of it, a writer writes.
func (r *Report) span(d definition) int64 {
	p, err := d.plan(r.Profile.File, r.Profile.Writers)
	if err != nil {
		panic(err)
	}
	unit := p.Calls.Sizes[len(p.Calls.Sizes)-1]
	if p.Calls.Shared {
		return p.files[0].bytes / int64(p.Writers)
	}
	return (p.files[0].bytes - d.head) / unit * unit
}

// starting is where the part of the file starts that ends at end.
func starting(starts map[int64]bool, end int64, says Calls, r *Report, d definition) int64 {
	if starts[end-r.span(d)] {
		return end - r.span(d)
	}
	return -1
}

// smallSegments lets the files of a profile be small for the length of a test, so that fio gets through all of them.
func smallSegments(t *testing.T, name string) {
	t.Helper()
	for i := range definitions {
		if d := &definitions[i]; d.Name == name {
			before := d.minSegment
			d.minSegment = 64 << 10
			t.Cleanup(func() { d.minSegment = before })
		}
	}
}
