package zfs

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// thing is what JSON says of a volume.
type thing struct {
	Name, FS, State, Mountpoint string
	ExclusiveBytes              int64 `json:"exclusive_bytes"`
	SharedBytes                 int64 `json:"shared_bytes"`
	TiedBytes                   int64 `json:"tied_bytes"`
}

// noise is content that does not compress.
func noise(t *testing.T, n int) string {
	t.Helper()
	f, err := os.Open("/dev/urandom")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	b := make([]byte, n)
	if _, err := f.Read(b); err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// TestLife takes each kind of volume through everything that is done with volumes.
func TestLife(t *testing.T) {
	h := newHost(t, 3<<30)
	src := filepath.Join(h.tmp, "src")
	big := noise(t, 2<<20)
	h.write(filepath.Join(src, "big"), big)
	h.write(filepath.Join(src, "sub/small"), "small")
	for _, fs := range []string{"native", "ext4", "xfs"} {
		t.Run(fs, func(t *testing.T) {
			h := &host{t, h.dir, h.zpool, h.disks, h.dataset, h.tmp}
			size := []string{"--size", "400M"}
			if fs == "native" {
				size = nil
			}
			h.pando(append([]string{"golden", "import", "g", src, "--fs", fs, "--no-progress"}, size...)...)
			h.pando("clone", "g", "v", "--mount")
			at := filepath.Join(h.dir, "mnt", "v")
			h.wantFile(filepath.Join(at, "big"), big)

			// Running volumes are snapshotted and forked.
			h.write(filepath.Join(at, "sub/small"), "changed")
			h.pando("snapshot", "v", "s1")
			h.write(filepath.Join(at, "sub/small"), "again")
			h.pando("fork", "v", "w", "--mount")
			h.wantFile(filepath.Join(h.dir, "mnt/w/sub/small"), "again")
			h.write(filepath.Join(h.dir, "mnt/w/sub/small"), "of w")
			h.wantFile(filepath.Join(at, "sub/small"), "again")
			h.fails(exitInUse, "mounted", "rewind", "v", "s1")
			h.pando("rewind", "v", "s1", "--detach")
			h.wantFile(filepath.Join(at, "sub/small"), "changed")
			if out := h.pando("diff", "g", "v"); !strings.Contains(out, "sub/small") || strings.Contains(out, "big") {
				t.Errorf("diff says:\n%s", out)
			}
			h.pando("golden", "publish", "g", "v", "--no-progress")
			h.pando("clone", "g", "x", "--mount")
			h.wantFile(filepath.Join(h.dir, "mnt/x/sub/small"), "changed")

			h.pando("fsck", "--no-progress")

			// What they take.
			h.write(filepath.Join(h.dir, "mnt/x/own"), noise(t, 1<<20))
			var x thing
			h.json(&x, "show", "x")
			if x.ExclusiveBytes < 1<<20 || x.ExclusiveBytes > 2<<20 || x.SharedBytes < 2<<20 {
				t.Errorf("x has written 1 MiB and shares 2 MiB, but: %+v", x)
			}

			// Everything goes, in an order that ZFS does not like.
			h.pando("golden", "rm", "g")
			h.wantFile(filepath.Join(at, "big"), big)
			h.pando("destroy", "v")
			h.wantFile(filepath.Join(h.dir, "mnt/w/big"), big)
			h.wantFile(filepath.Join(h.dir, "mnt/x/big"), big)
			h.pando("destroy", "x")
			h.wantFile(filepath.Join(h.dir, "mnt/w/sub/small"), "of w")
			h.pando("destroy", "w")
			h.pando("gc")
			if n := h.objects(); n != 0 {
				t.Errorf("LEAK: %d objects are left:\n%s", n, h.zfs("list", "-r", "-t", "all", h.dataset))
			}
			h.noDevices()
		})
	}
}

// TestRaw attaches a raw volume as a block device, and writes to it.
func TestRaw(t *testing.T) {
	h := newHost(t, 1<<30)
	image := filepath.Join(h.tmp, "image")
	h.write(image, "raw "+strings.Repeat("\x00", 1<<20-4))
	h.pando("golden", "import", "r", image, "--fs", "none", "--no-progress")
	h.pando("clone", "r", "v", "--mount")
	link := filepath.Join(h.dir, "mnt", "v")
	to, err := os.Readlink(link)
	if err != nil || !strings.HasPrefix(to, "/dev/zd") {
		t.Fatalf("a raw volume is at %q, %v; wanted a block device", to, err)
	}
	f, err := os.OpenFile(link, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 4)
	if _, err := f.ReadAt(b, 0); err != nil || string(b) != "raw " {
		t.Errorf("it holds %q, %v", b, err)
	}
	if _, err := f.WriteAt([]byte("mine"), 0); err != nil {
		t.Error(err)
	}
	h.pando("snapshot", "v", "s")
	h.fails(exitInUse, "in use", "umount", "v")
	if err := f.Close(); err != nil {
		t.Error(err)
	}
	h.pando("umount", "v")
	h.noDevices()
	var d struct {
		Ranges []struct {
			Offset int64 `json:"offset_bytes"`
			Length int64 `json:"length_bytes"`
		}
	}
	h.json(&d, "diff", "r", "v")
	if len(d.Ranges) == 0 || d.Ranges[0].Offset != 0 || d.Ranges[0].Length == 0 {
		t.Errorf("diff says %+v", d)
	}
	h.pando("clone", "v@s", "w", "--mount")
	got, err := os.ReadFile(filepath.Join(h.dir, "mnt", "w"))
	if err != nil || string(got[:4]) != "mine" || len(got) != 1<<20 {
		t.Errorf("the snapshot holds %d bytes, beginning with %q, %v", len(got), got[:min(4, len(got))], err)
	}
	h.pando("destroy", "v", "w")
}

// TestForeign makes snapshots and datasets that are not Pando's in its dataset, and
// holds of what is: they survive everything, and gc says what they cost.
func TestForeign(t *testing.T) {
	h := newHost(t, 1<<30)
	src := filepath.Join(h.tmp, "src")
	h.write(filepath.Join(src, "big"), noise(t, 4<<20))
	h.pando("golden", "import", "g", src, "--no-progress")
	h.pando("clone", "g", "v", "--mount")
	h.write(filepath.Join(h.dir, "mnt/v/own"), noise(t, 3<<20))
	v := strings.TrimSpace(h.run("findmnt", "-n", "-o", "SOURCE", filepath.Join(h.dir, "mnt/v")))
	h.zfs("snapshot", v+"@autosnap_2026")
	h.zfs("create", "-o", "mountpoint=none", h.dataset+"/backup")
	h.zfs("snapshot", "-r", h.dataset+"@nightly")
	h.pando("destroy", "v")
	h.pando("golden", "rm", "g")
	h.pando("gc")
	left := h.zfs("list", "-H", "-r", "-t", "snapshot", "-o", "name", h.dataset)
	for _, want := range []string{"@autosnap_2026", "/backup@nightly", h.dataset + "@nightly"} {
		if !strings.Contains(left, want) {
			t.Errorf("the snapshot %s is gone; there are:\n%s", want, left)
		}
	}
	var gc struct {
		Kept []struct {
			Kind, Ref string
			Why       []string
			TiedBytes int64 `json:"tied_bytes"`
		} `json:"kept_things"`
	}
	h.json(&gc, "gc", "--explain")
	var tied int64
	var why string
	for _, k := range gc.Kept {
		if k.Kind == "tie" {
			tied += k.TiedBytes
			why += strings.Join(k.Why, "; ") + "\n"
		}
	}
	if tied < 3<<20 || !strings.Contains(why, "@autosnap_2026") {
		t.Errorf("gc --explain says that %d bytes are tied, because:\n%s", tied, why)
	}
	if ls := h.pando("ls", "-q"); ls != "" {
		t.Errorf("volumes: %s", ls)
	}
	// They stop the removal of the pool, which stays one.
	h.fails(exitInUse, "backup", "deinit", "--force")
	// When they go, so does what they kept.
	for _, s := range strings.Fields(left) {
		if strings.HasSuffix(s, "@nightly") || strings.HasSuffix(s, "@autosnap_2026") {
			h.zfs("destroy", s)
		}
	}
	h.zfs("destroy", h.dataset+"/backup")
	h.pando("gc")
	if n := h.objects(); n != 0 {
		t.Errorf("LEAK: %d objects are left:\n%s", n, h.zfs("list", "-r", "-t", "all", h.dataset))
	}
}

// TestFlatten makes a volume independent, which returns what it tied.
func TestFlatten(t *testing.T) {
	h := newHost(t, 1<<30)
	src := filepath.Join(h.tmp, "src")
	h.write(filepath.Join(src, "a"), noise(t, 6<<20))
	for _, fs := range []string{"native", "ext4"} {
		t.Run(fs, func(t *testing.T) {
			h := &host{t, h.dir, h.zpool, h.disks, h.dataset, h.tmp}
			args := []string{"golden", "import", "g", src, "--fs", fs, "--no-progress"}
			if fs == "ext4" {
				args = append(args, "--size", "64M")
			}
			h.pando(args...)
			h.pando("clone", "g", "v", "--mount")
			h.pando("clone", "g", "other")
			h.write(filepath.Join(h.dir, "mnt/v/own"), "own")
			var plan struct {
				CostBytes int64 `json:"cost_bytes"`
				Done      bool
			}
			h.json(&plan, "flatten", "v", "--dry-run")
			if plan.CostBytes < 6<<20 || plan.CostBytes > 16<<20 || plan.Done {
				t.Errorf("flatten --dry-run says %+v", plan)
			}
			h.fails(exitInUse, "mounted", "flatten", "v")
			h.pando("umount", "v")
			cmd := h.command("flatten", "v", "--no-progress")
			out, err := cmd.CombinedOutput()
			if err != nil || !strings.Contains(string(out), "reads and writes up to") {
				t.Fatalf("flatten: %v: %s", err, out)
			}
			var v thing
			h.json(&v, "show", "v")
			if v.SharedBytes > 1<<20 || v.ExclusiveBytes < 6<<20 {
				t.Errorf("after flattening: %+v", v)
			}
			h.pando("golden", "rm", "g")
			h.pando("destroy", "other")
			h.pando("mount", "v")
			h.wantFile(filepath.Join(h.dir, "mnt/v/own"), "own")
			if b, err := os.ReadFile(filepath.Join(h.dir, "mnt/v/a")); err != nil || len(b) != 6<<20 {
				t.Errorf("a: %d bytes, %v", len(b), err)
			}
			if n := h.objects(); n != 1 {
				t.Errorf("%d objects are there, wanted the volume only:\n%s", n, h.zfs("list", "-r", "-t", "all", h.dataset))
			}
			h.pando("destroy", "v")
		})
	}
}

// TestNotImported takes the zpool away: nothing may be taken for destroyed.
func TestNotImported(t *testing.T) {
	h := newHost(t, 1<<30)
	src := filepath.Join(h.tmp, "src")
	h.write(filepath.Join(src, "a"), "a")
	h.pando("golden", "import", "g", src, "--no-progress")
	h.pando("clone", "g", "v")
	h.disks.Export()
	for _, args := range [][]string{{"ls"}, {"destroy", "v"}, {"gc"}, {"clone", "g", "w"}, {"deinit", "--force"}} {
		out, err := h.try(args...)
		if err == nil || !strings.Contains(err.Error(), "zpool import "+h.zpool) {
			t.Errorf("pando %s without the zpool: %q, %v", strings.Join(args, " "), out, err)
		}
	}
	h.disks.Import()
	h.pando("mount", "v")
	h.wantFile(filepath.Join(h.dir, "mnt/v/a"), "a")
	h.pando("destroy", "v")
}

// TestBusyElsewhere: a volume that another mount namespace still has is not destroyed, and stays
// mounted, until that lets go.
func TestBusyElsewhere(t *testing.T) {
	h := newHost(t, 1<<30)
	src := filepath.Join(h.tmp, "src")
	h.write(filepath.Join(src, "a"), "a")
	h.pando("golden", "import", "g", src, "--no-progress")
	h.pando("clone", "g", "v", "--mount")
	holder := exec.Command("unshare", "-m", "--propagation", "private", "sh", "-c",
		"cd "+filepath.Join(h.dir, "mnt/v")+" && exec sleep 600")
	if err := holder.Start(); err != nil {
		t.Fatal(err)
	}
	stopped := false
	stop := func() {
		if !stopped {
			stopped = true
			_ = holder.Process.Kill()
			_ = holder.Wait() // it was killed
		}
	}
	defer stop()
	h.eventually("another namespace has the mount", func() bool {
		b, err := os.ReadFile("/proc/" + strconv.Itoa(holder.Process.Pid) + "/mountinfo")
		self, _ := os.Readlink("/proc/self/ns/mnt")
		other, _ := os.Readlink("/proc/" + strconv.Itoa(holder.Process.Pid) + "/ns/mnt")
		cwd, _ := os.Readlink("/proc/" + strconv.Itoa(holder.Process.Pid) + "/cwd")
		return err == nil && self != other && strings.Contains(string(b), "/mnt/v ") && strings.HasSuffix(cwd, "/mnt/v")
	})
	out, err := h.command("destroy", "v").CombinedOutput()
	if err == nil || !strings.Contains(string(out), strconv.Itoa(holder.Process.Pid)) {
		t.Errorf("destroy: %v, and it does not name pid %d, which holds the volume:\n%s", err, holder.Process.Pid, out)
	}
	h.wantFile(filepath.Join(h.dir, "mnt/v/a"), "a")
	if gc, _ := h.try("gc", "--explain"); !strings.Contains(gc, "mounted at") {
		t.Errorf("gc --explain does not say why it stays:\n%s", gc)
	}
	stop()
	h.pando("destroy", "v")
	h.pando("golden", "rm", "g")
	if n := h.objects(); n != 0 {
		t.Errorf("LEAK: %d objects are left:\n%s", n, h.zfs("list", "-r", "-t", "all", h.dataset))
	}
}
