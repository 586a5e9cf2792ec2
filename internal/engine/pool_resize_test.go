package engine_test

import (
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/engine"
	"pando/internal/engine/pool"
	"pando/internal/linux/kernel"
	"pando/internal/testing/testfs"
)

// filePool makes a pool in a file of 400 MiB on an ext4.
func filePool(t *testing.T) (e *engine.Engine, fs *testfs.FS) {
	t.Helper()
	fs = testfs.New(t, "ext4", 2<<30)
	return newPool(t, fs.Dir(), engine.InitRequest{SizeBytes: 400 << 20}), fs
}

func resizePool(t *testing.T, e *engine.Engine, size int64) engine.PoolResized {
	t.Helper()
	out, err := e.ResizePool(t.Context(), engine.PoolResizeRequest{SizeBytes: size})
	must(t, err)
	return out
}

// openAgain opens a pool as another process does.
func openAgain(t *testing.T, e *engine.Engine) *engine.Engine {
	t.Helper()
	other, err := engine.Open(t.Context(), e.Dir(), drivers)
	must(t, err)
	t.Cleanup(other.Close)
	return other
}

// recorded returns what pool.json says about the file of a pool.
func recorded(t *testing.T, e *engine.Engine) pool.Backing {
	t.Helper()
	p, err := pool.Read(e.Dir())
	must(t, err)
	return *p.Config.Backing
}

// TestResizePool: a pool grows while others have it open, and all of them see the new size at once.
func TestResizePool(t *testing.T) {
	e, _ := filePool(t)
	other := openAgain(t, e)
	for _, c := range []struct {
		size, want int64
		add        bool
	}{{600 << 20, 600 << 20, false}, {100<<20 - 5, 700 << 20, true}} {
		before := recorded(t, e).SizeBytes
		out, err := e.ResizePool(t.Context(), engine.PoolResizeRequest{SizeBytes: c.size, Add: c.add})
		if err != nil || out.Dir != e.Dir() || out.BeforeBytes != before || out.SizeBytes != c.want {
			t.Errorf("%+v, %v", out, err)
		}
		for _, e := range []*engine.Engine{e, other} {
			p, err := e.Pool(t.Context(), engine.PoolRequest{})
			if err != nil || p.BackingBytes != out.SizeBytes || p.TotalBytes < out.SizeBytes*8/10 {
				t.Errorf("%+v, %v", p, err)
			}
		}
		if b := recorded(t, e); b.Growing || b.SizeBytes != out.SizeBytes {
			t.Errorf("recorded %+v", b)
		}
	}
	checkClean(t, e)
}

// TestResizePoolEmptiesLog: the log of the pool's filesystem is emptied before it grows, and again afterwards.
func TestResizePoolEmptiesLog(t *testing.T) {
	e, _ := filePool(t)
	var steps []string
	pool.AtStep = func(step string) { steps = append(steps, step) }
	t.Cleanup(func() { pool.AtStep = func(string) {} })
	resizePool(t, e, 500<<20)
	if got := strings.Join(steps, " "); got != "frozen emptied grown frozen" {
		t.Errorf("steps: %s", got)
	}
	steps = nil
	if resizePool(t, e, 500<<20); len(steps) > 0 {
		t.Errorf("with nothing to do: %v", steps)
	}
}

// TestResizePoolInterrupted: after a process that died when the filesystem had grown, with its guard, the next Open
// thaws the filesystem and records its size; but not while another process holds the lock.
func TestResizePoolInterrupted(t *testing.T) {
	e, _ := filePool(t)
	type dead struct{}
	func() {
		defer func() {
			if r := recover(); r != (dead{}) {
				t.Fatalf("it did not come to the step: %v", r)
			}
		}()
		pool.AtStep = func(step string) {
			if step == "grown" {
				panic(dead{}) // the lock is released, nothing more is recorded
			}
		}
		defer func() { pool.AtStep = func(string) {} }()
		_, _ = e.ResizePool(t.Context(), engine.PoolResizeRequest{SizeBytes: 500 << 20})
	}()
	data, err := os.Open(filepath.Join(e.Dir(), "data"))
	must(t, err)
	defer data.Close()
	must(t, kernel.Freeze(data))
	defer func() { _ = kernel.Thaw(data) }()
	if b := recorded(t, e); !b.Growing || b.SizeBytes != 400<<20 {
		t.Errorf("recorded %+v", b)
	}

	unlock, err := pool.Lock(t.Context(), e.Dir())
	must(t, err)
	_, err = pool.Open(t.Context(), e.Dir())
	must(t, err)
	if b := recorded(t, e); !b.Growing {
		t.Errorf("recorded %+v while another process has the lock", b)
	}
	unlock()

	p, err := pool.Open(t.Context(), e.Dir())
	must(t, err)
	if b := recorded(t, e); b.Growing || b.SizeBytes != 500<<20 || *p.Config.Backing != b {
		t.Errorf("recorded %+v, open with %+v", b, p.Config.Backing)
	}
	if err := kernel.Thaw(data); err == nil {
		t.Error("it was still frozen")
	}
}

// TestResizePoolFrozen: if another program has frozen the pool's filesystem, nothing changes, and it stays frozen.
func TestResizePoolFrozen(t *testing.T) {
	e, _ := filePool(t)
	data, err := os.Open(filepath.Join(e.Dir(), "data"))
	must(t, err)
	defer data.Close()
	must(t, kernel.Freeze(data))
	rescue := time.AfterFunc(20*time.Second, func() { _ = kernel.Thaw(data) }) // who grows it now waits for ever
	defer rescue.Stop()
	_, err = e.ResizePool(t.Context(), engine.PoolResizeRequest{SizeBytes: 500 << 20})
	openAgain(t, e)
	must(t, kernel.Thaw(data))
	st, serr := os.Stat(filepath.Join(e.Dir(), "backing.xfs"))
	must(t, serr)
	if b := recorded(t, e); !errs.Is(err, errs.InUse) || !strings.Contains(errs.HintOf(err), "fsfreeze") || b.Growing ||
		b.SizeBytes != 400<<20 || st.Size() != 400<<20 {
		t.Errorf("%v, recorded %+v, a file of %d bytes", err, b, st.Size())
	}
	resizePool(t, e, 500<<20)
}

// TestResizePoolRefuses: a refused size changes nothing, and the size that the hint names works.
func TestResizePoolRefuses(t *testing.T) {
	e, _ := filePool(t)
	before := recorded(t, e)
	hint := ""
	for _, c := range []struct {
		size int64
		add  bool
		kind errs.Kind
		hint string
	}{
		{0, false, errs.Invalid, ""}, {-1, true, errs.Invalid, ""}, {math.MaxInt64, true, errs.Invalid, ""},
		{399 << 20, false, errs.Invalid, "gc"},
		{1 << 60, false, errs.Invalid, "pool resize"}, {1 << 60, true, errs.Invalid, "pool resize"},
		{100 << 30, false, errs.NoSpace, "pool resize"}, {100 << 30, true, errs.NoSpace, "pool resize"},
	} {
		_, err := e.ResizePool(t.Context(), engine.PoolResizeRequest{SizeBytes: c.size, Add: c.add})
		var known *errs.Error
		if !errs.Is(err, c.kind) || !strings.Contains(errs.HintOf(err), c.hint) || !errors.As(err, &known) ||
			known.Op != "pool resize" || known.Ref != e.Dir() {
			t.Errorf("%+v: %v (hint %q)", c, err, errs.HintOf(err))
		}
		hint = errs.HintOf(err)
	}
	st, err := os.Stat(filepath.Join(e.Dir(), "backing.xfs"))
	must(t, err)
	if b := recorded(t, e); b != before || st.Size() != 400<<20 {
		t.Errorf("recorded %+v, a file of %d bytes", b, st.Size())
	}

	m := regexp.MustCompile(`(\d+)M\b`).FindStringSubmatch(hint)
	if m == nil {
		t.Fatalf("hint %q", hint)
	}
	n, _ := strconv.ParseInt(m[1], 10, 64)
	if out := resizePool(t, e, n<<20); out.SizeBytes <= 400<<20 {
		t.Errorf("%+v", out)
	}
	checkClean(t, e)
}

// TestResizePoolElsewhere: a filesystem at data/ that is not the one in the file stays as it is.
func TestResizePoolElsewhere(t *testing.T) {
	e, _ := filePool(t)
	data := filepath.Join(e.Dir(), "data")
	other := testfs.XFS(t, 400<<20)
	if out, err := exec.Command("mount", "--bind", other, data).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	_, err := e.ResizePool(t.Context(), engine.PoolResizeRequest{SizeBytes: 500 << 20})
	if out, uerr := exec.Command("umount", data).CombinedOutput(); uerr != nil {
		t.Fatalf("%v: %s", uerr, out)
	}
	if !errs.Is(err, errs.Conflict) || !strings.Contains(fmt.Sprint(err), "is not the filesystem in") {
		t.Errorf("%v", err)
	}
	if b := recorded(t, e); b.SizeBytes != 400<<20 || b.Growing {
		t.Errorf("recorded %+v", b)
	}
}
