package syncbench

import (
	"context"
	"path/filepath"
	"strings"
	"testing"

	"pando/internal/linux/zfs"
	"pando/internal/observe/stack"
	"pando/internal/testing/testfs"
)

// TestZFSProperties: a report holds the properties that decide what a sync costs.
func TestZFSProperties(t *testing.T) {
	pool := testfs.ZFS(t, 512<<20)
	dir := filepath.Join(t.TempDir(), "db")
	ctx := context.Background()
	if err := zfs.ZFS.Do(ctx, "create", "-o", "recordsize=16K", "-o", "logbias=throughput", "-o", "mountpoint="+dir,
		pool+"/db"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := zfs.ZFS.Do(context.Background(), "destroy", pool+"/db"); err != nil {
			t.Error(err)
		}
	})
	if err := zfs.ZFS.Do(ctx, "set", "compression=lz4", pool); err != nil {
		t.Fatal(err)
	}
	s, err := stack.Of(ctx, dir)
	if err != nil {
		t.Fatal(err)
	}
	got := layers(ctx, s)
	wanted := map[string][]string{
		string(stack.Filesystem): {"recordsize=16K,", "logbias=throughput,", "compression=lz4 (inherited)", "sync=standard",
			"primarycache=all", "atime="},
		string(stack.Zpool): {"ashift=", "capacity="},
	}
	for _, l := range got {
		if l.Depth > 1 {
			continue
		}
		for _, w := range wanted[l.Kind] {
			if !strings.Contains(l.Details, w) {
				t.Errorf("%s has no %q: %s", l.Name, w, l.Details)
			}
		}
		delete(wanted, l.Kind)
	}
	if len(wanted) > 0 {
		t.Errorf("not in the layers: %v; %v", wanted, got)
	}
}
