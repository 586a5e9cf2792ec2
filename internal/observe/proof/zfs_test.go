package proof_test

import (
	"crypto/rand"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"pando/internal/observe/proof"
	"pando/internal/observe/stack"
	"pando/internal/testing/testfs"

	"golang.org/x/sys/unix"
)

// pool makes a zpool of disks, with arguments of `zpool create`, and a dataset in it,
// mounted.
func pool(t *testing.T, vdevs ...string) (name, dir string) {
	t.Helper()
	name = "pandotest-" + strings.ToLower(rand.Text()[:12])
	do(t, "zpool", append([]string{"create", "-f", "-o", "cachefile=none", "-o", "ashift=12", "-O", "mountpoint=none",
		"-O", "atime=off", name}, vdevs...)...)
	t.Cleanup(func() { do(t, "zpool", "destroy", "-f", name) })
	do(t, "zfs", "create", "-o", "mountpoint=legacy", "-o", "recordsize=8k", name+"/db")
	dir = t.TempDir()
	if err := unix.Mount(name+"/db", dir, "zfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unmount(t, dir) })
	return name, dir
}

// slowly are options for the guest, where all is emulated.
func slowly(o options) options {
	o.ms = 3000
	o.sample = time.Second
	return o
}

func TestZFS(t *testing.T) {
	disks := testfs.Disks(t, 1)
	needTracepoints(t)
	name, dir := pool(t, disks[0])
	for _, o := range []options{{}, {writers: 4}, {call: "fsync"}, {call: "dsync"}} {
		t.Run(fmt.Sprintf("%s %d", o.call, o.writers), func(t *testing.T) {
			p := watch(t, dir, slowly(o))
			wantOK(t, p)
			disk := layer(t, p, filepath.Base(disks[0]))
			if disk.Result != proof.OK || disk.Needed == 0 || !disk.VolatileCache {
				t.Errorf("%+v", disk)
			}
			if p.Sample == nil || p.Sample.Syncs < 2 {
				t.Errorf("%+v", p.Sample)
			}
		})
	}
	do(t, "zfs", "set", "sync=disabled", name+"/db")
	p := watch(t, dir, slowly(options{}))
	wantFail(t, p, "zfs "+name+"/db (sync=disabled)", "before it writes anything: `zfs set sync=standard "+name+"/db`")
	if p.Calls.Result != proof.OK {
		t.Errorf("%+v", p.Calls)
	}
	wantFail(t, watch(t, dir, slowly(options{counts: true})), "zfs on "+dir, "it does not pass syncs on")

	do(t, "zfs", "inherit", "sync", name+"/db")
	do(t, "zfs", "set", "sync=disabled", name)
	wantFail(t, watch(t, dir, slowly(options{})), "zfs "+name+"/db (sync=disabled)", "(inherited from "+name+")")
	do(t, "zfs", "inherit", "sync", name)
	wantOK(t, watch(t, dir, slowly(options{})))

	const tunable = "/sys/module/zfs/parameters/zfs_nocacheflush"
	if err := os.WriteFile(tunable, []byte("1"), 0); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := os.WriteFile(tunable, []byte("0"), 0); err != nil {
			t.Error(err)
		}
	}()
	wantFail(t, watch(t, dir, slowly(options{})), "zpool "+name+" (zfs_nocacheflush=1)", "does not flush its disks")
	wantFail(t, watch(t, dir, slowly(options{counts: true})), "zfs on "+dir, "it does not pass syncs on")
}

// TestZFSLog: with a log device the syncs go there.
func TestZFSLog(t *testing.T) {
	disks := testfs.Disks(t, 3)
	needTracepoints(t)
	name, dir := pool(t, "mirror", disks[0], disks[1], "log", disks[2])
	p := watch(t, dir, slowly(options{}))
	wantOK(t, p)
	log := layer(t, p, filepath.Base(disks[2]))
	zpool := layer(t, p, "zpool "+name)
	if layer(t, p, log.Name+"1").Role != "log" || log.Flushes+log.FUA < zpool.Needed || zpool.Result != proof.OK ||
		zpool.Needed < 5 {
		t.Errorf("the log %+v of %+v", log, zpool)
	}
	if data := layer(t, p, filepath.Base(disks[0])); data.Flushes+data.FUA >= zpool.Needed {
		t.Errorf("the data disk got as much: %+v", data)
	}
	do(t, "zfs", "set", "sync=disabled", name+"/db")
	wantFail(t, watch(t, dir, slowly(options{})), "zfs "+name+"/db (sync=disabled)", "sync=disabled")
	wantFail(t, watch(t, dir, slowly(options{counts: true})), "zfs on "+dir, "it does not pass syncs on")
	do(t, "zfs", "set", "sync=standard", name+"/db")

	do(t, "zpool", "remove", name, disks[2])
	p = watch(t, dir, slowly(options{writers: 2}))
	wantOK(t, p)
	// Both disks of a mirror are flushed.
	for _, d := range disks[:2] {
		if l := layer(t, p, filepath.Base(d)); l.Flushes+l.FUA < layer(t, p, "zpool "+name).Needed {
			t.Errorf("%+v", l)
		}
	}
}

// TestZFSStripe: of two vdevs each gets a part.
func TestZFSStripe(t *testing.T) {
	disks := testfs.Disks(t, 2)
	needTracepoints(t)
	_, dir := pool(t, disks[0], disks[1])
	wantOK(t, watch(t, dir, slowly(options{writers: 2})))
}

// TestZFSVolume: a filesystem in a zvol.
func TestZFSVolume(t *testing.T) {
	disks := testfs.Disks(t, 1)
	needTracepoints(t)
	name, _ := pool(t, disks[0])
	do(t, "zfs", "create", "-V", "128M", "-o", "volblocksize=8k", name+"/vol")
	node := "/dev/zvol/" + name + "/vol"
	do(t, "udevadm", "settle")
	do(t, "mkfs.ext4", "-q", "-E", "lazy_itable_init=1,lazy_journal_init=1,nodiscard", node)
	dir := t.TempDir()
	if err := unix.Mount(node, dir, "ext4", 0, ""); err != nil {
		t.Fatal(err)
	}
	mounted := true
	defer func() {
		if mounted {
			unmount(t, dir)
		}
	}()
	s, err := stack.Of(t.Context(), dir)
	if err != nil {
		t.Fatal(err)
	}
	if len(s.Layers) < 4 || s.Layers[1].Dataset != name+"/vol" {
		t.Fatalf("%+v", s.Layers)
	}
	p := watch(t, dir, slowly(options{}))
	wantOK(t, p)
	for _, l := range p.Layers {
		if l.Device && l.Kind != "partition" && (l.Needed < 5 || l.Flushes+l.FUA < l.Needed) {
			t.Errorf("%+v", l)
		}
	}
	do(t, "zfs", "set", "sync=disabled", name+"/vol")
	wantFail(t, watch(t, dir, slowly(options{})), "zvol "+name+"/vol (sync=disabled)", "sync=disabled")
	p = watch(t, dir, slowly(options{counts: true}))
	if p.Result != proof.Fail || layer(t, p, s.Layers[1].Name).Result != proof.OK {
		t.Errorf("the zvol gets its flushes, and what is below does not: %s at %q", p.Result, p.Layer)
	}
	unmount(t, dir)
	mounted = false
}

// TestDisk: a filesystem on a disk itself, under another kernel than this host's; and the
// disk's cache declared away, which the disk contradicts.
func TestDisk(t *testing.T) {
	disks := testfs.Disks(t, 1)
	needTracepoints(t)
	name := filepath.Base(disks[0])
	do(t, "wipefs", "-aq", disks[0])
	for _, kind := range []string{"ext4", "xfs", "btrfs"} {
		t.Run(kind, func(t *testing.T) {
			force := "-f"
			if kind == "ext4" {
				force = "-F"
			}
			do(t, "mkfs."+kind, "-q", force, disks[0])
			dir := t.TempDir()
			if err := unix.Mount(disks[0], dir, kind, 0, ""); err != nil {
				t.Fatal(err)
			}
			defer unmount(t, dir)
			wantOK(t, watch(t, dir, slowly(options{})))
			wantOK(t, watch(t, dir, slowly(options{call: "grow", writers: 2}))) // commits of the journal
			if kind != "ext4" {
				return
			}
			setting := "/sys/block/" + name + "/queue/write_cache"
			if err := os.WriteFile(setting, []byte("write through"), 0); err != nil {
				t.Fatal(err)
			}
			defer func() {
				if err := os.WriteFile(setting, []byte("write back"), 0); err != nil {
					t.Error(err)
				}
			}()
			wantFail(t, watch(t, dir, slowly(options{})), name+" (write through)",
				"the device reports a volatile cache")
			// By the counts it is a disk without a cache: there is nothing to flush, and
			// writes arrive.
			p := watch(t, dir, slowly(options{counts: true}))
			wantOK(t, p)
			if l := layer(t, p, name); l.Result != proof.NotNeeded || l.Writes < 20 || l.VolatileCache {
				t.Errorf("%+v", l)
			}
			p = watch(t, dir, slowly(options{call: "none", syncs: 100000, claims: "fsync", counts: true}))
			if l := layer(t, p, name); l.Result != proof.Fail {
				t.Errorf("nothing arrives, and that is %+v", l)
			}
		})
	}
	do(t, "wipefs", "-aq", disks[0])
}
