package engine_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver/plain"
	"pando/internal/engine"
)

// goldenVerbs are the verbs that need a golden, each with the error that it returns for a complete one.
var goldenVerbs = []struct {
	name string
	do   func(ctx context.Context, e *engine.Engine, golden string) error
	want errs.Kind
}{
	{name: "clone", do: func(ctx context.Context, e *engine.Engine, golden string) error {
		_, err := e.Clone(ctx, cloneOf(golden))
		return err
	}},
	{name: "clone as the golden says", do: func(ctx context.Context, e *engine.Engine, golden string) error {
		q := cloneOf(golden)
		q.GoldenDecides = true
		_, err := e.Clone(ctx, q)
		return err
	}},
	{name: "clone of a generation", do: func(ctx context.Context, e *engine.Engine, golden string) error {
		q := cloneOf(golden)
		q.From.At = "1"
		_, err := e.Clone(ctx, q)
		return err
	}},
	{name: "fork", want: errs.Invalid, do: func(ctx context.Context, e *engine.Engine, golden string) error {
		_, err := e.Fork(ctx, cloneOf(golden))
		return err
	}},
	{name: "run", do: func(ctx context.Context, e *engine.Engine, golden string) error {
		_, err := e.RunFunc(ctx, engine.RunRequest{From: ref.Ref{Name: golden}, GoldenDecides: true},
			func(context.Context, api.Object) error { return nil })
		return err
	}},
	{name: "source", do: func(ctx context.Context, e *engine.Engine, golden string) error {
		_, err := e.GoldenSource(ctx, ref.MustName(golden))
		return err
	}},
	{name: "set", do: func(ctx context.Context, e *engine.Engine, golden string) error {
		three := 3
		_, err := e.SetGolden(ctx, engine.SetRequest{Golden: ref.MustName(golden), Keep: &three})
		return err
	}},
	{name: "label", do: func(ctx context.Context, e *engine.Engine, golden string) error {
		_, err := e.SetLabels(ctx, engine.LabelRequest{Ref: ref.Ref{Name: golden}, Set: map[string]string{"a": "b"}})
		return err
	}},
	{name: "labels", do: func(ctx context.Context, e *engine.Engine, golden string) error {
		_, err := e.Labels(ctx, ref.Ref{Name: golden})
		return err
	}},
	{name: "export", do: func(ctx context.Context, e *engine.Engine, golden string) error {
		file := filepath.Join(filepath.Dir(e.Dir()), golden+".tar")
		defer os.Remove(file)
		_, err := e.Export(ctx, engine.ExportRequest{From: ref.Ref{Name: golden}, File: file})
		return err
	}},
	{name: "diff", do: func(ctx context.Context, e *engine.Engine, golden string) error {
		_, err := e.Diff(ctx, engine.DiffRequest{A: ref.Ref{Name: "other"}, B: ref.Ref{Name: golden}})
		return err
	}},
}

// cloneOf is a request for a clone with a name of its own.
func cloneOf(golden string) engine.CloneRequest {
	return engine.CloneRequest{From: ref.Ref{Name: golden}, Name: ref.MustName("of-" + golden)}
}

// firstBuild is a pool with a golden "other", and another process's view of it, which builds goldens.
func firstBuild(t *testing.T) (e, builder *engine.Engine) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: volumes are mounted here: run the tests as root")
	}
	e = newPool(t, t.TempDir(), engine.InitRequest{Driver: plain.Name})
	importTree(t, e, "other", source(t))
	builder = open(t, e.Dir())
	t.Cleanup(func() { builder.Close() })
	return e, builder
}

// eachVerb calls fn for each verb, with a golden that does not exist yet, whose name begins with prefix.
func eachVerb(
	t *testing.T, e *engine.Engine, prefix string, fn func(t *testing.T, golden string, do func() error, want errs.Kind),
) {
	t.Helper()
	for i, v := range goldenVerbs {
		t.Run(v.name, func(t *testing.T) {
			golden := fmt.Sprint(prefix, i)
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second) // of a wait that does not end
			defer cancel()
			fn(t, golden, func() error { return v.do(ctx, e, golden) }, v.want)
		})
	}
}

// TestFirstGenerationBetweenLookAndWait: a golden that is recorded after a verb has looked for it, and before the verb
// finds out whether somebody builds it, is found.
func TestFirstGenerationBetweenLookAndWait(t *testing.T) {
	e, builder := firstBuild(t)
	eachVerb(t, e, "g", func(t *testing.T, golden string, do func() error, want errs.Kind) {
		built := false
		engine.AtStep(t, func(step string) {
			switch step {
			case "golden not found":
				importTree(t, builder, golden, source(t))
				built = true
			case "waiting for golden":
				t.Error("waited for nobody")
			}
		})
		if err := do(); errs.KindOf(err) != want || !built {
			t.Errorf("%v, wanted kind %q; built in between: %v", err, want, built)
		}
	})
}

// heldImport begins an import, and returns what lets it end, in success or in failure.
func heldImport(t *testing.T, builder *engine.Engine, q engine.ImportRequest, fails bool) (finish func()) {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() {
		defer r.Close()
		_, err := builder.ImportStream(context.WithoutCancel(t.Context()), q, r)
		ended <- err
	}()

	// The import has begun, and cannot end, when it has taken the first bytes of an archive that is larger than a pipe
	// holds.
	tar := emptyTar(1 << 20)
	if _, err := w.Write(tar[:512<<10]); err != nil {
		t.Fatal(err)
	}

	return func() {
		if !fails {
			if _, err := w.Write(tar[512<<10:]); err != nil {
				t.Error(err)
			}
		}
		w.Close()
		if err := <-ended; (err != nil) != fails {
			t.Errorf("the import: %v", err)
		}
	}
}

// TestVerbsWaitForFirstGeneration: verbs that need a golden wait while its first generation is being built, however
// that is done, and find it; or return NotFound after the build has failed.
func TestVerbsWaitForFirstGeneration(t *testing.T) {
	e, builder := firstBuild(t)
	builds := map[string]func(t *testing.T, golden string, fails bool) (finish func()){
		"import": func(t *testing.T, golden string, fails bool) func() {
			return heldImport(t, builder, engine.ImportRequest{Name: ref.MustName(golden)}, fails)
		},
		// As of a repository that is being fetched: nothing in the catalogue names the golden before the end.
		"source": func(t *testing.T, golden string, fails bool) func() {
			_, unlock, _, err := builder.LockSource(t.Context(), ref.MustName(golden))
			if err != nil {
				t.Fatal(err)
			}
			return func() {
				if fails {
					unlock()
					return
				}
				importTree(t, builder, golden, source(t))
				t.Cleanup(unlock) // it may have more to do, for which nobody waits
			}
		},
	}
	for name, build := range builds {
		for _, fails := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, fails %v", name, fails), func(t *testing.T) {
				eachVerb(t, e, fmt.Sprint(name, fails), func(t *testing.T, golden string, do func() error, want errs.Kind) {
					waited := false
					var finish func()
					engine.AtStep(t, func(step string) {
						if step == "waiting for golden" {
							waited = true
							finish()
						}
					})
					finish = sync.OnceFunc(build(t, golden, fails))
					defer finish()
					if fails {
						want = errs.NotFound
					}
					if err := do(); errs.KindOf(err) != want || !waited {
						t.Errorf("%v, wanted kind %q; waited %v", err, want, waited)
					}
				})
			})
		}
	}
}

// TestNobodyWaitsInVain: whatever somebody builds, a missing generation or snapshot of something that exists is
// reported at once; and so is a missing golden to those who build it.
func TestNobodyWaitsInVain(t *testing.T) {
	e, builder := firstBuild(t)
	clone(t, e, "other", "volume", false)
	ctx := t.Context()
	for _, name := range []string{"other", "volume", "mine"} {
		locked, unlock, _, err := builder.LockSource(ctx, ref.MustName(name))
		if err != nil {
			t.Fatal(err)
		}
		defer unlock()
		ctx = locked
	}

	engine.AtStep(t, func(step string) {
		if step == "waiting for golden" {
			t.Fatal("waited")
		}
	})
	for _, c := range []struct {
		ctx  context.Context
		from ref.Ref
	}{{t.Context(), ref.Ref{Name: "other", At: "2"}}, {t.Context(), ref.Ref{Name: "volume", At: "none"}},
		{t.Context(), ref.Ref{Name: "none"}}, {ctx, ref.Ref{Name: "mine"}}, {ctx, ref.Ref{Name: "mine", At: "1"}}} {
		if _, err := e.Clone(c.ctx, engine.CloneRequest{From: c.from, Name: ref.MustName("v")}); !errs.Is(err,
			errs.NotFound) {
			t.Errorf("clone of %s: %v, wanted NotFound", c.from, err)
		}
	}

	// An empty volume is not made of a golden.
	if _, err := e.RunFunc(t.Context(), engine.RunRequest{From: ref.Ref{Name: "mine"}, Empty: true},
		func(context.Context, api.Object) error { return nil }); err != nil {
		t.Errorf("run in an empty volume: %v", err)
	}
}
