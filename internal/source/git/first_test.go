package git

import (
	"context"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"pando/internal/base/ref"
	"pando/internal/driver/plain"
	"pando/internal/engine"
	"pando/internal/engine/content"

	"golang.org/x/sys/unix"
)

// TestClonesWaitForFirstImport: clones of a repository that is imported for the first time wait for its golden, also
// those at another revision.
func TestClonesWaitForFirstImport(t *testing.T) {
	w := newWorld(t, plain.Name, 256<<20)
	w.commit("file", "one")
	w.upstream("branch", "other")
	for name, revision := range map[string]string{"as-it-is": "", "at-revision": "other"} {
		t.Run(name, func(t *testing.T) {
			waited := false
			var golden string
			var finish func()
			content.AtStep = func(step string) {
				if step == "waiting for golden" {
					waited = true
					finish()
				}
			}
			defer func() { content.AtStep = func(string) {} }()
			golden, finish = importHeld(t, w)
			defer finish()

			q := engine.CloneRequest{From: ref.Ref{Name: golden}, Name: ref.MustName("v-" + name)}
			var err error
			if revision != "" {
				_, err = Checkout(t.Context(), w.e, CheckoutRequest{Revision: revision, Offline: true, Env: os.Environ()}, q)
			} else {
				_, err = w.e.Clone(t.Context(), q)
			}
			if err != nil || !waited {
				t.Errorf("%v, waited %v", err, waited)
			}
		})
	}
}

// importHeld begins to import the repository as a golden, and returns when its preparation runs, which goes on and ends
// with finish.
func importHeld(t *testing.T, w *world) (golden string, finish func()) {
	t.Helper()
	golden = filepath.Base(t.Name())
	fifo := filepath.Join(t.TempDir(), "fifo")
	must(t, unix.Mkfifo(fifo, 0o600))
	s := w.source()
	s.Prepare = "read line <" + fifo
	ended := make(chan error, 1)
	go func() {
		_, err := Import(context.WithoutCancel(t.Context()), w.e,
			ImportRequest{Golden: ref.MustName(golden), Source: s, Env: os.Environ()})
		ended <- err
	}()

	opened := make(chan *os.File, 1)
	go func() {
		f, err := os.OpenFile(fifo, os.O_WRONLY, 0) // when the preparation opens it, too
		if err != nil {
			t.Error(err)
		}
		opened <- f
	}()
	select {
	case err := <-ended:
		t.Fatalf("the import has ended: %v", err)
		return "", nil
	case f := <-opened:
		return golden, sync.OnceFunc(func() {
			if _, err := f.WriteString("go on\n"); err != nil {
				t.Error(err)
			}
			f.Close()
			if err := <-ended; err != nil {
				t.Errorf("import: %v", err)
			}
		})
	}
}
