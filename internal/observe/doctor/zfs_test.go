package doctor

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/linux/run"
	"pando/internal/linux/zfs"
	"pando/internal/testing/testfs"

	"golang.org/x/sys/unix"
)

func tool(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := run.Program(t.Context(), name, args...)
	if err != nil {
		t.Fatalf("%s %s: %v", name, strings.Join(args, " "), err)
	}
	return strings.TrimSpace(string(out))
}

// filesystem makes a filesystem and mounts it in dir until the test ends.
func filesystem(t *testing.T, dir, name string, options ...string) string {
	t.Helper()
	point := filepath.Join(dir, filepath.Base(name))
	args := []string{"create", "-o", "recordsize=16k", "-o", "compression=off", "-o", "atime=on", "-o", "relatime=off",
		"-o", "mountpoint=" + point}
	for _, o := range options {
		args = append(args, "-o", o)
	}
	tool(t, "zfs", append(args, name)...)
	t.Cleanup(func() {
		if out, err := exec.Command("zfs", "unmount", name).CombinedOutput(); err != nil {
			t.Errorf("unmount %s: %v: %s", name, err, out)
		}
	})
	return point
}

func volume(t *testing.T, name string, content []byte) {
	t.Helper()
	tool(t, "zfs", "create", "-s", "-V", strconv.Itoa(len(content)), "-b", "16k", "-o", "compression=off", "-o",
		"dedup=on", name)
	f, err := zfs.AwaitDevice(t.Context(), name, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	w, err := os.OpenFile(f.Name(), os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	if _, err := w.Write(content); err != nil {
		t.Fatal(err)
	}
	if err := w.Sync(); err != nil {
		t.Fatal(err)
	}
}

// fill makes files of 1 MiB with blocks that are nowhere else.
func fill(t *testing.T, dir string, files int) {
	t.Helper()
	for i := range files {
		write(t, filepath.Join(dir, "data", fmt.Sprintf("f%d", i)), noise(1<<20))
	}
}

func diagnose(t *testing.T, pool string) *Facts {
	t.Helper()
	tool(t, "zpool", "sync", pool)
	r, err := ZFS(t.Context(), ZFSRequest{Pool: pool, Limit: 20 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	if r.Check != "zfs" || r.Subject != pool || r.Summary == "" {
		t.Errorf("report: %+v", r)
	}
	return r.ZFS
}

// number is the value of a property of a pool.
func poolNumber(t *testing.T, pool, property string) int64 {
	t.Helper()
	n, err := strconv.ParseInt(tool(t, "zpool", "get", "-Hp", "-o", "value", property, pool), 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

var zdbEntries = regexp.MustCompile(`entries=([0-9]+)|: ([0-9]+) entries`)

// settled is what is known of the dedup table at a moment when other tools say the
// same: ZFS writes its log back in between, and then blocks count twice for a while.
func settled(t *testing.T, pool string) (d *DDT, table int64, text string) {
	t.Helper()
	for try := range 20 {
		tool(t, "zpool", "sync", pool)
		before := diagnoseTable(t, pool)
		entries := zdb(t, pool)
		text = tool(t, "zpool", "status", "-D", "-p", pool)
		if before.OnDisk.Exact() {
			table = poolNumber(t, pool, "dedup_table_size")
		}
		d = diagnoseTable(t, pool)
		if reflect.DeepEqual(before, d) && (d.Entries == entries || try > 10) {
			if d.Entries != entries {
				t.Errorf("%d entries, zdb: %d", d.Entries, entries)
			}
			return d, table, text
		}
	}
	t.Fatal("the dedup table changes all the time")
	return nil, 0, ""
}

func diagnoseTable(t *testing.T, pool string) *DDT {
	t.Helper()
	f := &Facts{Pool: pool, Features: map[string]string{}}
	if err := f.readPool(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := f.readDDT(t.Context()); err != nil {
		t.Fatal(err)
	}
	if f.DDT == nil {
		t.Fatal(f.DDTUnknown)
	}
	return f.DDT
}

// zdb is how many entries the dedup table has by another tool, which reads the
// disks itself.
func zdb(t *testing.T, pool string) (entries int64) {
	t.Helper()
	device := ""
	for l := range strings.Lines(tool(t, "zpool", "list", "-HvP", pool)) {
		if f := strings.Fields(l); strings.HasPrefix(f[0], "/") {
			device = f[0]
		}
	}
	out := tool(t, "zdb", "-e", "-p", device, "-D", pool)
	for _, m := range zdbEntries.FindAllStringSubmatch(out, -1) {
		n, _ := strconv.ParseInt(m[1]+m[2], 10, 64)
		entries += n
	}
	t.Logf("zdb: %s", out)
	return entries
}

func holds(r Range, want int64) bool { return r.Low <= want && want <= r.High }

// Four datasets, three of which are copies, and one without dedup.
func TestPoolWithDedup(t *testing.T) {
	pool := testfs.ZFS(t, 512<<20)
	dir := t.TempDir()
	golden := filesystem(t, dir, pool+"/golden", "dedup=on")
	fill(t, golden, 8)
	// Trees are found by the names in their roots, by chance: so that it is certain,
	// nearly all are the same.
	names := func(root string) {
		for i := range 20 {
			if err := os.Mkdir(fmt.Sprintf("%s/name%d", root, i), 0o755); err != nil {
				t.Fatal(err)
			}
		}
	}
	names(golden)
	for _, n := range []string{"one", "two", "three"} {
		job := filesystem(t, dir, pool+"/"+n, "dedup=sha256,verify")
		copyTree(t, golden+"/data", job+"/data")
		write(t, job+"/own", noise(1<<20))
		names(job)
	}
	fill(t, filesystem(t, dir, pool+"/apart", "dedup=off"), 1)
	// A clone shares with its origin already, and is not counted as a copy.
	tool(t, "zfs", "snapshot", pool+"/golden@s")
	tool(t, "zfs", "clone", "-o", "dedup=on", "-o", "mountpoint="+dir+"/clone", pool+"/golden@s", pool+"/clone")
	t.Cleanup(func() {
		if out, err := exec.Command("zfs", "unmount", pool+"/clone").CombinedOutput(); err != nil {
			t.Errorf("unmount: %v: %s", err, out)
		}
	})
	tool(t, "zpool", "sync", pool)
	tool(t, "zfs", "snapshot", "-r", pool+"@before")

	f := diagnose(t, pool)
	var on []string
	for _, d := range f.Datasets {
		on = append(on, strings.TrimPrefix(d.Name, pool+"/")+" "+d.Dedup+" "+d.From)
	}
	want := []string{"clone on local", "golden on local", "one sha256,verify local", "three sha256,verify local",
		"two sha256,verify local"}
	if slices.Sort(on); !slices.Equal(on, want) || f.DatasetsTotal != 7 {
		t.Errorf("%q of %d", on, f.DatasetsTotal)
	}

	// The figures are those of the tools, and what was written.
	const mib, block = 1 << 20, 16 << 10
	if f.DDT == nil {
		t.Fatal(f.DDTUnknown)
	}
	d, size, exact := settled(t, pool)
	if !holds(d.Blocks, 11*mib/block) || !holds(d.Once().Blocks, 3*mib/block) || !holds(d.Saved(), 24*mib) ||
		!holds(d.Allocated, 11*mib) || !holds(d.Referenced, 35*mib) {
		t.Errorf("%+v", d)
	}
	if d.OnDisk.Low <= 0 || d.InCore.Low <= 0 || d.OnDisk.High > 16*mib {
		t.Errorf("sizes: %+v", d)
	}
	features, err := zfs.Features(t.Context(), pool)
	if err != nil {
		t.Fatal(err)
	}
	text := tool(t, "zpool", "status", "-D", pool)
	if _, new := features["fast_dedup"]; new {
		if d.OnDisk != exactly(size) {
			t.Errorf("on disk %+v, dedup_table_size %d", d.OnDisk, size)
		}
		want := fmt.Sprintf("DDT entries %d, size %d on disk, %d in core", d.Entries, d.OnDisk.Low, d.InCore.Low)
		if !strings.Contains(exact, want) {
			t.Errorf("not %q: %s", want, exact)
		}
		if f.Features["fast_dedup"] != "active" || !d.Blocks.Exact() {
			t.Errorf("features %v, blocks %+v", f.Features, d.Blocks)
		}
	}
	// What is read from the text of the same moment agrees.
	old, err := parseDDTText(text)
	if err != nil {
		t.Fatalf("%v: %s", err, text)
	}
	for i, b := range old.Buckets {
		if c := d.Buckets[i]; b.Refs != c.Refs || !b.Blocks.overlaps(c.Blocks) || !b.Allocated.overlaps(c.Allocated) ||
			!b.Referenced.overlaps(c.Referenced) {
			t.Errorf("text %+v, JSON %+v", b, c)
		}
	}

	// All of the saving is copies, but for what has no entry in the table. That is
	// known to be less if the dataset without dedup never had it.
	c := f.Copies
	if c == nil || !c.Complete || len(c.Trees) != 1 || c.Trees[0].Original != golden || len(c.Trees[0].Copies) != 3 {
		t.Fatalf("copies: %+v", c)
	}
	if c.CopiedBytes < 24*mib || c.CopiedBytes > 25*mib || c.Sampled == 0 || c.SampledEqual != c.Sampled {
		t.Errorf("copies: %+v", c)
	}
	if c.Explained.High != d.Saved().High || c.Explained.Low < 12*mib || c.ExplainedIf.Low < c.Explained.Low+mib {
		t.Errorf("explained %+v of %+v; unshared %+v", c.Explained, d.Saved(), f.UnsharedBytes)
	}
	if !slices.Contains(c.NotLookedAt, "1 clones, which share blocks with their origin") {
		t.Errorf("not looked at: %q", c.NotLookedAt)
	}

	// It has left no trace.
	tool(t, "zpool", "sync", pool)
	for l := range strings.Lines(tool(t, "zfs", "get", "-Hpr", "-t", "filesystem", "-o", "value", "written@before",
		pool)) {
		if strings.TrimSpace(l) != "0" {
			t.Errorf("%s bytes were written to a dataset", strings.TrimSpace(l))
		}
	}
}

// Volumes of which one was copied to the other.
func TestVolumesWithDedup(t *testing.T) {
	pool := testfs.ZFS(t, 512<<20)
	content := noise(32 << 20)
	volume(t, pool+"/a", content)
	copy(content[24<<20:], noise(8<<20))
	volume(t, pool+"/b", content)
	f := diagnose(t, pool)
	if f.DDT == nil || !holds(f.DDT.Saved(), 24<<20) {
		t.Fatalf("%+v", f.DDT)
	}
	if len(f.Copies.Volumes) != 1 {
		t.Fatalf("%+v", f.Copies)
	}
	g := f.Copies.Volumes[0]
	if g.Places < 100 || g.Equal == 0 || g.Equal >= g.Places || g.Explained.Low > 26<<20 || g.Explained.High < 22<<20 {
		t.Errorf("%+v", g)
	}
	if e := f.Copies.Explained; e.Low < 8<<20 || e.High > 24<<20 {
		t.Errorf("explained %+v", e)
	}
}

// Copies in a filesystem on a volume are found, and nothing is claimed of them.
func TestCopiesInsideVolume(t *testing.T) {
	pool := testfs.ZFS(t, 512<<20)
	volume(t, pool+"/v", noise(64<<20))
	dev, err := zfs.AwaitDevice(t.Context(), pool+"/v", time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	name := dev.Name()
	dev.Close()
	tool(t, "mkfs.ext4", "-q", "-F", "-E", "nodiscard", name)
	dir := t.TempDir()
	if err := unix.Mount(name, dir, "ext4", 0, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	fill(t, dir+"/g", 4)
	copyTree(t, dir+"/g", dir+"/copy")
	tool(t, "sync", "-f", dir)
	f := diagnose(t, pool)
	c := f.Copies
	if c == nil || len(c.Trees) != 1 || c.InsideBytes < 4<<20 || c.CopiedBytes != 0 || c.Explained.Low != 0 {
		t.Errorf("%+v", c)
	}
}

func TestPoolWithoutDedup(t *testing.T) {
	pool := testfs.ZFS(t, 128<<20)
	dir := t.TempDir()
	fill(t, filesystem(t, dir, pool+"/a"), 2)
	f := diagnose(t, pool)
	if len(f.Datasets) != 0 || f.DDT == nil || f.DDT.Entries != 0 || f.Copies != nil {
		t.Errorf("%+v", f)
	}
	out, _, code := pando(t, "doctor", "--zfs", pool)
	if code != 0 || strings.Count(out, "\n") != 1 || !strings.Contains(out, "dedup costs nothing here") {
		t.Errorf("exit code %d: %s", code, out)
	}
	// Dedup that nothing was written with.
	tool(t, "zfs", "set", "dedup=on", pool+"/a")
	out, _, code = pando(t, "doctor", "--zfs", pool)
	if code != 0 || !strings.Contains(out, "best time to turn it off") ||
		!strings.Contains(out, "zfs set dedup=off "+pool+"/a") {
		t.Errorf("exit code %d: %s", code, out)
	}
	// Names that are not there; those that are, for the shell.
	_, stderr, code := pando(t, "doctor", "--zfs", pool+"x")
	if code != errs.NotFound.Codes().Exit || !strings.Contains(stderr, "zpool does not exist") ||
		!strings.Contains(stderr, "hint: imported zpools: ") || !strings.Contains(stderr, pool) {
		t.Errorf("exit code %d: %s", code, stderr)
	}
	_, stderr, code = pando(t, "doctor", "--zfs", pool+"/a")
	if code != errs.NotFound.Codes().Exit {
		t.Errorf("a dataset: exit code %d: %s", code, stderr)
	}
	out, _, code = pando(t, "__complete", "doctor", "--zfs", "")
	if code != 0 || !strings.Contains(out, pool+"\n") {
		t.Errorf("completion: %d: %s", code, out)
	}
	out, _, code = pando(t, "doctor", "--zfs", pool, "--json")
	if code != 0 || !strings.HasPrefix(out, "{") || !strings.Contains(out, `"subject": "`+pool+`"`) {
		t.Errorf("json: %d: %s", code, out)
	}
}

// pando runs the program.
func pando(t *testing.T, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	exe := os.Getenv("PANDO_TEST_BINARY")
	if exe == "" {
		exe = filepath.Join(t.TempDir(), "pando")
		if out, err := exec.Command("go", "build", "-buildvcs=false", "-o", exe,
			"pando/cmd/pando").CombinedOutput(); err != nil {
			t.Fatalf("go build: %v: %s", err, out)
		}
	}
	cmd := exec.Command(exe, args...)
	var o, e strings.Builder
	cmd.Stdout, cmd.Stderr = &o, &e
	if err := cmd.Run(); err != nil && cmd.ProcessState == nil {
		t.Fatal(err)
	}
	return o.String(), e.String(), cmd.ProcessState.ExitCode()
}
