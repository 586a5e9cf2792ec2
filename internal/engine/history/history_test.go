package history

import (
	"bytes"
	"fmt"
	"iter"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"pando/internal/base/errs"

	"golang.org/x/sys/unix"
)

func event(verb, kind, name, id string) Event {
	return Event{Time: time.Date(2026, 11, 25, 8, 0, 0, 0, time.UTC), Verb: verb, Kind: kind, Name: name, ID: id}
}

func one(e Event) iter.Seq[Event] { return slices.Values([]Event{e}) }

// shown is one word for each event.
func shown(r Result) string {
	var out []string
	for _, e := range r.Events {
		out = append(out, e.Verb+":"+e.Name)
	}
	return strings.Join(out, " ")
}

// logOf returns a directory with a log of these events.
func logOf(t *testing.T, events ...Event) string {
	t.Helper()
	dir := t.TempDir()
	if err := New(dir).Append(slices.Values(events)); err != nil {
		t.Fatal(err)
	}
	return dir
}

func read(t *testing.T, dir string, q Query) Result {
	t.Helper()
	r, err := Read(dir, q)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestReadFollowsNames(t *testing.T) {
	with := func(e Event, fn func(*Event)) Event { fn(&e); return e }
	dir := logOf(t,
		event("import", "generation", "web@1", "g1"),
		event("clone", "volume", "job", "v1"),
		with(event("snapshot", "snapshot", "job@s", "s1"), func(e *Event) { e.Lineage = "v1" }),
		with(event("rename", "volume", "task", "v1"), func(e *Event) { e.NameBefore = "job" }),
		event("clone", "volume", "job", "v2"),
		with(event("rewind", "volume", "task", "v3"), func(e *Event) { e.Lineage = "v1" }),
		with(event("rename", "golden", "site", ""), func(e *Event) { e.NameBefore = "web" }),
		event("publish", "generation", "site@2", "g2"),
		event("import", "generation", "web@1", "g3"),
		event("destroy", "generation", "site@1", "g1"),
		with(event("destroy", "snapshot", "task@s", "s1"), func(e *Event) { e.Lineage = "v1" }),
		event("destroy", "volume", "job", "v2"),
	)

	for ref, want := range map[string]string{
		"":       shown(read(t, dir, Query{})),
		"task":   "clone:job snapshot:job@s rename:task rewind:task destroy:task@s",
		"job":    "clone:job snapshot:job@s rename:task clone:job rewind:task destroy:task@s destroy:job",
		"task@s": "snapshot:job@s destroy:task@s",
		"job@s":  "snapshot:job@s destroy:task@s",
		"web":    "import:web@1 rename:site publish:site@2 import:web@1 destroy:site@1",
		"site":   "import:web@1 rename:site publish:site@2 destroy:site@1",
		"site@1": "import:web@1 destroy:site@1",
		"v2":     "clone:job destroy:job",
		"nobody": "",
		"task@x": "",
	} {
		if got := shown(read(t, dir, Query{Ref: ref})); got != want {
			t.Errorf("%q: got %s, want %s", ref, got, want)
		}
	}
	if n := len(read(t, dir, Query{}).Events); n != 12 {
		t.Errorf("read %d events of 12", n)
	}
}

func TestReadLimitAndSince(t *testing.T) {
	var events []Event
	for i := range 10 {
		e := event("clone", "volume", "v"+strconv.Itoa(i), "id"+strconv.Itoa(i))
		e.Time = e.Time.Add(time.Duration(i) * time.Hour)
		events = append(events, e)
	}
	dir := logOf(t, events...)

	for _, c := range []struct {
		q    Query
		want string
		more bool
	}{
		{Query{Limit: 2}, "clone:v8 clone:v9", true},
		{Query{Limit: 10}, shown(Result{Events: events}), false},
		{Query{Since: events[8].Time}, "clone:v8 clone:v9", false},
		{Query{Since: events[7].Time, Limit: 1}, "clone:v9", true},
		{Query{Since: events[9].Time.Add(1)}, "", false},
	} {
		if got := read(t, dir, c.q); shown(got) != c.want || got.More != c.more {
			t.Errorf("%+v: got %s (more: %v), want %s (%v)", c.q, shown(got), got.More, c.want, c.more)
		}
	}

	if got := read(t, t.TempDir(), Query{}); len(got.Events) > 0 || got.More {
		t.Errorf("a pool without a log has events: %+v", got)
	}
}

// TestReadSkipsDamage: what was cut off, or is zeros after a power loss, hides no other event.
func TestReadSkipsDamage(t *testing.T) {
	dir := logOf(t, event("a", "volume", "1", "x"), event("b", "volume", "2", "x"))
	path := filepath.Join(dir, FileName)
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}

	first := bytes.IndexByte(whole, '\n')
	for cut := range whole {
		torn := slices.Concat(whole[:cut], make([]byte, 100))
		if err := os.WriteFile(path, torn, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := New(dir).Append(one(event("c", "volume", "3", "x"))); err != nil {
			t.Fatal(err)
		}

		want := "c:3"
		if cut > first {
			want = "a:1 c:3"
		}
		if got := shown(read(t, dir, Query{})); got != want {
			t.Fatalf("cut off at byte %d: got %s, want %s", cut, got, want)
		}
	}

	// Lines of a newer version, and others, are skipped.
	other := []byte("{\"v\":2,\"time\":\"2026-11-25T08:00:00Z\",\"verb\":\"x\"}\nhello\n[]\n{\"v\":1}\n\n")
	if err := os.WriteFile(path, slices.Concat(whole, other, whole), 0o600); err != nil {
		t.Fatal(err)
	}
	if got := shown(read(t, dir, Query{})); got != "a:1 b:2 a:1 b:2" {
		t.Errorf("got %s", got)
	}
}

// TestFrozenFormat: every version reads what version 1 wrote.
func TestFrozenFormat(t *testing.T) {
	text, err := os.ReadFile("testdata/v1.log")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, FileName), text, 0o600); err != nil {
		t.Fatal(err)
	}

	got := read(t, dir, Query{Ref: "job"})
	const want = "clone:job mount:job rename:task rewind:task pin:task resize:task push:task@p"
	if shown(got) != want {
		t.Fatalf("got %s, want %s", shown(got), want)
	}

	clone, mount, pin := got.Events[0], got.Events[1], got.Events[4]
	if clone.By() != "ann" || *clone.LoginUID != 1000 || clone.Origin != "web@1" || clone.Command != "pando clone" ||
		mount.Mountpoint != `/mnt/a "b"` || mount.By() != "0" || pin.Until == nil || got.Events[5].SizeBytes != 2<<30 ||
		got.Events[6].Remote != "backup" || got.Events[2].NameBefore != "job" || clone.PID != 4712 {
		t.Errorf("got %+v", got.Events)
	}
}

// TestNamesCannotForgeEvents: a text that looks like the begin of a line is not taken for one.
func TestNamesCannotForgeEvents(t *testing.T) {
	e := event("mount", "volume", "v", "x")
	e.Mountpoint = "/m\n" + lineStart + `1,"time":"2026-11-25T08:00:00Z","verb":"destroy"}`
	got := read(t, logOf(t, e), Query{})
	if len(got.Events) != 1 || got.Events[0].Mountpoint != e.Mountpoint {
		t.Errorf("got %+v", got)
	}
}

// TestLongLines: an event never exceeds one write.
func TestLongLines(t *testing.T) {
	e := event("mount", "volume", "v", "x")
	e.Mountpoint = strings.Repeat("/long", 1000)
	dir := logOf(t, e)
	if got := read(t, dir, Query{}); shown(got) != "mount:v" || got.Events[0].Mountpoint != "" {
		t.Errorf("got %+v", got)
	}
	if st, err := os.Stat(filepath.Join(dir, FileName)); err != nil || st.Size() > lineMost || st.Mode().Perm() != 0o600 {
		t.Errorf("the log: %v, %v", st, err)
	}
}

// TestManyEvents: a call with tens of thousands of events writes few, large pieces.
func TestManyEvents(t *testing.T) {
	const many = 47_000
	events := make([]Event, many)
	for i := range events {
		events[i] = event("clone", "volume", fmt.Sprintf("stem-%d", i+1), fmt.Sprintf("%026d", i))
		events[i].Origin, events[i].Who = "web@3", Who{User: "root", PID: 12345, Command: "pando clone"}
	}

	dir := logOf(t, events...)
	got := read(t, dir, Query{}).Events
	if len(got) != many || got[0].Name != "stem-1" || got[many-1].Name != "stem-47000" {
		t.Errorf("read %d events", len(got))
	}
	if got := read(t, dir, Query{Ref: "stem-30000"}); shown(got) != "clone:stem-30000" {
		t.Errorf("got %s", shown(got))
	}
}

const (
	writers   = 8
	perWriter = 400
)

// TestWriter is a process of TestConcurrentWriters.
func TestWriter(t *testing.T) {
	dir, who := os.Getenv("HISTORY_TEST_DIR"), os.Getenv("HISTORY_TEST_WRITER")
	if dir == "" {
		t.Skip("only for TestConcurrentWriters")
	}
	most, _ := strconv.ParseInt(os.Getenv("HISTORY_TEST_MOST"), 10, 64)
	l := &Log{dir, most}
	for i := range perWriter {
		if err := l.Append(one(event("clone", "volume", fmt.Sprintf("v-%s-%d", who, i), who))); err != nil {
			t.Fatal(err)
		}
	}
}

// write runs processes that write at once, and returns how many events each has in the log. It fails if those of a
// writer are not the newest ones, in order.
func write(t *testing.T, dir string, most int64) map[string]int {
	t.Helper()
	var running []*exec.Cmd
	for w := range writers {
		c := exec.Command(os.Args[0], "-test.run", "^TestWriter$")
		c.Env = append(os.Environ(), "HISTORY_TEST_DIR="+dir, fmt.Sprintf("HISTORY_TEST_WRITER=%d", w),
			fmt.Sprintf("HISTORY_TEST_MOST=%d", most))
		c.Stderr = os.Stderr
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		running = append(running, c)
	}
	for _, c := range running {
		if err := c.Wait(); err != nil {
			t.Fatal(err)
		}
	}

	next, count := map[string]int{}, map[string]int{}
	for _, e := range read(t, dir, Query{}).Events {
		n, err := strconv.Atoi(e.Name[strings.LastIndexByte(e.Name, '-')+1:])
		if err != nil {
			t.Fatal(err)
		}
		if count[e.ID] > 0 && n != next[e.ID] {
			t.Errorf("writer %s: event %d follows %d", e.ID, n, next[e.ID]-1)
		}
		next[e.ID] = n + 1
		count[e.ID]++
	}
	for w, n := range next {
		if n != perWriter {
			t.Errorf("writer %s: the last event is %d, not %d", w, n-1, perWriter-1)
		}
	}
	return count
}

func TestConcurrentWriters(t *testing.T) {
	if count := write(t, t.TempDir(), fileMost); len(count) != writers {
		t.Errorf("events of %d writers", len(count))
	} else {
		for w, n := range count {
			if n != perWriter {
				t.Errorf("writer %s: %d events of %d", w, n, perWriter)
			}
		}
	}
}

// TestRotationWithConcurrentWriters: the log stays small, and of what is left nothing is missing in the middle.
func TestRotationWithConcurrentWriters(t *testing.T) {
	dir := t.TempDir()
	const most = 64 << 10
	write(t, dir, most)

	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 2 {
		t.Fatalf("files: %v, %v", entries, err)
	}
	for _, f := range entries {
		st, err := f.Info()
		if err != nil || st.Size() > most+writers*lineMost {
			t.Errorf("%s: %d bytes, %v", f.Name(), st.Size(), err)
		}
	}
	if n := len(read(t, dir, Query{}).Events); n < 200 {
		t.Errorf("only %d events are left", n)
	}
}

// TestReplacedWhileWriting: a process that slept while the log was rotated twice writes its event again.
func TestReplacedWhileWriting(t *testing.T) {
	dir := t.TempDir()
	fd, err := openFile(filepath.Join(dir, FileName))
	if err != nil {
		t.Fatal(err)
	}
	defer os.NewFile(uintptr(fd), "").Close()

	l := &Log{dir, 1}
	for i := range 3 {
		if err := l.Append(one(event("clone", "volume", strconv.Itoa(i), "x"))); err != nil {
			t.Fatal(err)
		}
	}
	if kept, err := l.append(fd, []byte("late\n")); kept || err != nil {
		t.Errorf("an event in a removed file counts as kept: %v, %v", kept, err)
	}
}

// TestErrors: a log that cannot be written or read says so.
func TestErrors(t *testing.T) {
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, FileName), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := New(dir).Append(one(event("clone", "volume", "v", "x"))); err == nil {
		t.Error("wrote to a directory")
	}
	if _, err := Read(dir, Query{}); err == nil {
		t.Error("read a directory")
	}
	if err := New(filepath.Join(dir, "missing")).Append(one(event("clone", "volume", "v", "x"))); err == nil {
		t.Error("wrote to a missing directory")
	}
}

// TestOwner: the owner of a pool can write events after root has made the file.
func TestOwner(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: writing into pools of other users needs root")
	}
	dir := t.TempDir()
	const nobody = 65534
	if err := os.Chown(dir, nobody, nobody); err != nil {
		t.Fatal(err)
	}
	if err := New(dir).Append(one(event("clone", "volume", "v", "x"))); err != nil {
		t.Fatal(err)
	}

	var st unix.Stat_t
	if err := unix.Stat(filepath.Join(dir, FileName), &st); err != nil || st.Uid != nobody || st.Mode&0o777 != 0o600 {
		t.Errorf("owner %d, mode %o, %v", st.Uid, st.Mode, err)
	}
}

// TestFullDisk: events that do not fit are lost, and hide no others.
func TestFullDisk(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: mounting needs root")
	}
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=16k"); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	}()

	l, n := New(dir), 0
	var err error
	for ; err == nil; n++ {
		err = l.Append(one(event("clone", "volume", strconv.Itoa(n), "x")))
	}
	if !errs.Is(err, errs.NoSpace) {
		t.Fatal(err)
	}

	if err := unix.Mount("", dir, "", unix.MS_REMOUNT, "size=64k"); err != nil {
		t.Fatal(err)
	}
	if err := l.Append(one(event("clone", "volume", "last", "x"))); err != nil {
		t.Fatal(err)
	}
	got := read(t, dir, Query{}).Events
	if len(got) != n || got[n-2].Name != strconv.Itoa(n-2) || got[n-1].Name != "last" {
		t.Errorf("read %d events of %d", len(got), n)
	}
}

// FuzzSearch: no content of the files makes the reader fail, hides whole lines, or returns what was not asked for.
func FuzzSearch(f *testing.F) {
	var b bytes.Buffer
	_ = appendLine(&b, event("clone", "volume", "job", "v1"))
	f.Add(b.Bytes(), "job", 0)
	f.Add(b.Bytes()[:40], "job@s", 1)
	f.Add([]byte(`{"v":1,"time":"2026-11-25T08:00:00Z","verb":"rename","kind":"golden","name":"a","name_before":"a"}`),
		"a", 0)
	f.Add([]byte{0, 0, '\n', '{'}, "", 3)
	f.Fuzz(func(t *testing.T, text []byte, ref string, limit int) {
		limit = max(limit, 0)
		r := search(text, Query{Ref: ref, Limit: limit})
		if limit > 0 && len(r.Events) > limit {
			t.Errorf("%d events, with a limit of %d", len(r.Events), limit)
		}

		all := search(slices.Concat(text, []byte("\n"), b.Bytes()), Query{})
		if n := len(all.Events); n == 0 || all.Events[n-1].Name != "job" {
			t.Errorf("the last whole event is missing")
		}

		// What was read can be written, and reads the same.
		for _, e := range r.Events {
			var again bytes.Buffer
			if appendLine(&again, e) != nil {
				continue // a year that JSON has no form for
			}
			if got, ok := parseLine(bytes.TrimSpace(again.Bytes())); !ok || got.Name != e.Name || got.Verb != e.Verb {
				t.Errorf("%+v was written and read as %+v", e, got)
			}
		}
	})
}

func BenchmarkAppend(b *testing.B) {
	l := New(b.TempDir())
	e := event("clone", "volume", "job-17", "5ud4psmgcqjnqfegdi2joqtk0g")
	e.Origin, e.Who = "web@3", thisProcess()
	for b.Loop() {
		if err := l.Append(one(e)); err != nil {
			b.Fatal(err)
		}
	}
}

// TestLogIsRegular: nobody can make commands hang, or write to another file, by putting something else in place of the
// log.
func TestLogIsRegular(t *testing.T) {
	for what, put := range map[string]func(path string) error{
		"FIFO":          func(path string) error { return unix.Mkfifo(path, 0o600) },
		"directory":     func(path string) error { return os.Mkdir(path, 0o700) },
		"symbolic link": func(path string) error { return os.Symlink(filepath.Join(filepath.Dir(path), "other"), path) },
	} {
		t.Run(what, func(t *testing.T) {
			dir := t.TempDir()
			path := filepath.Join(dir, FileName)
			if err := put(path); err != nil {
				t.Fatal(err)
			}

			err := New(dir).Append(one(event("clone", "volume", "v", "id")))
			if !errs.Is(err, errs.IO) || errs.HintOf(err) == "" {
				t.Errorf("appending: %v", err)
			}
			if _, err := Read(dir, Query{}); !errs.Is(err, errs.IO) || errs.HintOf(err) == "" {
				t.Errorf("reading: %v", err)
			}
			if _, err := os.Lstat(filepath.Join(dir, "other")); err == nil {
				t.Error("wrote to another file")
			}

			// An older file of this kind is refused, too.
			if err := os.Rename(path, filepath.Join(dir, OldName)); err != nil {
				t.Fatal(err)
			}
			if _, err := Read(dir, Query{}); !errs.Is(err, errs.IO) {
				t.Errorf("reading the older file: %v", err)
			}
		})
	}
}
