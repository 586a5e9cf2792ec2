package blockdev_test

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"pando/internal/observe/blockdev"
	"pando/internal/testing/testfs"

	"golang.org/x/sys/unix"
)

// disk is the first disk of this host.
func disk(t *testing.T) blockdev.Device {
	t.Helper()
	all, err := blockdev.List()
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range all {
		if d.Kind == blockdev.Disk && d.SizeBytes > 0 {
			return d
		}
	}
	t.Skip("does not apply: this host has no disk of its own")
	return blockdev.Device{}
}

func TestDisk(t *testing.T) {
	d := disk(t)
	text := func(name string) string {
		t.Helper()
		b, err := os.ReadFile("/sys/block/" + d.Name + "/" + name)
		if err != nil {
			t.Fatal(err)
		}
		return strings.TrimSpace(string(b))
	}
	if got := d.ID(); got != text("dev") {
		t.Errorf("%s is %s", d.Name, got)
	}
	if d.VolatileCache != (text("queue/write_cache") == "write back") ||
		d.Rotational != (text("queue/rotational") == "1") || d.Transport == "" || d.LogicalBytes < 512 ||
		d.PhysicalBytes < d.LogicalBytes {
		t.Errorf("%+v", d)
	}
	if !strings.Contains(text("queue/scheduler"), d.Scheduler) || d.Scheduler == "" {
		t.Errorf("scheduler %q", d.Scheduler)
	}
	if below, err := d.Below(); err != nil || len(below) != 0 {
		t.Errorf("%v %v", below, err)
	}
	same, err := blockdev.LookupPath(d.Path())
	if err != nil || same.Number != d.Number || same.Name != d.Name {
		t.Errorf("%+v %v", same, err)
	}
}

func TestNoDevice(t *testing.T) {
	if _, err := blockdev.Lookup(unix.Mkdev(0, 12345)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%v", err)
	}
	if _, err := blockdev.LookupPath("/dev/null"); err == nil {
		t.Error("/dev/null is a block device")
	}
	if _, err := blockdev.LookupPath("/no/such"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%v", err)
	}
}

// TestLoop: a loop device, what it has done, and partitions on it.
func TestLoop(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: loop devices need root")
	}
	image := filepath.Join(t.TempDir(), "image")
	testfs.LeakCheck(t, filepath.Dir(image))
	if err := os.WriteFile(image, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(image, 64<<20); err != nil {
		t.Fatal(err)
	}
	node := do(t, "losetup", "-P", "--show", "-f", image)
	defer do(t, "losetup", "-d", node)
	if err := os.WriteFile("/sys/block/"+filepath.Base(node)+"/queue/write_cache", []byte("write back"), 0); err != nil {
		t.Fatal(err)
	}
	d, err := blockdev.LookupPath(node)
	if err != nil {
		t.Fatal(err)
	}
	if d.Kind != blockdev.Loop || d.Backing != image || d.SizeBytes != 64<<20 || !d.VolatileCache || d.ReadOnly ||
		d.DirectIO || d.Path() != node {
		t.Errorf("%+v", d)
	}

	before, err := d.Stat()
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(node, os.O_WRONLY|unix.O_DIRECT, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	block, err := unix.Mmap(-1, 0, 64<<10, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(block)
	const n = 5
	for i := range n {
		if _, err := f.WriteAt(block, int64(i)*int64(len(block))); err != nil {
			t.Fatal(err)
		}
		if err := f.Sync(); err != nil {
			t.Fatal(err)
		}
	}
	after, err := d.Stat()
	if err != nil {
		t.Fatal(err)
	}
	did := after.Minus(before)
	if did.WrittenBytes != n*64<<10 || did.Writes < n || did.Flushes != n || did.Discards != 0 || did.WriteTime < 0 ||
		did.FlushTime < 0 {
		t.Errorf("%+v", did)
	}

	if _, err := exec.LookPath("addpart"); err != nil {
		t.Skip("SKIPPED: no addpart: install util-linux")
	}
	do(t, "addpart", node, "1", "2048", "65536")
	defer do(t, "delpart", node, "1")
	p, err := blockdev.LookupPath(node + "p1")
	if err != nil {
		t.Fatal(err)
	}
	if p.Kind != blockdev.Partition || p.StartBytes != 1<<20 || p.SizeBytes != 32<<20 || !p.VolatileCache ||
		p.Backing != "" {
		t.Errorf("%+v", p)
	}
	if s, err := p.Stat(); err != nil || s.Flushes != -1 {
		t.Errorf("a partition counts no flushes of its own: %+v %v", s, err)
	}
	if below, err := p.Below(); err != nil || len(below) != 1 || below[0].Number != d.Number {
		t.Errorf("%v %v", below, err)
	}
	if above, err := d.Above(); err != nil || len(above) != 1 || above[0].Number != p.Number {
		t.Errorf("%v %v", above, err)
	}
	if above, err := p.Above(); err != nil || len(above) != 0 {
		t.Errorf("%v %v", above, err)
	}
}

// TestWriteThrough: a device without a volatile cache counts no flushes.
func TestWriteThrough(t *testing.T) {
	fs := testfs.New(t, "ext4", 32<<20)
	setting := "/sys/block/" + fs.Device() + "/queue/write_cache"
	if err := os.WriteFile(setting, []byte("write through"), 0); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := os.WriteFile(setting, []byte("write back"), 0); err != nil {
			t.Error(err)
		}
	}()
	d, err := blockdev.LookupPath("/dev/" + fs.Device())
	if err != nil || d.VolatileCache {
		t.Fatalf("%+v %v", d, err)
	}
	before := fs.Flushes()
	f, err := os.Create(filepath.Join(fs.Dir(), "f"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteString("x"); err != nil {
		t.Fatal(err)
	}
	if err := f.Sync(); err != nil {
		t.Fatal(err)
	}
	if n := fs.Flushes(); n != before {
		t.Errorf("%d flushes", n-before)
	}
}

func TestList(t *testing.T) {
	fs := testfs.New(t, "ext4", 32<<20)
	all, err := blockdev.List()
	if err != nil {
		t.Fatal(err)
	}
	found := false
	for i, d := range all {
		if i > 0 && all[i-1].Name > d.Name {
			t.Errorf("%s after %s", d.Name, all[i-1].Name)
		}
		if d.Kind == blockdev.Loop && d.Backing == "" {
			t.Errorf("%s has no file", d.Name)
		}
		found = found || d.Name == fs.Device()
	}
	if !found {
		t.Errorf("%s is not in the list", fs.Device())
	}
}

func do(t *testing.T, program string, args ...string) string {
	t.Helper()
	out, err := exec.Command(program, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", program, strings.Join(args, " "), err, out)
	}
	return strings.TrimSpace(string(out))
}
