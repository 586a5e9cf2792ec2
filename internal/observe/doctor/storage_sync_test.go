package doctor

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"pando/internal/linux/loopdev"
	"pando/internal/linux/run"
	"pando/internal/observe/blockdev"
	"pando/internal/testing/testfs"

	"golang.org/x/sys/unix"
)

// A filesystem that does not flush, and what the finding says to do about it.
func TestNoBarrier(t *testing.T) {
	noGuest(t)
	for kind, option := range map[string]string{"ext4": "barrier=0", "btrfs": "nobarrier"} {
		t.Run(kind, func(t *testing.T) {
			dir := testfs.New(t, kind, 64<<20).Dir()
			nothing(t, examine(t, "sync-honoured", nil), dir)
			tool(t, "mount", "-o", "remount,"+option, dir)
			f := only(t, examine(t, "sync-honoured", nil), dir, "sync-nobarrier", Critical)
			sh(t, f.Do[0].Commands[0])
			nothing(t, examine(t, "sync-honoured", nil), dir)
		})
	}
}

// An ephemeral volume of the pool is meant to drop syncs.
func TestNoBarrierOfEphemeral(t *testing.T) {
	noGuest(t)
	dir, other := testfs.New(t, "ext4", 64<<20).Dir(), testfs.New(t, "ext4", 64<<20).Dir()
	for _, d := range []string{dir, other} {
		tool(t, "mount", "-o", "remount,nobarrier", d)
	}
	c := examine(t, "sync-honoured", &PoolFacts{Dir: "POOL", Ephemeral: map[string]string{"id": dir, "idle": ""}})
	nothing(t, c, dir)
	only(t, c, other, "sync-nobarrier", Critical)
	if !strings.Contains(c.Summary, "2 ephemeral volumes") {
		t.Errorf("summary %q", c.Summary)
	}

	// So is the dataset of one.
	p := &PoolFacts{Ephemeral: map[string]string{"id": ""}}
	if !p.isEphemeral("tank/pando/id") || p.isEphemeral("tank/pando") || (*PoolFacts)(nil).isEphemeral("tank/pando/id") {
		t.Error("the wrong datasets are ephemeral")
	}
}

// On a disk that keeps what it has been given, it loses nothing.
func TestNoBarrierWithoutCache(t *testing.T) {
	noGuest(t)
	d := memoryDisk(t)
	dir := mkfs(t, "ext4", d.Path(), "-q")
	tool(t, "mount", "-o", "remount,nobarrier", dir)
	if d.VolatileCache {
		t.Skipf("does not apply: %s has a volatile cache", d.Path())
	}
	only(t, examine(t, "sync-honoured", nil), dir, "sync-nobarrier", Warning)
}

// What only processes in another mount namespace see.
func TestNoBarrierElsewhere(t *testing.T) {
	noGuest(t)
	dir := t.TempDir()
	testfs.LeakCheck(t, dir)
	image, point := filepath.Join(dir, "image"), filepath.Join(dir, "mnt")
	if err := os.Mkdir(point, 0o700); err != nil {
		t.Fatal(err)
	}
	d := attach(t, image, 16<<20, loopdev.Options{})
	tool(t, "mkfs.ext4", "-q", d.Path())
	pid := child(t, exec.Command("unshare", "-m", "sh", "-c",
		"mount -o barrier=0 "+d.Path()+" "+point+" && echo ready && read end"), true)
	f := only(t, examine(t, "sync-honoured", nil), point, "sync-nobarrier", Critical)
	if want := fmt.Sprintf("as process %d sees it", pid); !strings.Contains(f.Title, want) &&
		!strings.Contains(f.Title, "as process") {
		t.Errorf("%q does not say %q", f.Title, want)
	}
	sh(t, f.Do[0].Commands[0])
	nothing(t, examine(t, "sync-honoured", nil), point)
}

func TestVolatileOverlay(t *testing.T) {
	noGuest(t)
	top := testfs.Ext4(t, 16<<20)
	for name, options := range map[string]string{"volatile": "volatile,", "plain": ""} {
		dir := filepath.Join(top, name)
		for _, d := range []string{"lower", "upper", "work", "merged"} {
			if err := os.MkdirAll(filepath.Join(dir, d), 0o700); err != nil {
				t.Fatal(err)
			}
		}
		merged := filepath.Join(dir, "merged")
		tool(t, "mount", "-t", "overlay", "-o", fmt.Sprintf("%slowerdir=%s/lower,upperdir=%s/upper,workdir=%s/work", options,
			dir, dir, dir), "overlay", merged)
		t.Cleanup(func() { sh(t, "umount "+merged) })
		if c := examine(t, "sync-honoured", nil); options == "" {
			nothing(t, c, merged)
		} else {
			only(t, c, merged, "sync-overlay-volatile", Warning)
		}
	}
}

// In a mount namespace of its own, where /etc has such a file.
func TestPreload(t *testing.T) {
	if os.Getenv("PANDO_TEST_PRELOAD") != "" { // the child
		fmt.Println("FOUND " + strings.ReplaceAll(asJSON(examine(t, "sync-honoured", nil).Findings), "\n", ""))
		return
	}
	needRoot(t)
	const lib = "/usr/lib/libeatmydata.so.1"
	for content, want := range map[string]string{"# a comment\n/usr/lib/libother.so " + lib + "\n": lib,
		"/usr/lib/libother.so # " + lib + "\n": ""} {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, "ld.so.preload"), []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
		self, err := os.Executable()
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command("unshare", "-m", "sh", "-c",
			`mount -t overlay -o lowerdir="$1":/etc overlay /etc && exec "$2" -test.run='^TestPreload$'`, "sh", dir, self)
		cmd.Env = append(os.Environ(), "PANDO_TEST_PRELOAD=1")
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("the child: %v: %s", err, out)
		}
		_, after, ok := strings.Cut(string(out), "FOUND ")
		if !ok {
			t.Fatalf("the child found nothing: %s", out)
		}
		line, _, _ := strings.Cut(after, "\n")
		var found []struct {
			Code, Subject string
			Severity      Severity
		}
		if err := json.Unmarshal([]byte(line), &found); err != nil {
			t.Fatal(err)
		}
		i := slices.IndexFunc(found, func(f struct {
			Code, Subject string
			Severity      Severity
		}) bool {
			return f.Code == "sync-preload"
		})
		switch {
		case want == "" && i >= 0:
			t.Errorf("%q: found %+v", content, found[i])
		case want != "" && (i < 0 || found[i].Subject != want || found[i].Severity != Critical):
			t.Errorf("%q: found %+v", content, found)
		}
	}
}

// A process that has such a library in its memory: this one, for a moment.
func TestPreloaded(t *testing.T) {
	me := fmt.Sprint(os.Getpid())
	nothing(t, examine(t, "sync-honoured", nil), me)
	lib := filepath.Join(t.TempDir(), "libeatmydata.so.1.3.0")
	f, err := os.Create(lib)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(4096); err != nil {
		t.Fatal(err)
	}
	m, err := unix.Mmap(int(f.Fd()), 0, 4096, unix.PROT_READ, unix.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	x := only(t, examine(t, "sync-honoured", nil), me, "sync-preloaded", Critical)
	if err := unix.Munmap(m); err != nil {
		t.Fatal(err)
	}
	if l := measured(t, x, "library"); l.Text != lib {
		t.Errorf("the library is %s", l.Text)
	}
}

func TestUnsafeVirtualMachine(t *testing.T) {
	vm := func(disk string) string {
		return fmt.Sprint(child(t, &exec.Cmd{Path: "/bin/sh",
			Args: []string{"qemu-system-x86_64", "-c", "echo ready; read end", "-drive", disk}}, true))
	}
	old, safe := vm("file=disk.img,cache=unsafe"), vm("file=disk.img,cache=none")
	json := vm(`{"driver": "qcow2", "cache": {"direct": false, "no-flush": true}}`)
	c := examine(t, "sync-honoured", nil)
	only(t, c, old, "sync-vm-unsafe", Warning)
	only(t, c, json, "sync-vm-unsafe", Warning)
	nothing(t, c, safe)
}

// What `zfs get -Hp -o name,value,source sync` prints.
func TestDisabledSyncs(t *testing.T) {
	got := disabledSyncs([][]string{
		{"tank", "standard", "default"}, {"tank/a", "disabled", "local"}, {"tank/a/b", "disabled", "inherited from tank/a"},
		{"tank/a/c", "always", "local"}, {"tank/d", "disabled", "received"}, {"tank/e", "standard", "default"},
	})
	want := []disabledSync{{"tank/a", "local", 2}, {"tank/d", "received", 1}}
	if !slices.Equal(got, want) {
		t.Errorf("%+v, not %+v", got, want)
	}
}

// A loop device that was told not to pass flushes on.
func TestLoopWithoutFlushes(t *testing.T) {
	noGuest(t)
	d := deviceOf(t, testfs.Ext4(t, 16<<20))
	nothing(t, examine(t, "write-cache", nil), d.Path())
	setting := "/sys/block/" + d.Name + "/queue/write_cache"
	if err := os.WriteFile(setting, []byte("write through"), 0); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { // it would stay for the next file
		if err := os.WriteFile(setting, []byte("write back"), 0); err != nil {
			t.Error(err)
		}
	})
	f := only(t, examine(t, "write-cache", nil), d.Path(), "write-cache-loop", Critical)
	sh(t, f.Do[0].Commands[0])
	nothing(t, examine(t, "write-cache", nil), d.Path())
}

// memoryDisk is a zram device of this test's own, until it ends.
func memoryDisk(t *testing.T) blockdev.Device {
	t.Helper()
	needRoot(t)
	id := readText("/sys/class/zram-control/hot_add") // reading makes one
	if id == "" {
		t.Skip("SKIPPED: this kernel has no zram")
	}
	dir := "/sys/block/zram" + id
	t.Cleanup(func() {
		for _, w := range [][2]string{{dir + "/reset", "1"}, {"/sys/class/zram-control/hot_remove", id}} {
			if err := os.WriteFile(w[0], []byte(w[1]), 0); err != nil {
				t.Error(err)
			}
		}
	})
	if err := os.WriteFile(dir+"/disksize", []byte("64M"), 0); err != nil {
		t.Fatal(err)
	}
	d, err := blockdev.LookupPath("/dev/zram" + id)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func TestDiskInMemory(t *testing.T) {
	noGuest(t)
	d := memoryDisk(t)
	dir := mkfs(t, "ext4", d.Path(), "-q")
	only(t, examine(t, "write-cache", nil), dir, "write-cache-memory", Note)
	below := filepath.Join(dir, "image") // a pool in a file in it
	pool := mkfs(t, "ext4", attach(t, below, 16<<20, loopdev.Options{}).Path(), "-q")
	only(t, examine(t, "write-cache", &PoolFacts{Dir: "POOL", Data: pool}), "POOL", "write-cache-pool-memory", Warning)

	disk := testfs.Ext4(t, 16<<20)
	c := examine(t, "write-cache", &PoolFacts{Dir: "POOL", Data: disk})
	nothing(t, c, disk)
	nothing(t, c, "POOL")
}

// What this kernel shows of a disk whose cache is not flushed is a few words in
// sysfs; the disk of the machine that tests run on is not to be changed.
func TestOverridden(t *testing.T) {
	for what, c := range map[string]struct {
		d  blockdev.Device
		is bool
	}{
		"nvme, overridden": {blockdev.Device{Name: "nvme9n1", Kind: blockdev.Disk, Transport: "nvme", FUA: true}, true},
		"nvme, flushed": {blockdev.Device{Name: "nvme9n1", Kind: blockdev.Disk, Transport: "nvme", FUA: true,
			VolatileCache: true}, false},
		"nvme, no cache": {blockdev.Device{Name: "nvme9n1", Kind: blockdev.Disk, Transport: "nvme"}, false},
		"read-only loop": {blockdev.Device{Name: "loop999", Kind: blockdev.Loop, Backing: "/x", ReadOnly: true}, false},
		"loop that flushes": {blockdev.Device{Name: "loop999", Kind: blockdev.Loop, Backing: "/x", VolatileCache: true},
			false},
		"loop that does not": {blockdev.Device{Name: "loop999", Kind: blockdev.Loop, Backing: "/x"}, true},
	} {
		var r Report
		r.findOverriddenCache(c.d)
		if len(r.Findings) > 0 != c.is {
			t.Errorf("%s: %s", what, asJSON(r.Findings))
		}
	}
	if got := cacheCommands(blockdev.Device{Name: "nvme10n1",
		Transport: "nvme"})[0]; got != "nvme id-ctrl /dev/nvme10 | grep -w vwc" {
		t.Error(got)
	}
}

func TestAlignmentOfPartitions(t *testing.T) {
	noGuest(t)
	needRoot(t)
	for _, program := range []string{"sfdisk", "partx", "losetup"} {
		if _, err := run.Look(program); err != nil {
			t.Skipf("SKIPPED: %v: install fdisk and util-linux", err)
		}
	}
	dir := testfs.Tmpfs(t, 64<<20) // only its pages are blocks
	image := filepath.Join(dir, "image")
	if err := os.WriteFile(image, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(image, 32<<20); err != nil {
		t.Fatal(err)
	}
	sh(t, `printf 'start=63,size=20000\nstart=24576,size=20000\n' | sfdisk -q `+image)
	loop := tool(t, "losetup", "-P", "--show", "-f", image)
	t.Cleanup(func() { sh(t, "losetup -d "+loop) })
	// This kernel may not read tables by itself.
	if _, err := os.Stat(loop + "p1"); err != nil {
		tool(t, "partx", "-a", loop)
	}
	t.Cleanup(func() { sh(t, "partx -d "+loop) })
	c := examine(t, "alignment", nil)
	f := only(t, c, loop+"p1", "alignment-partition", Warning)
	if m := measured(t, f, "off"); m.Low != 63*512%4096 {
		t.Errorf("it is off by %v", m.Low)
	}
	nothing(t, c, loop+"p2")
}

// Filesystems with blocks smaller than those of the disk, which a loop device with
// direct I/O does not hide.
func TestAlignmentOfFilesystems(t *testing.T) {
	noGuest(t)
	needRoot(t)
	dir := t.TempDir()
	testfs.LeakCheck(t, dir)
	mk := func(fstype string, direct bool, args ...string) string {
		image := filepath.Join(dir, fmt.Sprint(fstype, direct, len(args), args))
		d := attach(t, image, 320<<20, loopdev.Options{DirectIO: direct})
		var st unix.Stat_t
		if err := unix.Stat(image, &st); err != nil {
			t.Fatal(err)
		}
		below, err := blockdev.Lookup(st.Dev)
		if err != nil || below.PhysicalBytes != 4096 || below.LogicalBytes != 512 || direct && !d.DirectIO {
			t.Skipf("does not apply: %s is not on a disk with blocks of 4096 bytes that takes 512, or that without direct I/O",
				dir)
		}
		return mkfs(t, fstype, d.Path(), append(args, "-q")...)
	}
	sector := mk("xfs", true, "-s", "size=512")
	small := mk("ext4", true, "-b", "1024")
	good := []string{mk("xfs", true, "-s", "size=4096"), mk("ext4", true, "-b", "4096"),
		mk("xfs", false, "-s", "size=512"), mk("ext4", false, "-b", "1024")}
	c := examine(t, "alignment", nil)
	only(t, c, sector, "alignment-xfs-sector", Note)
	only(t, c, small, "alignment-filesystem", Warning)
	for _, g := range good {
		nothing(t, c, g)
	}
}
