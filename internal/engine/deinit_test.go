package engine_test

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine"
	"pando/internal/engine/pool"
	"pando/internal/linux/mount"
	"pando/internal/testing/testfs"
)

// TestDeinitRefusedChangesNothing: what stops the removal of a pool is found out before
// anything is unmounted or destroyed.
func TestDeinitRefusedChangesNothing(t *testing.T) {
	eachKind(t, func(t *testing.T, e *engine.Engine, top string) {
		importTree(t, e, "g", source(t))
		clone(t, e, "g", "a", false)
		clone(t, e, "g", "b", true)
		v := clone(t, e, "g", "c", true)
		for what, stop := range map[string]func() (end func()){
			"a volume in use": func() func() {
				f, err := os.Open(v.Mountpoint)
				must(t, err)
				return func() { must(t, f.Close()) }
			},
			"a mount below a volume": func() func() {
				below := filepath.Join(v.Mountpoint, "below")
				must(t, os.MkdirAll(below, 0o755))
				must(t, unix.Mount(t.TempDir(), below, "", unix.MS_BIND, ""))
				return func() { must(t, mount.Unmount(below)) }
			},
			"a mount namespace": func() func() {
				cmd := exec.Command("sleep", "60")
				cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS}
				must(t, cmd.Start())
				return func() { must(t, cmd.Process.Kill()); _ = cmd.Wait() }
			},
			"the key of a remote": func() func() {
				remotes := filepath.Join(top, "pool", "remotes")
				must(t, os.MkdirAll(filepath.Join(remotes, "backup"), 0o700))
				return func() { must(t, os.RemoveAll(remotes)) }
			},
			"a file of somebody's": func() func() {
				file := filepath.Join(top, "pool", "mnt", "file")
				must(t, os.WriteFile(file, nil, 0o600))
				return func() { must(t, os.Remove(file)) }
			},
			"a file of somebody's among the data": func() func() {
				file := filepath.Join(top, "pool", "data", "file")
				must(t, os.WriteFile(file, nil, 0o600))
				return func() { must(t, os.Remove(file)) }
			},
			"a file of somebody's among the objects": func() func() {
				file := filepath.Join(top, "pool", "data", "objects", string(driver.NewID())+".txt")
				must(t, os.WriteFile(file, nil, 0o600))
				return func() { must(t, os.Remove(file)) }
			},
		} {
			end := stop()
			_, err := engine.Deinit(t.Context(), engine.DeinitRequest{Dir: filepath.Join(top, "pool"), Force: true}, drivers,
				func(context.Context, []string) error { return errs.New(errs.InUse, "", "", "the only key") })
			end()
			if !errs.Is(err, errs.InUse) {
				t.Fatalf("%s: %v, wanted an error of kind %s", what, err, errs.InUse)
			}
			for name, mounted := range map[string]bool{"g": false, "a": false, "b": true, "c": true} {
				if d, err := e.Show(t.Context(), ref.Ref{Name: name}); err != nil || d.Mounted() != mounted {
					t.Errorf("%s: %s is %+v, %v", what, name, d, err)
				}
			}
		}
	})
}

// TestDeinitTwice: while one deinit looks who uses a pool, another waits: two looks at once would unmount volumes.
func TestDeinitTwice(t *testing.T) {
	oneKind(t, func(t *testing.T, e *engine.Engine, top string) {
		importTree(t, e, "g", source(t))
		clone(t, e, "g", "v", true)
		remotes := filepath.Join(top, "pool", "remotes")
		must(t, os.MkdirAll(filepath.Join(remotes, "backup"), 0o700))

		var asked int
		q := engine.DeinitRequest{Dir: filepath.Join(top, "pool"), Force: true}
		var mayForget engine.MayForget
		mayForget = func(context.Context, []string) error {
			if asked++; asked > 1 {
				return nil
			}
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			if _, err := engine.Deinit(ctx, q, drivers, mayForget); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("the second deinit: %v", err)
			}
			return errs.New(errs.InUse, "", "", "the only key")
		}
		_, err := engine.Deinit(t.Context(), q, drivers, mayForget)
		if !errs.Is(err, errs.InUse) || asked != 1 {
			t.Errorf("the first deinit: %v, and %d of them asked for keys", err, asked)
		}
		if d, err := e.Show(t.Context(), ref.Ref{Name: "v"}); err != nil || !d.Mounted() {
			t.Errorf("v is %+v, %v", d, err)
		}

		// A pool that is no longer there when the lock is free is not emptied.
		must(t, os.RemoveAll(remotes))
		unlock, err := pool.Lock(t.Context(), q.Dir)
		must(t, err)
		failed := make(chan error)
		go func() {
			_, err := engine.Deinit(t.Context(), engine.DeinitRequest{Dir: q.Dir, Force: true}, drivers, nil)
			failed <- err
		}()
		waitForOpener(t, filepath.Join(q.Dir, "lock"))
		config := filepath.Join(q.Dir, "pool.json")
		must(t, os.Rename(config, config+".away"))
		unlock()
		wantKind(t, <-failed, errs.NotFound, "there is no pool")
		must(t, os.Rename(config+".away", config))
		if d, err := e.Show(t.Context(), ref.Ref{Name: "v"}); err != nil || !d.Mounted() {
			t.Errorf("v is %+v, %v", d, err)
		}
	})
}

// waitForOpener waits until this process has opened a file twice: the second to open it has read the pool, and wants
// its lock.
func waitForOpener(t *testing.T, path string) {
	t.Helper()
	path, err := filepath.EvalSymlinks(path)
	must(t, err)
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(time.Millisecond) {
		others := func(open string) bool { return open != path }
		if len(slices.DeleteFunc(testfs.OpenFiles(t, filepath.Dir(path)), others)) == 2 {
			return
		}
	}
	t.Fatalf("nobody else has opened %s", path)
}
