package zfs_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/linux/run"
	"pando/internal/linux/zfs"
)

func TestCopy(t *testing.T) {
	p := newPool(t, 256<<20)
	do(t, zfs.ZFS, "create", p+"/a")
	do(t, zfs.ZFS, "snapshot", p+"/a@s")
	var got int64
	if err := zfs.Copy(t.Context(), []string{p + "/a@s"}, []string{"-u", p + "/b@x"}, func(n int64) {
		got = n
	}); err != nil || got == 0 {
		t.Errorf("%v, %d bytes", err, got)
	}
	do(t, zfs.ZFS, "list", p+"/b@x")
	for _, c := range []struct {
		reason   zfs.Reason
		kind     errs.Kind
		from, to string
	}{
		{zfs.Absent, errs.NotFound, p + "/a@nothing", p + "/c@x"},
		{zfs.Taken, errs.Exists, p + "/a@s", p + "/b@x"},
	} {
		if err := zfs.Copy(t.Context(), []string{c.from}, []string{"-u", c.to}, nil); !zfs.Is(err, c.reason) ||
			!errs.Is(err, c.kind) {
			t.Errorf("from %s to %s: %q of kind %q: %v", c.from, c.to, zfs.ReasonOf(err), errs.KindOf(err), err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := zfs.Copy(ctx, []string{p + "/a@s"}, []string{"-u", p + "/d@x"}, nil); !errs.Is(err, errs.Canceled) {
		t.Errorf("canceled: %v", err)
	}
	// What is no stream.
	err := run.Pipe(t.Context(), []string{"sh", "-c", "head -c 100000 /dev/urandom"},
		[]string{"zfs", "receive", "-u", p + "/e"}, nil)
	var f *run.Failure
	if !errors.As(err, &f) {
		t.Fatal(err)
	}
	if err := zfs.Classify("zfs receive", f); !zfs.Is(err, zfs.BadStream) || !errs.Is(err, errs.Damaged) {
		t.Errorf("no stream: %q, %v", zfs.ReasonOf(err), err)
	}
}

// TestDevice waits for the block device of a zvol, and for its going.
func TestDevice(t *testing.T) {
	p := newPool(t, 256<<20)
	ds := p + "/with space"
	do(t, zfs.ZFS, "create", "-s", "-V", "16m", "-o", "volmode=none", ds)
	if _, err := zfs.OpenDevice(ds); !errs.Is(err, errs.NotFound) {
		t.Errorf("without volmode: %v", err)
	}
	if _, err := zfs.AwaitDevice(t.Context(), ds, 50*time.Millisecond); !errs.Is(err, errs.Unsupported) ||
		errs.HintOf(err) == "" {
		t.Errorf("a device that does not come: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(50*time.Millisecond, cancel)
	if _, err := zfs.AwaitDevice(ctx, ds, time.Minute); !errs.Is(err, errs.Canceled) {
		t.Errorf("canceled: %v", err)
	}
	do(t, zfs.ZFS, "set", "volmode=dev", ds)
	f, err := zfs.AwaitDevice(t.Context(), ds, 10*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	path := f.Name()
	if held, err := zfs.HeldExclusively(f); held || err != nil {
		t.Errorf("held: %v, %v", held, err)
	}
	if g, err := zfs.FindDevice(ds); err != nil || g.Name() != path {
		t.Errorf("found %v, %v", g, err)
	} else {
		g.Close()
	}
	if names, err := zfs.Devices(p); err != nil || !slices.Equal(names, []string{"with space"}) {
		t.Errorf("devices %q, %v", names, err)
	}
	excl, err := os.OpenFile(path, os.O_RDONLY|os.O_EXCL, 0)
	if err != nil {
		t.Fatal(err)
	}
	if held, err := zfs.HeldExclusively(f); !held || err != nil {
		t.Errorf("held: %v, %v", held, err)
	}
	excl.Close()
	if zfs.AwaitNoDevice(t.Context(), ds, path, 50*time.Millisecond) {
		t.Error("a device that is there is gone")
	}
	f.Close()
	do(t, zfs.ZFS, "set", "volmode=none", ds)
	if !zfs.AwaitNoDevice(t.Context(), ds, path, 10*time.Second) {
		t.Error("the device stays")
	}
	if _, err := zfs.FindDevice(ds); !errs.Is(err, errs.NotFound) {
		t.Errorf("found what is gone: %v", err)
	}
	if strings.Contains(zfs.Device(ds), " ") || filepath.Dir(zfs.Device(ds)) != "/dev/zvol/"+p {
		t.Errorf("device %s", zfs.Device(ds))
	}
}
