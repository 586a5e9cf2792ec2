//go:build linux && (amd64 || arm64)

package crash

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"pando/internal/testing/testfs"
)

// stressProcesses work on one pool at once, and each has one volume after the other: two
// on the first kind of pool, one on the others, and with PANDO_TEST_FULL as many as go
// into a minute.
const stressProcesses = 50

// TestManyProcesses lets 50 processes at a time clone, mount, write, look,
// unmount and destroy, all from one golden.
func TestManyProcesses(t *testing.T) {
	for turn, k := range kinds {
		t.Run(k.name, func(t *testing.T) {
			w := newWorld(t, k)
			w.initPool()
			w.importGolden("g")
			more := func(lives int) bool { return lives < max(2-turn, 1) }
			if testfs.Full() {
				end := time.Now().Add(time.Minute)
				more = func(int) bool { return time.Now().Before(end) }
			}
			var wg sync.WaitGroup
			var rounds atomic.Int64
			for p := range stressProcesses {
				wg.Go(func() {
					rng := rand.New(rand.NewPCG(uint64(p), 1))
					for i := 0; more(i); i++ {
						if err := w.oneLife(fmt.Sprintf("p%d-%d", p, i), rng); err != nil {
							t.Error(err)
							return
						}
						rounds.Add(1)
					}
				})
			}
			wg.Wait()
			t.Logf("%d lives", rounds.Load())
			if s := w.state(); strings.Contains(s, "volume") {
				t.Errorf("left over:\n%s", s)
			}
			w.check()
			w.pando("clone", "g", "last", "--mount")
			w.sameTree(w.source, filepath.Join(w.dir, "mnt", "last"))
			w.pando("deinit", "--force")
			w.nothingLeft()
		})
	}
}

// oneLife takes one volume through its life, and checks what it holds.
func (w *world) oneLife(name string, rng *rand.Rand) error {
	do := func(args ...string) error {
		if _, err := w.tryProcess(args...); err != nil {
			return fmt.Errorf("pando %s: %w", strings.Join(args, " "), err)
		}
		return nil
	}
	mnt := filepath.Join(w.dir, "mnt", name)
	file := filepath.Join(mnt, "written by "+name)
	if rng.IntN(2) == 0 {
		if err := do("clone", "g", name, "--mount"); err != nil {
			return err
		}
	} else if err := do("clone", "g", name); err != nil {
		return err
	} else if err := do("mount", name); err != nil {
		return err
	}
	want := strings.Repeat(name+"\n", 1+rng.IntN(20000))
	if err := os.WriteFile(file, []byte(want), 0o600); err != nil {
		return err
	}
	if entries, err := os.ReadDir(mnt); err != nil || len(entries) != 3 {
		return fmt.Errorf("%s holds %v (%v)", name, entries, err)
	}
	if rng.IntN(2) == 0 {
		if err := do("umount", name); err != nil {
			return err
		}
		if err := do("mount", name); err != nil {
			return err
		}
	}
	if got, err := os.ReadFile(file); err != nil || string(got) != want {
		return fmt.Errorf("%s holds %d bytes instead of %d (%v)", file, len(got), len(want), err)
	}
	if got, err := os.ReadFile(filepath.Join(mnt, "a")); err != nil || string(got) != "content of a" {
		return fmt.Errorf("%s/a holds %q (%v)", name, got, err)
	}
	if rng.IntN(3) == 0 {
		if err := do("umount", name); err != nil {
			return err
		}
	}
	return do("destroy", name)
}

// sameTree compares two small trees by content.
func (w *world) sameTree(a, b string) {
	w.t.Helper()
	read := func(dir string) map[string]string {
		out := map[string]string{}
		err := filepath.WalkDir(dir, func(p string, d os.DirEntry, err error) error {
			if err != nil || d.IsDir() {
				return err
			}
			rel, _ := filepath.Rel(dir, p)
			if d.Type()&os.ModeSymlink != 0 {
				out[rel], err = os.Readlink(p)
				return err
			}
			content, err := os.ReadFile(p)
			out[rel] = string(content)
			return err
		})
		if err != nil {
			w.t.Fatal(err)
		}
		return out
	}
	x, y := read(a), read(b)
	if fmt.Sprint(x) != fmt.Sprint(y) {
		w.t.Errorf("%s and %s differ: %d and %d files", a, b, len(x), len(y))
	}
}
