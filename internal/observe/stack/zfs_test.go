package stack_test

import (
	"crypto/rand"
	"path/filepath"
	"strings"
	"testing"

	"pando/internal/observe/stack"
	"pando/internal/testing/testfs"

	"golang.org/x/sys/unix"
)

// TestZFS: a dataset and a volume of a pool with a log device.
func TestZFS(t *testing.T) {
	disks := testfs.Disks(t, 3)
	pool := "pandotest-" + strings.ToLower(rand.Text()[:12])
	do(t, "zpool", "create", "-f", "-o", "cachefile=none", "-O", "mountpoint=none", pool, "mirror", disks[0], disks[1],
		"log", disks[2])
	defer do(t, "zpool", "destroy", "-f", pool)
	do(t, "zfs", "create", "-o", "mountpoint=legacy", pool+"/db")
	dir := t.TempDir()
	if err := unix.Mount(pool+"/db", dir, "zfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	defer unmount(t, dir)

	check := func(s *stack.Stack, first int) {
		t.Helper()
		if s.Hidden != "" || len(s.Layers) <= first {
			t.Fatalf("%+v", s)
		}
		if l := s.Layers[first]; l.Kind != stack.Zpool || l.Name != "zpool "+pool {
			t.Errorf("%+v", l)
		}
		leaves := map[string]stack.Layer{}
		for _, l := range s.Layers[first+1:] {
			if l.Depth == s.Layers[first].Depth+1 {
				leaves[strings.TrimRight(l.Name, "0123456789")] = l // its partition
			}
		}
		for i, d := range disks {
			l, ok := leaves[filepath.Base(d)]
			role, group := "", "mirror-0"
			if i == 2 {
				role, group = "log", l.Group
			}
			if !ok || l.Device == nil || l.Role != role || l.Group != group || l.Group == "" {
				t.Errorf("%s: %+v of %+v", d, l, leaves)
			}
		}
		if n := len(s.Bottom()); n != 3 {
			t.Errorf("%d disks at the bottom", n)
		}
	}
	s := of(t, dir)
	if l := s.Layers[0]; l.Name != "zfs on "+dir || l.Dataset != pool+"/db" || l.Kind != stack.Filesystem {
		t.Errorf("%+v", l)
	}
	check(s, 1)

	do(t, "zfs", "create", "-V", "64M", pool+"/vol")
	do(t, "udevadm", "settle")
	node := "/dev/zvol/" + pool + "/vol"
	do(t, "mkfs.ext4", "-q", node)
	inner := t.TempDir()
	if err := unix.Mount(node, inner, "ext4", 0, ""); err != nil {
		t.Fatal(err)
	}
	defer unmount(t, inner)
	s = of(t, inner)
	if l := s.Layers[1]; l.Dataset != pool+"/vol" || l.Kind != "zvol" || l.Device == nil || !l.Device.VolatileCache {
		t.Errorf("%+v", l)
	}
	check(s, 2)
	check(of(t, node), 1)
}
