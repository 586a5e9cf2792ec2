package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/driver/reflink"
	"pando/internal/engine"
	"pando/internal/remote/replicate"
	"pando/internal/service/rounds"
	"pando/internal/testing/testfs"
)

// TestProgressMasksURLs: no form of progress shows a secret.
func TestProgressMasksURLs(t *testing.T) {
	const secret = "https://token@host/x"
	s := progress.State{Stage: progress.Fetching, Of: secret, Stalled: &progress.Stall{Answer: secret, Of: 2}}
	for _, line := range []string{progressJSON(s, time.Second), describeProgress(s, time.Second)} {
		if strings.Contains(line, "token") || strings.Count(line, "***@host") < 1 {
			t.Error(line)
		}
	}
}

// TestStalledProgress: what is waited for is said in place of the time left, which nobody knows then.
func TestStalledProgress(t *testing.T) {
	s := progress.State{Stage: progress.Pushing, Bytes: 1 << 20, TotalBytes: 2 << 20}
	if got := describeProgress(s, time.Second); !strings.Contains(got, " left") {
		t.Errorf("no time left in %q", got)
	}
	s.Stalled = &progress.Stall{Answer: "server answers 503", Attempt: 4, Of: 10, Next: time.Now().Add(6 * time.Second)}
	if got, want := describeProgress(s,
		time.Second), "pushing, 1.0 MiB of 2.0 MiB: server answers 503, attempt 4 of 10, next in 6 s"; got != want {
		t.Errorf("%q, not %q", got, want)
	}
	var got map[string]map[string]any
	if err := json.Unmarshal([]byte(progressJSON(s, time.Second)), &got); err != nil {
		t.Fatal(err)
	}
	stalled, _ := got["progress"]["stalled"].(map[string]any)
	if _, left := got["progress"]["seconds_left"]; left || stalled["answer"] != "server answers 503" ||
		stalled["attempt"] != 4.0 ||
		stalled["of"] != 10.0 {
		t.Errorf("%v", got)
	}
}

// TestIdle: an estimate is withdrawn also where a request hangs and nobody has said so.
func TestIdle(t *testing.T) {
	var i idle
	now := time.Now()
	s := progress.State{Stage: progress.Pushing, Bytes: 5, TotalBytes: 10}
	for _, c := range []struct {
		seconds int
		want    string
	}{{0, ""}, {14, ""}, {15, "no progress for 15 s"}, {40, "no progress for 40 s"}} {
		got := ""
		if x := i.markStalled(s, now.Add(time.Duration(c.seconds)*time.Second)); x.Stalled != nil {
			got = stallWords(x.Stalled)
		}
		if got != c.want {
			t.Errorf("after %d s: %q, not %q", c.seconds, got, c.want)
		}
	}
	s.Bytes++
	if x := i.markStalled(s, now.Add(time.Minute)); x.Stalled != nil {
		t.Errorf("stalled in spite of progress: %v", x.Stalled)
	}
}

// TestOutageLines: where no progress is shown lines say it, but not many; and none where a command says it once.
func TestOutageLines(t *testing.T) {
	w := replicate.Waiting{Attempt: 4, Of: 10, Pause: 6 * time.Second}
	w.Answer.Words = "server answers 503"
	said := func(change func(*App), waits ...replicate.Waiting) string {
		var out strings.Builder
		a := &App{Stderr: &out, outage: &outage{}}
		change(a)
		for _, w := range waits {
			a.outage.showRetry(a, w)
		}
		return out.String()
	}
	short := w
	short.Pause = 400 * time.Millisecond
	if got, want := said(func(*App) {}, short, w, w,
		w), "pando: server answers 503, attempt 4 of 10, next in 6 s\n"; got != want {
		t.Errorf("%q, not %q", got, want)
	}
	for _, change := range []func(*App){
		func(a *App) { a.quiet = true }, func(a *App) { a.noProgress = true }, func(a *App) { a.lasting = true },
	} {
		if got := said(change, w); got != "" {
			t.Errorf("%q, not nothing", got)
		}
	}
	tracker := &progress.Tracker{}
	if got := said(func(a *App) { a.outage.showIn(tracker); t.Cleanup(a.outage.endRetry) }, w); got != "" ||
		tracker.State().Stalled == nil {
		t.Errorf("%q, and the tracker says %v", got, tracker.State().Stalled)
	}
}

// TestChanges: a problem that rounds have is a warning, and its end a note.
func TestChanges(t *testing.T) {
	var out strings.Builder
	a := &App{Stderr: &out}
	one, two := errors.New("wrong"), errs.New(errs.NoSpace, "push", "v", "full").WithHint("make room")
	since := time.Now().Add(-3 * time.Second)
	a.printChange("pushing", rounds.Change{Err: errors.Join(one, two), Failed: 1, Since: since, Pause: 15 * time.Minute})
	a.printChange("pushing", rounds.Change{Failed: 101, Since: since})
	want := "pando: wrong\n" +
		"pando: warning: push v: full; hint: make room; retrying at least every 15 min, and reporting when " +
		"pushing works again\n" +
		"pando: pushing works again after 3 s and 101 failed rounds\n"
	if out.String() != want {
		t.Errorf("%s\nnot\n%s", out.String(), want)
	}
}

// lineCounter calls at with the number of each line that is written.
type lineCounter struct {
	mu sync.Mutex
	n  int
	at func(n int)
}

func (c *lineCounter) Write(b []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for range bytes.Count(b, []byte("\n")) {
		c.n++
		c.at(c.n)
	}
	return len(b), nil
}

// TestPushEveryKeepsNothingOpen: as many descriptors are open after many rounds as after the first.
func TestPushEveryKeepsNothingOpen(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: pools of images need root: run the tests as root")
	}
	dir := testfs.XFS(t, 1<<30)
	source := t.TempDir()
	if err := os.WriteFile(filepath.Join(source, "f"), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	var errout bytes.Buffer
	a := &App{
		Drivers: engine.Drivers{reflink.Name: reflink.Open}, Stdout: io.Discard, Stderr: &errout,
		dir: filepath.Join(dir, "pool"), noProgress: true, lasting: true,
	}
	for _, args := range [][]string{
		{"init", "--driver", "reflink"},
		{"golden", "import", "web", source, "--fs", "ext4", "--size", "64M"},
		{"clone", "web", "job"},
		{"remote", "add", "far", "file:" + filepath.Join(t.TempDir(), "remote")},
	} {
		if code := a.Run(t.Context(), append([]string{"--pool", a.dir}, args...)); code != 0 {
			t.Fatalf("pando %s: exit code %d: %s", strings.Join(args, " "), code, errout.String())
		}
	}

	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	counts := map[int][]string{}
	a.Stdout = &lineCounter{at: func(n int) { // a line is printed after each round
		counts[n] = descriptors(t)
		if n == 12 {
			stop()
		}
	}}
	if err := a.pushEvery(ctx, "far", []string{"job"}, replicate.PushRequest{}, time.Millisecond); err != nil {
		t.Fatalf("%v: %s", err, errout.String())
	}
	if first, last := counts[2], counts[12]; len(first) == 0 || len(first) != len(last) {
		t.Errorf("%d descriptors after the second round, %d after the twelfth:\n%s\n\n%s",
			len(first), len(last), strings.Join(first, "\n"), strings.Join(last, "\n"))
	}
}

// descriptors are what is open in this process.
func descriptors(t *testing.T) (out []string) {
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Error(err)
	}
	for _, e := range entries {
		to, err := os.Readlink("/proc/self/fd/" + e.Name())
		if err == nil {
			out = append(out, to)
		}
	}
	return out
}
