package engine_test

import (
	"context"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/driver/reflink"
	"pando/internal/engine"
	"pando/internal/linux/sandbox"
	"pando/internal/testing/testfs"
)

// TestShellInSandbox: a command in an existing volume can be kept apart from the host as one of a run is, with a
// timeout, and an end when its context ends. The volume is as mounted as before.
func TestShellInSandbox(t *testing.T) {
	e := newPool(t, testfs.New(t, "xfs", 800<<20).Dir(), engine.InitRequest{Driver: reflink.Name})
	importAs(t, e, "g", busyboxTree(t), driver.Ext4)
	clone(t, e, "g", "idle", false)
	clone(t, e, "g", "mounted", true)

	shell := func(ctx context.Context, volume, script string, change func(*engine.ShellRequest)) (
		engine.ShellResult, string, error,
	) {
		t.Helper()
		out := pipe(t)
		q := engine.ShellRequest{Volume: ref.MustName(volume), Command: []string{"sh", "-c", script},
			Env: []string{"PATH=/bin"}, Sandbox: engine.Sandbox{Root: true}, Stdout: out[1]}
		if change != nil {
			change(&q)
		}
		r, err := e.Shell(ctx, q)
		out[1].Close()
		text, rerr := io.ReadAll(out[0])
		must(t, rerr)
		return r, string(text), err
	}

	for volume, stays := range map[string]bool{"idle": false, "mounted": true} {
		r, text, err := shell(t.Context(), volume, "echo $PANDO_VOLUME $$; touch /new; exit 3", nil)
		must(t, err)
		d, err := e.Show(t.Context(), ref.MustName(volume).Ref())
		must(t, err)
		if r.Exit != 3 || !r.Ran || r.Stays != stays || d.Mounted() != stays || !strings.HasPrefix(text, volume+" ") {
			t.Errorf("%s: %+v, %q, mounted at %q", volume, r, text, d.Mountpoint)
		}
	}

	r, _, err := shell(t.Context(), "mounted", "sleep 1000",
		func(q *engine.ShellRequest) { q.Timeout = 200 * time.Millisecond })
	if err != nil || r.Exit != sandbox.ExitTimedOut {
		t.Errorf("with a timeout: %+v, %v", r, err)
	}

	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if r, _, err := shell(ctx, "mounted", "sleep 1000", nil); err == nil || r.Ran {
		t.Errorf("a context that ends: %+v, %v", r, err)
	}
	_, _, err = shell(t.Context(), "mounted", "true", func(q *engine.ShellRequest) { q.Sandbox.Bind = "/work" })
	if !errs.Is(err, errs.Invalid) {
		t.Errorf("a sandbox of two kinds: %v", err)
	}
	_, err = engine.ShellRequest{Volume: ref.MustName("idle"), Command: []string{"true"},
		Sandbox: engine.Sandbox{Root: true}}.Plan()
	if os.Geteuid() == 0 && !errs.Is(err, errs.Unsupported) {
		t.Errorf("a sandbox of root without its pool: %v", err)
	}
}
