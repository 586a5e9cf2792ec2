package syncbench

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/testing/testfs"
	"pando/internal/testing/tracetest"
)

// childEnv holds the Config, as JSON, of a process that only measures.
const childEnv = "PANDO_TEST_SYNCBENCH"

func TestMain(m *testing.M) {
	if config := os.Getenv(childEnv); config != "" {
		os.Exit(child(config))
	}
	tracetest.Hold(tracetest.Syncs()...)
	os.Exit(m.Run())
}

// child measures as the program does: a signal ends the context.
func child(config string) int {
	var c Config
	if err := json.Unmarshal([]byte(config), &c); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	_, err := Measure(ctx, c)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return errs.KindOf(err).Codes().Exit
	}
	return 0
}

// need skips where a program is missing.
func need(t testing.TB, programs ...string) {
	t.Helper()
	for _, p := range programs {
		if _, err := exec.LookPath(p); err != nil {
			t.Skipf("SKIPPED: %v: apt-get install %s", err, p)
		}
	}
}

// quick is a short run of a profile with small files. In `make test` it is shorter than users may ask for; fio then
// reports once, at its end.
func quick(path, profile string) Config {
	c := Config{Path: path, Profile: profile, Version: "test", Quick: true, Duration: shortest, SizeBytes: 16 << 20}
	if !testfs.Full() {
		c.Duration, c.brief = 400*time.Millisecond, true
	}
	return c
}

func measure(t testing.TB, c Config) *Report {
	t.Helper()
	r, err := Measure(t.Context(), c)
	if err != nil {
		t.Fatalf("%+v: %v (%s)", c, err, errs.HintOf(err))
	}
	return r
}

// empty fails the test if anything is left in a directory.
func empty(t testing.TB, dir string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if e.Name() != "lost+found" {
			t.Errorf("%s is left", filepath.Join(dir, e.Name()))
		}
	}
}

// wait looks until something is so.
func wait(t testing.TB, what string, so func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !so(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("waited in vain: %s", what)
		}
	}
}

// stage waits until what is measured has come to a stage.
func stage(t testing.TB, tracker *progress.Tracker, stage progress.Stage) {
	t.Helper()
	wait(t, stage.String(), func() bool { return tracker.State().Stage == stage })
}

// kindIs fails the test if an error is not of a kind, or its text or hint do not say all that they should.
func kindIs(t testing.TB, err error, kind errs.Kind, says ...string) {
	t.Helper()
	if !errs.Is(err, kind) {
		t.Fatalf("error of kind %q: %v; want %q", errs.KindOf(err), err, kind)
	}
	for _, s := range says {
		if text := err.Error() + "\n" + errs.HintOf(err); !strings.Contains(text, s) {
			t.Errorf("the error does not say %q: %s", s, text)
		}
	}
}
