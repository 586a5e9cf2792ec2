package engine_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/driver/btrfs"
	"pando/internal/driver/plain"
	"pando/internal/driver/reflink"
	"pando/internal/engine"
	"pando/internal/testing/testfs"
)

var buildEnv = []string{"PATH=" + os.Getenv("PATH")}

// toBuild is a request to run a shell command in a clone of the golden g, and publish it as built.
func toBuild(key, script string) engine.BuildRequest {
	return engine.BuildRequest{Golden: ref.MustName("built"), From: ref.Ref{Name: "g"}, Key: key,
		Command: []string{"sh", "-c", script}, Env: buildEnv}
}

// builders are pools of each kind that can build.
func builders(t *testing.T, fn func(t *testing.T, e *engine.Engine)) {
	for _, kind := range []struct{ driver, fs string }{
		{reflink.Name, "xfs"}, {btrfs.Name, "btrfs"}, {plain.Name, "xfs"},
	} {
		t.Run(kind.driver, func(t *testing.T) {
			e := newPool(t, testfs.New(t, kind.fs, 1<<30).Dir(), engine.InitRequest{Driver: kind.driver})
			importTree(t, e, "g", source(t))
			fn(t, e)
		})
	}
}

// read returns the content of a file in a generation.
func read(t *testing.T, e *engine.Engine, from, file string) string {
	t.Helper()
	vol := clone(t, e, from, "read", true)
	defer destroy(t, e, "read")
	b, err := os.ReadFile(filepath.Join(vol.Mountpoint, file))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestBuild(t *testing.T) {
	builders(t, func(t *testing.T, e *engine.Engine) {
		ctx := t.Context()
		var printed bytes.Buffer
		q := toBuild("k", `cat file; echo "$PANDO_VOLUME" >&2; echo result > new`)
		q.Output = &printed
		first, err := e.Build(ctx, q)
		if err != nil || first.Cached || first.Name != "built" || first.Generation != 1 || first.Origin != "g@1" ||
			first.BuildKey != "k" || first.Seconds <= 0 {
			t.Fatalf("%+v, %v", first, err)
		}
		if !strings.HasPrefix(printed.String(), "content") || !strings.Contains(printed.String(), "build-") {
			t.Errorf("it printed %q", printed.String())
		}
		if got := read(t, e, "built", "new"); got != "result\n" {
			t.Errorf("the result contains %q", got)
		}

		// The same key runs nothing, whatever the command is.
		for _, script := range []string{"exit 1", "true"} {
			again, err := e.Build(ctx, toBuild("k", script))
			if err != nil || !again.Cached || again.ID != first.ID {
				t.Errorf("%+v, %v", again, err)
			}
		}

		// It is the result after a rebuild, too.
		if _, err := engine.Rebuild(ctx, e.Dir(), drivers); err != nil {
			t.Fatal(err)
		}
		e = open(t, e.Dir())
		t.Cleanup(e.Close)
		again, err := e.Build(ctx, toBuild("k", "exit 1"))
		if err != nil || !again.Cached || again.ID != first.ID {
			t.Errorf("after a rebuild: %+v, %v", again, err)
		}

		// With another base the key is refused.
		q = toBuild("k", "true")
		q.From = ref.Ref{Name: "built", At: "1"}
		if _, err := e.Build(ctx, q); !errs.Is(err, errs.Conflict) || !strings.Contains(err.Error(), "built from g@1") {
			t.Errorf("another base: %v", err)
		}

		// Again replaces the result.
		q = toBuild("k", "echo other > new")
		q.Again = true
		second, err := e.Build(ctx, q)
		if err != nil || second.Cached || second.Generation != 2 {
			t.Errorf("again: %+v, %v", second, err)
		}
		if again, err := e.Build(ctx, toBuild("k", "exit 1")); err != nil || again.ID != second.ID {
			t.Errorf("the replaced result is found: %+v, %v", again, err)
		}

		// gc changes nothing of all that.
		if _, err := e.GC(ctx, false); err != nil {
			t.Fatal(err)
		}
		if got := read(t, e, "built", "new"); got != "other\n" {
			t.Errorf("the result contains %q", got)
		}
		noVolumes(t, e)
	})
}

// noVolumes fails if a build has left a volume.
func noVolumes(t *testing.T, e *engine.Engine) {
	t.Helper()
	all, err := e.Volumes(t.Context(), false)
	if err != nil || len(all) > 0 {
		t.Errorf("LEAK: %+v, %v", all, err)
	}
}

func buildLog(t *testing.T, e *engine.Engine, q engine.BuildLogRequest) (string, error) {
	t.Helper()
	q.Golden.Name = "built"
	f, err := e.BuildLog(t.Context(), q)
	if err != nil {
		return "", err
	}
	defer f.Close()
	b, err := io.ReadAll(f)
	return string(b), err
}

// TestBuildFails: nothing is published, and the log stays until the build succeeds.
func TestBuildFails(t *testing.T) {
	builders(t, func(t *testing.T, e *engine.Engine) {
		ctx := t.Context()
		_, err := e.Build(ctx, toBuild("k", `printf 'a\0b\n'; exit 7`))
		var failed *engine.CommandError
		if !errors.As(err, &failed) || failed.Exit != 7 || failed.Waited {
			t.Fatalf("%v", err)
		}
		if goldens, err := e.Goldens(ctx); err != nil || len(goldens) != 1 {
			t.Errorf("%+v, %v", goldens, err)
		}
		noVolumes(t, e)
		for _, q := range []engine.BuildLogRequest{{Failed: true}, {Failed: true, Key: "k"}} {
			if got, err := buildLog(t, e, q); got != "a\x00b\n" {
				t.Errorf("the log of %+v is %q, %v", q, got, err)
			}
		}
		if _, err := buildLog(t, e, engine.BuildLogRequest{}); !errs.Is(err, errs.NotFound) {
			t.Errorf("%v", err)
		}

		// It is not remembered as a result.
		done, err := e.Build(ctx, toBuild("k", "echo now"))
		if err != nil || done.Cached {
			t.Errorf("%+v, %v", done, err)
		}
		if got, err := buildLog(t, e, engine.BuildLogRequest{}); got != "now\n" {
			t.Errorf("the log is %q, %v", got, err)
		}
		if got, err := buildLog(t, e, engine.BuildLogRequest{Failed: true}); !errs.Is(err, errs.NotFound) {
			t.Errorf("the log of the failed build stays: %q, %v", got, err)
		}

		// The log goes with the generation.
		path := filepath.Join(e.Dir(), "builds", "results", done.ID+".log")
		if _, err := os.Stat(path); err != nil {
			t.Error(err)
		}
		if _, err := e.RemoveGolden(ctx, ref.Ref{Name: "built"}); err != nil {
			t.Fatal(err)
		}
		if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the log stays: %v", err)
		}
	})
}

func TestBuildRefuses(t *testing.T) {
	e := newPool(t, testfs.New(t, "xfs", 1<<30).Dir(), engine.InitRequest{Driver: reflink.Name})
	importTree(t, e, "g", source(t))
	clone(t, e, "g", "v", false)
	overlay(t, e, "g", "o", false)
	_, err := e.Snapshot(t.Context(), engine.SnapshotRequest{Volume: ref.MustName("o"), Name: ref.MustName("s")})
	must(t, err)
	for name, c := range map[string]struct {
		change func(*engine.BuildRequest)
		want   errs.Kind
	}{
		"no key":      {func(q *engine.BuildRequest) { q.Key = "" }, errs.Invalid},
		"long key":    {func(q *engine.BuildRequest) { q.Key = strings.Repeat("x", 257) }, errs.Invalid},
		"control":     {func(q *engine.BuildRequest) { q.Key = "a\nb" }, errs.Invalid},
		"no command":  {func(q *engine.BuildRequest) { q.Command = nil }, errs.Invalid},
		"no program":  {func(q *engine.BuildRequest) { q.Command = []string{"no-such-program"} }, errs.NotFound},
		"no base":     {func(q *engine.BuildRequest) { q.From.Name = "nothing" }, errs.NotFound},
		"a volume":    {func(q *engine.BuildRequest) { q.From.Name = "v" }, errs.Invalid},
		"an overlay":  {func(q *engine.BuildRequest) { q.From = ref.Ref{Name: "o", At: "s"} }, errs.Unsupported},
		"taken name":  {func(q *engine.BuildRequest) { q.Golden = ref.MustName("v") }, errs.Exists},
		"no dir":      {func(q *engine.BuildRequest) { q.Dir = "nothing" }, errs.NotFound},
		"dir outside": {func(q *engine.BuildRequest) { q.Dir = "../.." }, errs.Internal},
	} {
		t.Run(name, func(t *testing.T) {
			q := toBuild("k", "true")
			c.change(&q)
			if _, err := e.Build(t.Context(), q); err == nil || c.want != errs.Internal && !errs.Is(err, c.want) {
				t.Errorf("got %v, want %s", err, c.want)
			}
			if goldens, err := e.Goldens(t.Context()); err != nil || len(goldens) != 1 {
				t.Errorf("%+v, %v", goldens, err)
			}
		})
	}
}

// TestBuildOnce: of 100 callers of one key, one runs the command, and all get its result and see its output.
func TestBuildOnce(t *testing.T) {
	e := newPool(t, testfs.New(t, "xfs", 1<<30).Dir(), engine.InitRequest{Driver: reflink.Name})
	importTree(t, e, "g", source(t))
	counter := filepath.Join(t.TempDir(), "counter")
	const callers = 100
	var wg sync.WaitGroup
	ids, outputs, errors := make([]string, callers), make([]bytes.Buffer, callers), make([]error, callers)
	ran := 0
	var mu sync.Mutex
	for i := range callers {
		wg.Go(func() {
			q := toBuild("k", "echo begin; echo x >> "+counter+"; sleep 1; echo end")
			q.Output = &outputs[i]
			out, err := e.Build(t.Context(), q)
			ids[i], errors[i] = out.ID, err
			mu.Lock()
			defer mu.Unlock()
			if !out.Cached {
				ran++
			}
			if out.Waited == !out.Cached {
				t.Errorf("caller %d: waited %v, cached %v", i, out.Waited, out.Cached)
			}
		})
	}
	wg.Wait()
	for i := range callers {
		if errors[i] != nil || ids[i] != ids[0] || outputs[i].String() != "begin\nend\n" {
			t.Errorf("caller %d: %s, output %q, %v", i, ids[i], outputs[i].String(), errors[i])
		}
	}
	if b, err := os.ReadFile(counter); string(b) != "x\n" || ran != 1 {
		t.Errorf("the command ran %q times, %d callers say that it was theirs, %v", b, ran, err)
	}
}

// TestBuildFailsTogether: callers that waited for a build fail with it.
func TestBuildFailsTogether(t *testing.T) {
	e := newPool(t, testfs.New(t, "xfs", 1<<30).Dir(), engine.InitRequest{Driver: reflink.Name})
	importTree(t, e, "g", source(t))
	counter := filepath.Join(t.TempDir(), "counter")
	var wg sync.WaitGroup
	for range 10 {
		wg.Go(func() {
			_, err := e.Build(t.Context(), toBuild("k", "echo x >> "+counter+"; sleep 0.5; exit 3"))
			var failed *engine.CommandError
			if !errors.As(err, &failed) || failed.Exit != 3 {
				t.Errorf("got %v", err)
			}
		})
	}
	wg.Wait()
	if b, err := os.ReadFile(counter); string(b) != "x\n" {
		t.Errorf("the command ran %q times, %v", b, err)
	}

	// Who did not wait for it runs it again.
	if out, err := e.Build(t.Context(), toBuild("k", "true")); err != nil || out.Cached {
		t.Errorf("%+v, %v", out, err)
	}
}

// TestBuildKeepsBase: a result is that of the generation that was current when the build began, even if another is
// published before its command runs.
func TestBuildKeepsBase(t *testing.T) {
	e := newPool(t, testfs.New(t, "xfs", 1<<30).Dir(), engine.InitRequest{Driver: reflink.Name})
	importTree(t, e, "g", source(t))
	base, err := e.Point(t.Context(), ref.Ref{Name: "g"})
	if err != nil {
		t.Fatal(err)
	}

	q := toBuild("k", "test ! -e second")
	q.Fetch = func(ctx context.Context) (bool, error) {
		vol := clone(t, e, "g", "next", true)
		if err := os.WriteFile(filepath.Join(vol.Mountpoint, "second"), nil, 0o600); err != nil {
			return false, err
		}
		_, err := e.Publish(ctx, engine.PublishRequest{Golden: ref.MustName("g"), Volume: ref.MustName("next")})
		destroy(t, e, "next")
		return false, err
	}
	out, err := e.Build(t.Context(), q)
	if err != nil || out.Origin != base.Ref {
		t.Errorf("%+v, %v", out, err)
	}
}

// TestBuildAgainFailsTogether: a caller that wants the result replaced does not get the old one if the build that it
// has waited for fails.
func TestBuildAgainFailsTogether(t *testing.T) {
	e := newPool(t, testfs.New(t, "xfs", 1<<30).Dir(), engine.InitRequest{Driver: reflink.Name})
	importTree(t, e, "g", source(t))
	if _, err := e.Build(t.Context(), toBuild("k", "true")); err != nil {
		t.Fatal(err)
	}

	counter := filepath.Join(t.TempDir(), "counter")
	var wg sync.WaitGroup
	for range 5 {
		wg.Go(func() {
			q := toBuild("k", "echo x >> "+counter+"; sleep 0.5; exit 3")
			q.Again = true
			out, err := e.Build(t.Context(), q)
			var failed *engine.CommandError
			if !errors.As(err, &failed) || failed.Exit != 3 {
				t.Errorf("got %+v, %v", out, err)
			}
		})
	}
	wg.Wait()
	if b, err := os.ReadFile(counter); string(b) != "x\n" {
		t.Errorf("the command ran %q times, %v", b, err)
	}
}

// TestBuildOnceShort: the same for commands so short that callers find the lock free again, or no log to follow.
func TestBuildOnceShort(t *testing.T) {
	e := newPool(t, testfs.New(t, "xfs", 1<<30).Dir(), engine.InitRequest{Driver: reflink.Name})
	importTree(t, e, "g", source(t))
	dir := t.TempDir()
	var wg sync.WaitGroup
	for i := range 10 {
		key := fmt.Sprint("k", i)
		for range 20 {
			wg.Go(func() {
				var printed bytes.Buffer
				q := toBuild(key, "echo x >> "+filepath.Join(dir, key)+"; echo shown")
				q.Output = &printed
				out, err := e.Build(t.Context(), q)
				if err != nil || (out.Waited || !out.Cached) && printed.String() != "shown\n" {
					t.Errorf("%+v, %q, %v", out, printed.String(), err)
				}
			})
		}
	}
	wg.Wait()
	for i := range 10 {
		if b, err := os.ReadFile(filepath.Join(dir, fmt.Sprint("k", i))); string(b) != "x\n" {
			t.Errorf("k%d: the command ran %q times, %v", i, b, err)
		}
	}
}

// TestBuildInterrupted: a caller that waited for a build that was interrupted runs the command itself.
func TestBuildInterrupted(t *testing.T) {
	e := newPool(t, testfs.New(t, "xfs", 1<<30).Dir(), engine.InitRequest{Driver: reflink.Name})
	importTree(t, e, "g", source(t))
	started := filepath.Join(t.TempDir(), "started")
	ctx, interrupt := context.WithCancel(t.Context())
	first := make(chan error, 1)
	go func() {
		_, err := e.Build(ctx, toBuild("k", "echo first; touch "+started+"; sleep 100"))
		first <- err
	}()
	waitFor(t, started)

	second := make(chan engine.Built, 1)
	seen := firstWrite{begun: make(chan struct{})}
	go func() {
		q := toBuild("k", "echo second")
		q.Output = &seen
		out, err := e.Build(t.Context(), q)
		if err != nil {
			t.Error(err)
		}
		second <- out
	}()
	<-seen.begun // it waits for the first, and follows its log
	interrupt()
	if err := <-first; !errors.Is(err, context.Canceled) {
		t.Errorf("the first: %v", err)
	}
	if out := <-second; out.Cached || seen.text.String() != "first\nsecond\n" {
		t.Errorf("the second: %+v, %q", out, seen.text.String())
	}
	noVolumes(t, e)
}

// firstWrite closes begun with the first write.
type firstWrite struct {
	text  bytes.Buffer // not embedded: io.Copy would use its ReadFrom instead of Write
	once  sync.Once
	begun chan struct{}
}

func (w *firstWrite) Write(b []byte) (int, error) {
	n, err := w.text.Write(b)
	w.once.Do(func() { close(w.begun) })
	return n, err
}

func waitFor(t *testing.T, path string) {
	t.Helper()
	for range 1000 {
		if _, err := os.Stat(path); err == nil {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Fatalf("%s does not appear", path)
}

// TestBuildsInParallel: builds of different keys of one golden do not wait for each other.
func TestBuildsInParallel(t *testing.T) {
	e := newPool(t, testfs.New(t, "xfs", 1<<30).Dir(), engine.InitRequest{Driver: reflink.Name})
	importTree(t, e, "g", source(t))
	dir := t.TempDir()
	var wg sync.WaitGroup
	const n = 5
	for i := range n {
		wg.Go(func() {
			// Each ends only when all have begun.
			script := fmt.Sprintf("touch %[1]s/%[2]d; until [ $(ls %[1]s | wc -l) = %[3]d ]; do sleep 0.01; done", dir, i, n)
			if _, err := e.Build(t.Context(), toBuild(fmt.Sprint(i), script)); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
}

// TestBuildHeld: what a command leaves behind in the clone makes the build fail, and is named.
func TestBuildHeld(t *testing.T) {
	e := newPool(t, testfs.New(t, "xfs", 1<<30).Dir(), engine.InitRequest{Driver: reflink.Name})
	importTree(t, e, "g", source(t))
	pid := filepath.Join(t.TempDir(), "pid")
	_, err := e.Build(t.Context(), toBuild("k", `setsid sleep 100 >/dev/null 2>&1 & p=$!
		echo $p > `+pid+`; until [ "$(cut -d' ' -f6 /proc/$p/stat)" = $p ]; do :; done; sleep 0.1`))
	if !errs.Is(err, errs.InUse) || !strings.Contains(err.Error(), "sleep") {
		t.Errorf("got %v", err)
	}
	b, rerr := os.ReadFile(pid)
	if rerr != nil {
		t.Fatal(rerr)
	}
	var n int
	if _, err := fmt.Sscan(string(b), &n); err != nil {
		t.Fatal(err)
	}
	p, _ := os.FindProcess(n)
	if err := p.Kill(); err != nil {
		t.Fatal(err)
	}
	for range 500 {
		if _, err := e.Maintain(t.Context()); err != nil {
			t.Fatal(err)
		}
		if all, err := e.Volumes(t.Context(), false); err == nil && len(all) == 0 {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	noVolumes(t, e)
	if _, found, err := e.CachedBuild(t.Context(), toBuild("k", "true")); err != nil || found {
		t.Errorf("it is a result: %v", err)
	}
}

// TestBuildSealedLater: a fragmented result is published as it is, and sealed by a gc and while other commands run.
func TestBuildSealedLater(t *testing.T) {
	e := newPool(t, testfs.New(t, "xfs", 1<<30).Dir(), engine.InitRequest{Driver: reflink.Name})
	importTree(t, e, "g", source(t))
	scatter := `i=0; while [ $i -lt 400 ]; do
		dd if=/dev/urandom of=f bs=4k count=1 seek=$((i * 37 % 400 * 2)) conv=notrunc,fsync 2>/dev/null; i=$((i+1)); done`
	extents := func(name string) int64 {
		d, err := e.Show(t.Context(), ref.Ref{Name: "built", At: name})
		must(t, err)
		return d.Extents
	}
	for _, key := range []string{"1", "2"} {
		_, err := e.Build(t.Context(), toBuild(key, scatter))
		must(t, err)
	}
	before := read(t, e, "built", "f")
	if n := extents("2"); n < 200 {
		t.Fatalf("the result has only %d extents: this test shows nothing", n)
	}
	if n := extents("1"); n > 100 {
		t.Errorf("the first result, which a later build had time to seal, has %d extents", n)
	}
	r, err := e.GC(t.Context(), false)
	must(t, err)
	if n := extents("2"); n > 100 || r.Sealed != 1 {
		t.Errorf("after gc, which sealed %d, it has %d extents", r.Sealed, n)
	}
	if read(t, e, "built", "f") != before {
		t.Error("sealing has changed the content")
	}
	if r, err := e.GC(t.Context(), false); err != nil || r.Sealed != 0 {
		t.Errorf("a second gc sealed %d: %v", r.Sealed, err)
	}
}

// TestPruneChains: prune removes the last steps of a chain first, and keeps the steps before one that is in use.
func TestPruneChains(t *testing.T) {
	e := newPool(t, testfs.New(t, "xfs", 1<<30).Dir(), engine.InitRequest{Driver: reflink.Name})
	importTree(t, e, "g", source(t))
	ctx := t.Context()
	step := func(key, in string) {
		t.Helper()
		q := toBuild(key, "echo "+key+" > "+key)
		if in != "" {
			q.In = ref.Ref{Name: "built", At: in}
		}
		_, err := e.Build(ctx, q)
		must(t, err)
	}
	candidates := func(q engine.PruneRequest) string {
		t.Helper()
		q.DryRun = true
		r, err := e.Prune(ctx, q)
		must(t, err)
		var out []string
		for _, c := range r.Candidates {
			out = append(out, strings.TrimPrefix(c.Ref, "built@"))
		}
		return strings.Join(out, " ")
	}

	// Two chains, 1-2-3 and 1-4, and a current generation.
	step("a", "")
	step("b", "1")
	step("c", "2")
	step("d", "1")
	step("e", "")
	if got := candidates(engine.PruneRequest{Idle: time.Nanosecond}); got != "3 2 4 1" {
		t.Errorf("order %q", got)
	}

	// The use of the last step counts for all before it.
	idle := time.Hour
	engine.Age(t, e, 2*idle)
	if _, found, err := e.CachedBuild(ctx, toBuild("c", "")); err != nil || !found {
		t.Fatal(err)
	}
	if got := candidates(engine.PruneRequest{Idle: idle}); got != "4" {
		t.Errorf("after using step 3: %q", got)
	}
	if _, err := e.Pin(ctx, ref.Ref{Name: "built", At: "4"}, 0); err != nil {
		t.Fatal(err)
	}
	engine.Age(t, e, 2*idle)
	if got := candidates(engine.PruneRequest{Idle: idle}); got != "3 2 1" {
		t.Errorf("with step 4 pinned: %q", got)
	}

	// A later step is found without those before it.
	if _, err := e.RemoveGolden(ctx, ref.Ref{Name: "built", At: "2"}); err != nil {
		t.Fatal(err)
	}
	if _, found, err := e.CachedBuild(ctx, toBuild("c", "")); err != nil || !found {
		t.Errorf("step 3 is not found without step 2: %v", err)
	}
	if _, err := e.Unpin(ctx, ref.Ref{Name: "built", At: "4"}); err != nil {
		t.Fatal(err)
	}
}

// BenchmarkBuild compares a cached build, and an uncached one, with running the same command in a bare clone.
func BenchmarkBuild(b *testing.B) {
	fs := testfs.New(b, "xfs", 4<<30)
	dir := filepath.Join(fs.Dir(), "pool")
	if _, err := engine.Init(b.Context(), engine.InitRequest{Dir: dir, Driver: reflink.Name}, drivers); err != nil {
		b.Fatal(err)
	}
	e, err := engine.Open(b.Context(), dir, drivers)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		e.Close()
		if _, err := engine.Deinit(context.Background(), dir, true, drivers); err != nil {
			b.Error(err)
		}
	})
	src := b.TempDir()
	if err := os.WriteFile(filepath.Join(src, "file"), make([]byte, 1<<20), 0o600); err != nil {
		b.Fatal(err)
	}
	if _, err := e.Import(b.Context(), engine.ImportRequest{Name: ref.MustName("g"), Source: src, FS: driver.Ext4,
		SizeBytes: 256 << 20}); err != nil {
		b.Fatal(err)
	}

	const script = "echo x > new"
	b.Run("bare", func(b *testing.B) {
		for b.Loop() {
			q := engine.RunRequest{From: ref.Ref{Name: "g"}, Command: []string{"sh", "-c", script}, Env: buildEnv}
			if _, err := e.Run(b.Context(), q); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("uncached", func(b *testing.B) {
		for i := 0; b.Loop(); i++ {
			q := toBuild(fmt.Sprint(b.N, time.Now().UnixNano(), i), script)
			if _, err := e.Build(b.Context(), q); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("cached", func(b *testing.B) {
		q := toBuild("k", script)
		for b.Loop() {
			if _, err := e.Build(b.Context(), q); err != nil {
				b.Fatal(err)
			}
		}
	})
}
