package viaservice

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver/plain"
	"pando/internal/engine"
	"pando/internal/front/service"
)

func must(t *testing.T, errors ...error) {
	t.Helper()
	for _, err := range errors {
		if err != nil {
			t.Fatal(err)
		}
	}
}

// served makes a pool with a golden web and a service that has opened it, and returns both ways to it.
func served(t *testing.T) (*engine.Engine, *Pool) {
	t.Helper()
	dir := t.TempDir()
	drivers := engine.Drivers{plain.Name: plain.Open}
	_, err := engine.Init(t.Context(), engine.InitRequest{Dir: filepath.Join(dir, "pool"), Driver: plain.Name}, drivers)
	must(t, err)
	e, err := engine.Open(t.Context(), filepath.Join(dir, "pool"), drivers)
	must(t, err)
	t.Cleanup(e.Close)
	source := filepath.Join(dir, "source")
	must(t, os.Mkdir(source, 0o755), os.WriteFile(filepath.Join(source, "file"), []byte("v1"), 0o644))
	_, err = e.Import(t.Context(), engine.ImportRequest{Name: ref.MustName("web"), Source: source})
	must(t, err)

	s, err := service.New(e, service.Options{Drivers: drivers, Grace: time.Second})
	must(t, err)
	l, _, err := service.ListenUnix(filepath.Join(dir, "s"))
	must(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- s.Serve(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})

	p, err := Open(filepath.Join(dir, "s"))
	must(t, err)
	t.Cleanup(p.Close)
	return e, p
}

// TestRunRenewsLease: the volume of a run expires later and later while its program runs, and is gone after it.
func TestRunRenewsLease(t *testing.T) {
	e, p := served(t)
	p.lease = 300 * time.Millisecond
	fifo := filepath.Join(t.TempDir(), "go")
	done := make(chan error, 1)
	go func() {
		_, err := p.Run(t.Context(), engine.RunRequest{From: ref.MustName("web").Ref(), Name: ref.MustName("r"),
			Command: []string{"sh", "-c", "until [ -e " + fifo + " ]; do sleep 0.05; done"}, Env: os.Environ()})
		done <- err
	}()

	// It is renewed at least three times, and maintenance leaves it alone.
	seen := map[time.Time]bool{}
	for end := time.Now().Add(time.Minute); len(seen) < 4; time.Sleep(10 * time.Millisecond) {
		_, err := e.Maintain(t.Context())
		must(t, err)
		d, err := e.Show(t.Context(), ref.MustName("r").Ref())
		if len(seen) == 0 && errs.Is(err, errs.NotFound) {
			continue // not yet
		}
		must(t, err)
		if d.ExpiresAt == nil {
			t.Fatal("it does not expire")
		}
		seen[*d.ExpiresAt] = true
		if time.Now().After(end) {
			t.Fatalf("the ttl was renewed %d times", len(seen)-1)
		}
	}

	must(t, os.WriteFile(fifo, nil, 0o600), <-done)
	if names, err := e.VolumeNames(t.Context()); err != nil || len(names) > 0 {
		t.Errorf("left: %q, %v", names, err)
	}
}

// TestShell: a program runs in a volume that the service mounts for it, and unmounts unless it was mounted before.
func TestShell(t *testing.T) {
	e, p := served(t)
	name := ref.MustName("v")
	_, err := p.Clone(t.Context(), engine.CloneRequest{From: ref.MustName("web").Ref(), Name: name})
	must(t, err)
	q := engine.ShellRequest{Volume: name, Command: []string{"sh", "-c", "cat file >new; exit 3"}, Env: os.Environ()}
	for _, mounted := range []bool{false, true} {
		if mounted {
			_, err := p.Mount(t.Context(), engine.MountRequest{Volume: name})
			must(t, err)
			defer func() { _, _ = p.Umount(t.Context(), engine.UmountRequest{Volume: name}) }()
		}
		r, err := p.Shell(t.Context(), q)
		must(t, err)
		d, err := e.Show(t.Context(), name.Ref())
		must(t, err)
		if r.Exit != 3 || !r.Ran || r.Stays != mounted || d.Mounted() != mounted {
			t.Errorf("%+v, mounted at %q", r, d.Mountpoint)
		}
	}

	q.Command = nil
	if _, err := p.Shell(t.Context(), q); !errs.Is(err, errs.Invalid) {
		t.Errorf("without a command: %v", err)
	}
	q.Volume, q.Command = ref.MustName("none"), []string{"true"}
	if _, err := p.Shell(t.Context(), q); !errs.Is(err, errs.NotFound) {
		t.Errorf("in no volume: %v", err)
	}
}
