package proof_test

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"pando/internal/observe/proof"
	"pando/internal/observe/stack"
	"pando/internal/observe/tracepoint"
	"pando/internal/testing/testfs"
)

// options of a run.
type options struct {
	call    string // "fdatasync" if empty
	writers int    // 1 if 0
	ms      int    // of the load, at least
	sample  time.Duration
	env     []string
	claims  string // the call that the load reports; "": what it does
	counts  bool   // judge by the counts alone
	syncs   int64  // that the load reports; 0: what it did
	busy    func() // what else goes on, from after the baseline on
	until   func() // waits for what must happen while the load runs; nil: nothing
}

// leastWrites is how many blocks each writer of a load writes at least. Results depend on counts, not on time: fewer
// would be within the tolerance for the flushes of other programs.
const leastWrites = 50

// leastMS is how long a load runs at least.
func leastMS() int {
	if testfs.Full() {
		return 400
	}
	return 0
}

// loadCommand is this program as a load on some files, which runs until its input is closed.
func loadCommand(t testing.TB, program, call string, ms int, files ...string) (cmd *exec.Cmd, input io.Closer) {
	t.Helper()
	cmd = exec.Command(program, append([]string{fmt.Sprint(ms), fmt.Sprint(leastWrites)}, files...)...)
	cmd.Env = append(os.Environ(), "PANDO_TEST_LOAD="+call)
	input, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	return cmd, input
}

// sampled samples syncs of a running load until there are some: a busy disk may do none in one sample.
func sampled(t *testing.T, w *proof.Watch, d time.Duration) {
	t.Helper()
	for try := 0; try < 30 && (try == 0 || w.Sampled() < 10); try++ {
		if err := w.Sample(t.Context(), d); err != nil {
			t.Fatal(err)
		}
	}
}

// calls are the names of Load.Call.
var calls = map[string]string{"fdatasync": "fdatasync", "fsync": "fsync", "dsync": "write (O_DSYNC)",
	"none": "fdatasync", "grow": "fsync"}

// watch runs a load in dir and proves it.
func watch(t *testing.T, dir string, o options) proof.Proof {
	t.Helper()
	return count(t, dir, o).judge(t, o)
}

// evidence is what was counted of a load. It can be judged more than once.
type evidence struct {
	*proof.Evidence
	load loaded
}

// count runs a load in dir and counts.
func count(t *testing.T, dir string, o options) evidence {
	t.Helper()
	if o.call == "" {
		o.call = "fdatasync"
	}
	o.writers, o.ms = max(1, o.writers), max(leastMS(), o.ms)
	files := makeFiles(t, dir, o.writers)
	s, err := stack.Of(t.Context(), dir)
	if err != nil {
		t.Fatal(err)
	}
	w, err := proof.New(t.Context(), s)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	if err := w.Baseline(t.Context(), 50*time.Millisecond); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	cmd, input := loadCommand(t, "/proc/self/exe", o.call, o.ms, files...)
	cmd.Env = append(cmd.Env, o.env...)
	cmd.Stdout, cmd.Stderr = &out, os.Stderr
	if o.busy != nil {
		o.busy()
	}
	if err := w.Start(cmd); err != nil {
		t.Fatal(err)
	}
	if o.sample > 0 {
		sampled(t, w, o.sample)
	}
	if o.until != nil {
		o.until()
	}
	if err := input.Close(); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	e, err := w.Stop()
	if err != nil {
		t.Fatal(err)
	}
	var l loaded
	if err := json.Unmarshal(out.Bytes(), &l); err != nil {
		t.Fatal(err)
	}
	return evidence{e, l}
}

// judge judges what was counted with the options given. With counts set, the facts are forgotten: do this last.
func (e evidence) judge(t *testing.T, o options) proof.Proof {
	t.Helper()
	if o.counts {
		e.Forget()
	}
	syncs := e.load.Syncs
	if o.syncs > 0 {
		syncs = o.syncs
	}
	claims := o.claims
	if claims == "" {
		claims = calls[cmp.Or(o.call, "fdatasync")]
	}
	p := e.Judge(proof.Load{Call: claims, Syncs: syncs, Writers: max(1, o.writers), P50: e.load.P50, WritesPerSync: 1})
	show(t, p)
	return p
}

// makeFiles makes files that are allocated and on disk.
func makeFiles(t *testing.T, dir string, n int) (files []string) {
	t.Helper()
	for i := range n {
		name := filepath.Join(dir, fmt.Sprintf("load%d", i))
		f, err := os.Create(name)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.Write(make([]byte, 512<<10)); err != nil {
			t.Fatal(err)
		}
		if err := f.Sync(); err != nil {
			t.Fatal(err)
		}
		f.Close()
		files = append(files, name)
	}
	return files
}

func show(t *testing.T, p proof.Proof) {
	t.Helper()
	b, err := json.MarshalIndent(p, "", " ")
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%s", b)
}

// layer is the part of a proof about a layer.
func layer(t *testing.T, p proof.Proof, name string) proof.LayerProof {
	t.Helper()
	for _, l := range p.Layers {
		if l.Name == name {
			return l
		}
	}
	t.Fatalf("no layer %q", name)
	return proof.LayerProof{}
}

// wantFail checks that a proof fails, at a layer, with a reason that holds some text.
func wantFail(t *testing.T, p proof.Proof, at, reason string) {
	t.Helper()
	if p.Result != proof.Fail || p.Layer != at {
		t.Errorf("result %q at %q, want it to fail at %q", p.Result, p.Layer, at)
	}
	if len(p.Reasons) == 0 || !strings.Contains(p.Reasons[0], reason) {
		t.Errorf("first reason of %q, want %q in it", p.Reasons, reason)
	}
}

// wantOK checks that a proof passes.
func wantOK(t *testing.T, p proof.Proof) {
	t.Helper()
	if p.Result != proof.OK || p.Layer != "" {
		t.Errorf("result %q at %q: %q", p.Result, p.Layer, p.Reasons)
	}
}

// needTracepoints skips where there are none: without them a test shows nothing.
func needTracepoints(t *testing.T) {
	t.Helper()
	if err := tracepoint.Available(); err != nil {
		skip(t, "%v", err)
	}
}

// skip is loud: as root and with PANDO_TEST_REQUIRE_ALL it fails.
func skip(t *testing.T, format string, args ...any) {
	t.Helper()
	if os.Getenv("PANDO_TEST_REQUIRE_ALL") != "" && os.Getuid() == 0 {
		t.Fatalf(format, args...)
	}
	t.Skipf("SKIPPED: "+format, args...)
}

// onDisk skips where temporary files are in memory: there all is a lie.
func onDisk(t *testing.T) {
	t.Helper()
	s, err := stack.Of(t.Context(), os.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	if s.Hidden != "" {
		skip(t, "temporary files are on no disk (%s): set TMPDIR to a directory that is on one", s.Hidden)
	}
}

// need looks for a program.
func need(t *testing.T, program, pkg string) {
	t.Helper()
	if _, err := exec.LookPath(program); err != nil {
		skip(t, "no %s: install %s", program, pkg)
	}
}

// do runs a program and returns what it prints.
func do(t *testing.T, program string, args ...string) string {
	t.Helper()
	out, err := exec.Command(program, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", program, strings.Join(args, " "), err, out)
	}
	return strings.TrimSpace(string(out))
}
