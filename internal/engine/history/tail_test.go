package history

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"pando/internal/base/errs"
)

// tailed reads all that a tail has now, as a word for each event; gaps are "GAP".
func tailed(t *testing.T, tail *Tail) (words string, last string) {
	t.Helper()
	var out []string
	for range 5 { // moving on to another file takes calls without events
		events, gap, err := tail.Next()
		if err != nil {
			t.Fatal(err)
		}
		if gap {
			out = append(out, "GAP")
		}
		for _, e := range events {
			out = append(out, e.Name)
			last = e.ID
		}
	}
	return strings.Join(out, " "), last
}

func following(t *testing.T, dir, after string) *Tail {
	t.Helper()
	tail, err := Follow(dir, after)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(tail.Close)
	return tail
}

// full is a log whose files are full after a few events.
func full(dir string) *Log { return &Log{dir, 300} }

func add(t *testing.T, l *Log, names ...string) {
	t.Helper()
	for _, n := range names {
		if err := l.Append(one(event("clone", "volume", n, n))); err != nil {
			t.Fatal(err)
		}
	}
}

// TestFollow: a tail has each event once, in order, from where it begins, through full files.
func TestFollow(t *testing.T) {
	dir := t.TempDir()
	early := following(t, dir, "") // before there is a log
	l := full(dir)
	add(t, l, "a", "b")
	now := following(t, dir, "")
	oldest := following(t, dir, Beginning)
	if got, _ := tailed(t, early); got != "a b" {
		t.Errorf("from before the first: %q", got)
	}
	if got, _ := tailed(t, now); got != "" {
		t.Errorf("from now: %q", got)
	}

	// Files become full while they are followed.
	var want []string
	for i := range 20 {
		name := fmt.Sprint("e", i)
		add(t, l, name)
		want = append(want, name)
		if got, _ := tailed(t, now); got != name {
			t.Errorf("event %d: %q", i, got)
		}
		if got, _ := tailed(t, early); got != name {
			t.Errorf("event %d: %q", i, got)
		}
	}
	if got, _ := tailed(t, oldest); !strings.HasPrefix(got, "a b") || !strings.Contains(got, "GAP") ||
		!strings.HasSuffix(got, want[len(want)-1]) {
		t.Errorf("a slow one: %q", got)
	}
}

// TestFollowAfter continues after each event that the log still has, and reports a gap after those that it has not.
func TestFollowAfter(t *testing.T) {
	dir := t.TempDir()
	l := full(dir)
	tail := following(t, dir, "")
	names, ids := []string{}, []string{}
	for i := range 9 {
		add(t, l, fmt.Sprint("e", i))
		got, id := tailed(t, tail)
		names, ids = append(names, got), append(ids, id)
	}
	if _, err := os.Stat(filepath.Join(dir, OldName)); err != nil {
		t.Fatal("the log has only one file")
	}

	kept := len(read(t, dir, Query{}).Events)
	for i, id := range ids {
		got, _ := tailed(t, following(t, dir, id))
		want := strings.Join(names[i+1:], " ")
		if first := len(names) - kept; i < first-1 {
			want = "GAP " + strings.Join(names[first:], " ")
		}
		// The one right before the oldest that is kept may be in a file that is gone.
		if got != want && got != "GAP "+want {
			t.Errorf("after %s: %q, want %q", names[i], got, want)
		}
	}
	if got, _ := tailed(t, following(t, dir, ids[len(ids)-1])); got != "" {
		t.Errorf("after the last: %q", got)
	}

	// A log that is gone as a whole.
	empty := t.TempDir()
	tail = following(t, empty, ids[0])
	if got, _ := tailed(t, tail); got != "GAP" {
		t.Errorf("without a log: %q", got)
	}
	for _, bad := range []string{"x", "0123456789abcdef", "0123456789abcdef-", "0123456789abcdef-zz",
		"0123456789abcdef--1", ids[len(ids)-1] + "ff"} {
		if _, err := Follow(dir, bad); !errs.Is(err, errs.Invalid) {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

// TestFollowTornLines: a line that is being written is not an event yet, and one that was cut off never is.
func TestFollowTornLines(t *testing.T) {
	dir := logOf(t, event("clone", "volume", "a", "a"))
	tail := following(t, dir, Beginning)
	if got, _ := tailed(t, tail); got != "a" {
		t.Errorf("%q", got)
	}

	path := filepath.Join(dir, FileName)
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	half := slices.Clone(text[:len(text)/2])
	if _, err := f.Write(half); err != nil {
		t.Fatal(err)
	}
	if got, _ := tailed(t, tail); got != "" {
		t.Errorf("half a line: %q", got)
	}
	if late := following(t, dir, ""); late.Position() != tail.Position() {
		t.Errorf("one that begins now is at %s, not %s", late.Position(), tail.Position())
	}
	add(t, New(dir), "b") // on the same line
	if got, _ := tailed(t, tail); got != "b" {
		t.Errorf("after half a line: %q", got)
	}
}
