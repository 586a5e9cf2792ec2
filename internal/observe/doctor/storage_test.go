package doctor

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"pando/internal/linux/loopdev"
	"pando/internal/linux/mount"
	"pando/internal/observe/blockdev"
	"pando/internal/testing/testfs"

	"golang.org/x/sys/unix"
)

// These tests make the faults for real. The checks look at the whole host, on which
// other tests run: only what is said of this test's own things counts.

// examine does one check.
func examine(t *testing.T, check string, pool *PoolFacts) *Report {
	t.Helper()
	e, err := Examine(t.Context(), HostRequest{Only: []string{check}, PatienceEach: time.Minute}, pool, nil)
	if err != nil {
		t.Fatal(err)
	}
	c := &e.Checks[0]
	if c.Status == Skipped {
		t.Fatalf("%s was skipped: %s", check, c.Summary)
	}
	if c.Summary == "" {
		t.Errorf("%s says nothing of what it has looked at", check)
	}
	for _, f := range c.Findings {
		if f.Subject == "" || f.Title == "" || f.Why == "" || len(f.Do) == 0 || len(f.Measured) == 0 ||
			strings.HasSuffix(f.Title, ".") {
			t.Errorf("a finding lacks something: %+v", f)
		}
	}
	return c
}

// only returns what is said of a subject: one finding, with the code and severity.
func only(t *testing.T, c *Report, subject, code string, s Severity) Finding {
	t.Helper()
	got := about(c, subject)
	if len(got) != 1 || got[0].Code != code || got[0].Severity != s {
		t.Fatalf("of %s there is %s; want %s %s", subject, asJSON(got), s, code)
	}
	if rank(c.Status) < rank(s) {
		t.Errorf("the check's status is %s", c.Status)
	}
	return got[0]
}

// nothing fails the test if there is a finding of a subject.
func nothing(t *testing.T, c *Report, subject string) {
	t.Helper()
	if got := about(c, subject); len(got) > 0 {
		t.Fatalf("of %s there is %s; want nothing", subject, asJSON(got))
	}
}

func about(c *Report, subject string) (out []Finding) {
	for _, f := range c.Findings {
		if f.Subject == subject {
			out = append(out, f)
		}
	}
	return out
}

func asJSON(v any) string {
	b, err := json.MarshalIndent(v, "", " ")
	if err != nil {
		return err.Error()
	}
	return string(b)
}

// measured is a figure of a finding.
func measured(t *testing.T, f Finding, name string) Figure {
	t.Helper()
	i := slices.IndexFunc(f.Measured, func(m Figure) bool { return m.Name == name })
	if i < 0 {
		t.Fatalf("there is no figure %s in %s", name, asJSON(f))
	}
	return f.Measured[i]
}

// sh runs a command of a finding as it stands there.
func sh(t *testing.T, command string) {
	t.Helper()
	if out, err := exec.Command("sh", "-c", command).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v: %s", command, err, out)
	}
}

// noGuest is for tests that have nothing to do with ZFS: in its guest, under
// emulation, they would take minutes to say what they say on the host.
func noGuest(t *testing.T) {
	t.Helper()
	if os.Getenv("PANDO_TEST_ZFS") != "" {
		t.Skip("does not apply: it has nothing to do with ZFS (`make test` runs it)")
	}
}

// deviceOf is the device that is mounted at dir.
func deviceOf(t *testing.T, dir string) blockdev.Device {
	t.Helper()
	table, err := mount.Table("self")
	if err != nil {
		t.Fatal(err)
	}
	m, ok := mount.At(table, dir)
	if !ok {
		t.Fatalf("nothing is mounted at %s", dir)
	}
	d, err := blockdev.LookupPath(m.Source)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// attach makes a sparse file a block device until the test ends.
func attach(t *testing.T, path string, size int64, o loopdev.Options) blockdev.Device {
	t.Helper()
	d, err := blockdev.LookupPath(testfs.Loop(t, path, size, o).Path)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// mkfs makes a filesystem on a device and mounts it until the test ends.
func mkfs(t *testing.T, fstype, device string, args ...string) string {
	t.Helper()
	tool(t, "mkfs."+fstype, append(args, device)...)
	return mountAt(t, fstype, device)
}

func mountAt(t *testing.T, fstype, device string, options ...string) string {
	t.Helper()
	dir := t.TempDir()
	m, err := mount.Device(fstype, device, options, false)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	if _, err := m.MoveTo(dir); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := mount.Unmount(dir); err != nil {
			t.Errorf("unmount %s: %v", dir, err)
		}
	})
	return dir
}

// child starts a program that runs until the test ends; it gets a line when it is
// ready, if wait.
func child(t *testing.T, cmd *exec.Cmd, wait bool) int {
	t.Helper()
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		in.Close()
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	if wait {
		b := make([]byte, 6)
		if _, err := io.ReadFull(out, b); err != nil || string(b) != "ready\n" {
			t.Fatalf("the child says %q: %v", b, err)
		}
	}
	return cmd.Process.Pid
}

// fillTo makes a filesystem so many percent full, as df counts.
func fillTo(t *testing.T, dir string, percent int64) {
	t.Helper()
	f, err := os.OpenFile(filepath.Join(dir, "filling"), os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var sf unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &sf); err != nil {
		t.Fatal(err)
	}
	st, err := f.Stat()
	if err != nil {
		t.Fatal(err)
	}
	used, avail := int64(sf.Blocks-sf.Bfree)*sf.Bsize, int64(sf.Bavail)*sf.Bsize
	more := (used+avail)*percent/100 - used
	if err := unix.Fallocate(int(f.Fd()), 0, st.Size(), more); err != nil {
		t.Fatalf("%d bytes more: %v", more, err)
	}
	if err := f.Sync(); err != nil { // btrfs counts what it has committed
		t.Fatal(err)
	}
}

func TestSpace(t *testing.T) {
	noGuest(t)
	for _, kind := range []string{"ext4", "xfs", "tmpfs"} {
		t.Run(kind, func(t *testing.T) {
			dir := testfs.New(t, kind, 128<<20).Dir()
			nothing(t, examine(t, "space", nil), dir)
			for _, c := range []struct {
				percent int64
				is      Severity
			}{{83, Note}, {93, Warning}, {99, Critical}} {
				fillTo(t, dir, c.percent)
				f := only(t, examine(t, "space", nil), dir, "space-full", c.is)
				if m := measured(t, f, "used_percent"); m.Low < float64(c.percent)-1 || m.Low > float64(c.percent)+1 {
					t.Errorf("it was made %d %% full, and is found to be %.1f %%", c.percent, m.Low)
				}
			}
		})
	}
	t.Run("btrfs", func(t *testing.T) { // its estimate jumps when chunks are made
		dir := testfs.Btrfs(t, 512<<20)
		nothing(t, examine(t, "space", nil), dir)
		fillTo(t, dir, 95)
		if f := about(examine(t, "space", nil), dir); len(f) != 1 || f[0].Code != "space-full" ||
			rank(f[0].Severity) < rank(Warning) {
			t.Errorf("found %s", asJSON(f))
		}
	})
}

func TestInodes(t *testing.T) {
	noGuest(t)
	dir := testfs.Ext4(t, 16<<20)
	nothing(t, examine(t, "space", nil), dir)
	var sf unix.Statfs_t
	if err := unix.Statfs(dir, &sf); err != nil {
		t.Fatal(err)
	}
	made := 0
	make := func(percent uint64) {
		for sf.Files-sf.Ffree < sf.Files*percent/100 {
			if err := os.WriteFile(filepath.Join(dir, fmt.Sprint(made)), nil, 0o600); err != nil {
				t.Fatal(err)
			}
			made, sf.Ffree = made+1, sf.Ffree-1
		}
	}
	make(82)
	only(t, examine(t, "space", nil), dir, "space-inodes", Note)
	make(99)
	f := only(t, examine(t, "space", nil), dir, "space-inodes", Critical)
	if m := measured(t, f, "inodes_free"); m.Low != float64(sf.Ffree) {
		t.Errorf("%v inodes are free, not %d", m.Low, sf.Ffree)
	}
}

// A pool whose file, and a volume whose image, may grow to more than there is.
func TestOvercommit(t *testing.T) {
	noGuest(t)
	outer := testfs.Ext4(t, 64<<20)
	file := filepath.Join(outer, "pool.img")
	pool := mkfs(t, "ext4", attach(t, file, 128<<20, loopdev.Options{}).Path(), "-q")
	facts := &PoolFacts{Dir: outer, Data: pool, Loop: true}
	f := only(t, examine(t, "space", facts), file, "space-pool-file", Warning)
	if size, left, free := measured(t, f, "size"), measured(t, f, "missing"), measured(t, f,
		"free"); size.Low != 128<<20 || left.Low <= free.Low || left.Low >= size.Low {
		t.Errorf("figures that cannot be: %s", asJSON(f))
	}
	only(t, examine(t, "space", nil), file, "space-thin", Note) // it is not known to be the pool

	roomy := testfs.Ext4(t, 128<<20)
	file = filepath.Join(roomy, "pool.img")
	pool = mkfs(t, "ext4", attach(t, file, 32<<20, loopdev.Options{}).Path(), "-q")
	nothing(t, examine(t, "space", &PoolFacts{Dir: roomy, Data: pool, Loop: true}), file)
	nothing(t, examine(t, "space", nil), file)
}

// fragmented makes a file in which only every second block is there.
func fragmented(t *testing.T, path string, extents int) {
	t.Helper()
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(int64(extents) * 8192); err != nil { // else XFS allocates ahead, in between
		t.Fatal(err)
	}
	block := slices.Repeat([]byte("x"), 4096)
	for i := range extents {
		if _, err := f.WriteAt(block, int64(i)*8192); err != nil {
			t.Fatal(err)
		}
	}
	if err := f.Sync(); err != nil {
		t.Fatal(err)
	}
}

func TestFragmentation(t *testing.T) {
	noGuest(t)
	for _, kind := range []string{"xfs", "btrfs"} {
		t.Run(kind, func(t *testing.T) {
			dir := testfs.New(t, kind, 512<<20).Dir()
			facts := &PoolFacts{Dir: dir, Data: dir}
			for name, n := range map[string]int{"bad": 12000, "middling": 1500, "well": 1} {
				g := GoldenFacts{Ref: name + "@1", Image: filepath.Join(dir, name)}
				fragmented(t, g.Image, n)
				facts.Goldens = append(facts.Goldens, g)
			}
			facts.Goldens = append(facts.Goldens, GoldenFacts{Ref: "none@1"},
				GoldenFacts{Ref: "gone@1", Image: filepath.Join(dir, "gone")})
			c := examine(t, "fragmentation", facts)
			f := only(t, c, "bad@1", "fragmentation-golden", Warning)
			if m := measured(t, f, "extents"); m.Low != 12000 {
				t.Errorf("%v extents, not 12000", m.Low)
			}
			if m := measured(t, f, "clone"); m.Text != "60 ms to 480 ms" {
				t.Errorf("a clone is slower by %s", m.Text)
			}
			if m := measured(t, only(t, c, "middling@1", "fragmentation-golden", Note), "average"); m.Low != 4096 {
				t.Errorf("an extent has %v bytes", m.Low)
			}
			nothing(t, c, "well@1")
			if !strings.HasPrefix(c.Summary, "3 goldens with an image; 1 could not be read") {
				t.Error(c.Summary)
			}
		})
	}
	e, err := Examine(t.Context(), HostRequest{Only: []string{"fragmentation"}}, nil, nil)
	if err != nil || e.Checks[0].Status != Skipped || e.Checks[0].Summary == "" {
		t.Errorf("without a pool: %+v, %v", e, err)
	}
}

func TestDedupProgram(t *testing.T) {
	sleep, err := os.ReadFile("/bin/cat")
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "bees")
	if err := testfs.WriteProgram(path, sleep); err != nil {
		t.Fatal(err)
	}
	pid := child(t, exec.Command(path), false)
	f := only(t, examine(t, "dedup", nil), fmt.Sprint(pid), "dedup-program", Note)
	if m := measured(t, f, "program"); m.Text != path {
		t.Errorf("the program is %s", m.Text)
	}
	other := child(t, exec.Command("/bin/cat"), false)
	nothing(t, examine(t, "dedup", nil), fmt.Sprint(other))
}

// What root has made is found without root, but for what is said to be missing.
func TestStorageWithoutRoot(t *testing.T) {
	if os.Getenv("PANDO_TEST_NOBODY") != "" { // the child
		e, err := Examine(t.Context(),
			HostRequest{Only: []string{"sync-honoured", "write-cache", "alignment", "space", "btrfs-metadata", "btrfs-qgroups",
				"dedup", "scrub"}}, nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range e.Checks {
			fmt.Println("CHECK", c.Check, c.Status, c.Summary)
			for _, f := range c.Findings {
				fmt.Println("FOUND", f.Code, f.Subject)
			}
		}
		return
	}
	noGuest(t)
	dir := testfs.Ext4(t, 16<<20)
	fillTo(t, dir, 95)
	tool(t, "mount", "-o", "remount,nobarrier", dir)
	btrfs := testfs.Btrfs(t, 128<<20)
	tool(t, "btrfs", "quota", "enable", btrfs)
	for i := range 20 {
		tool(t, "btrfs", "subvolume", "create", filepath.Join(btrfs, fmt.Sprint(i)))
	}
	path, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	self, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	copied := filepath.Join(t.TempDir(), "test")
	if err := testfs.WriteProgram(copied, self); err != nil {
		t.Fatal(err)
	}
	// the directories of both are this test's own
	for d := filepath.Dir(copied); d != os.TempDir() && d != "/"; d = filepath.Dir(d) {
		if err := os.Chmod(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.Command(copied, "-test.run=^TestStorageWithoutRoot$")
	cmd.Dir = "/"
	cmd.Env = append(os.Environ(), "PANDO_TEST_NOBODY=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	b, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("the child: %v: %s", err, b)
	}
	out := string(b)
	for _, want := range []string{"FOUND sync-nobarrier " + dir, "FOUND space-full " + dir,
		"FOUND btrfs-qgroups-many " + btrfs, "run this as root"} {
		if !strings.Contains(out, want) {
			t.Errorf("without root there is no %q", want)
		}
	}
	if strings.Contains(out, string(Skipped)) || strings.Contains(out, "FOUND scrub-overdue "+btrfs) || t.Failed() {
		t.Errorf("without root:\n%s", out)
	}
}

// Every check and every code of a finding stands in its page.
func TestStorageIsDocumented(t *testing.T) {
	page, err := os.ReadFile("../../../docs/doctor-storage.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range storageChecks() {
		if !strings.Contains(string(page), "\n## "+c.name+"\n") {
			t.Errorf("the check %s has no section", c.name)
		}
	}
	sources, err := filepath.Glob("storage*.go")
	if err != nil {
		t.Fatal(err)
	}
	if len(sources) == 0 {
		t.Skip("does not apply: there are no sources here")
	}
	codes := regexp.MustCompile(`(?:Code: |f\.Code, f\.Severity = )"([a-z0-9-]+)"`)
	n := 0
	for _, s := range append(sources, "fragmentation.go") {
		if strings.HasSuffix(s, "_test.go") {
			continue
		}
		b, err := os.ReadFile(s)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range codes.FindAllStringSubmatch(string(b), -1) {
			n++
			if !strings.Contains(string(page), "`"+m[1]+"`") {
				t.Errorf("%s of %s is not in the page", m[1], s)
			}
		}
	}
	if n < 30 {
		t.Errorf("%d codes were found", n)
	}
}
