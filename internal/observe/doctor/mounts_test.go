package doctor

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"pando/internal/linux/loopdev"
	"pando/internal/linux/mount"
	"pando/internal/linux/run"
	"pando/internal/testing/testfs"

	"golang.org/x/sys/unix"
)

// privateDir is a directory on a private mount: namespaces can be bound in it.
func privateDir(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount(dir, dir, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	if err := unix.Mount("", dir, "", unix.MS_PRIVATE, ""); err != nil {
		t.Fatal(err)
	}
	return dir
}

// TestMountLeaks: an image of the pool that is mounted in another namespace only, held
// by a child, and one whose file is gone.
func TestMountLeaks(t *testing.T) {
	rootOnly(t)
	dir := t.TempDir()
	pool := &PoolFacts{Dir: filepath.Join(dir, "pool"), Data: filepath.Join(dir, "pool", "data"), Driver: "reflink",
		Loop: true, Attached: map[string]string{}}
	if err := os.MkdirAll(pool.Data, 0o755); err != nil {
		t.Fatal(err)
	}
	point := func(name string) string {
		p := filepath.Join(dir, name)
		if err := os.Mkdir(p, 0o755); err != nil {
			t.Fatal(err)
		}
		return p
	}
	image := func(path string) string {
		file(t, path, 16<<20)
		if _, err := run.Program(t.Context(), "mkfs.ext4", "-q", "-F", path); err != nil {
			t.Fatal(err)
		}
		return path
	}
	lost, known, gone := point("lost"), point("known"), point("gone")
	lostDevice := loopOn(t, image(filepath.Join(pool.Data, "lost.img")), loopdev.Options{KeepOpen: true})
	knownDevice := loopOn(t, image(filepath.Join(pool.Data, "known.img")), loopdev.Options{KeepOpen: true})
	goneDevice := loopOn(t, image(filepath.Join(dir, "gone.img")), loopdev.Options{KeepOpen: true})
	pool.Attached[filepath.Join(pool.Data, "known.img")] = "known"
	pool.Mounts = map[string]string{known: "known"}
	child := startRole(t, "mount", inOwnMounts, lostDevice, lost)
	knownChild := startRole(t, "mount", inOwnMounts, knownDevice, known)
	goneChild := startRole(t, "mount", inOwnMounts, goneDevice, gone)
	q := &host{Pool: pool}

	r := checkNow(t, mountLeaks, q)
	s, text := r.about("mount-lost", lost)
	if s != Warning || !strings.Contains(text, fmt.Sprintf("pid %d", child.pid())) ||
		!strings.Contains(text, fmt.Sprintf("nsenter -m -t %d umount %s", child.pid(), lost)) {
		t.Errorf("lost: %q %s", s, text)
	}
	for _, p := range []string{known, gone} {
		if s, text := r.about("", p); s != "" {
			t.Errorf("%s: %s", p, text)
		}
	}
	if err := os.Remove(filepath.Join(dir, "gone.img")); err != nil {
		t.Fatal(err)
	}
	s, text = checkNow(t, mountLeaks, q).about("mount-deleted-image", gone)
	if s != Warning || !strings.Contains(text, fmt.Sprintf("pid %d", goneChild.pid())) {
		t.Errorf("deleted: %q %s", s, text)
	}
	// What it says to do mends it.
	for p, c := range map[string]*roleChild{lost: child, gone: goneChild} {
		if _, err := run.Program(t.Context(), "nsenter", "-m", "-t", strconv.Itoa(c.pid()), "umount", p); err != nil {
			t.Fatal(err)
		}
	}
	r = checkNow(t, mountLeaks, q)
	for _, p := range []string{lost, gone} {
		if s, text := r.about("", p); s != "" {
			t.Errorf("unmounted: %s", text)
		}
	}
	knownChild.end()
	// The children's own unmounting fails, which they say as they end.
	child.end()
	goneChild.end()
}

// TestMountLeakOfTree: a tree of a pool that is bound somewhere though no volume is.
func TestMountLeakOfTree(t *testing.T) {
	rootOnly(t)
	dir := real(t.TempDir())
	pool := &PoolFacts{Dir: filepath.Join(dir, "pool"), Data: filepath.Join(dir, "pool", "data"), Driver: "plain"}
	bind := func(object string) string {
		from, to := filepath.Join(pool.Data, "objects", object), filepath.Join(dir, "at-"+object)
		for _, d := range []string{from, to} {
			if err := os.MkdirAll(d, 0o755); err != nil {
				t.Fatal(err)
			}
		}
		m, err := mount.Tree(from, false)
		if err != nil {
			t.Fatal(err)
		}
		_, err = m.MoveTo(to)
		m.Close()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = unix.Unmount(to, unix.MNT_DETACH) })
		return to
	}
	lost, known := bind("LOST"), bind("KNOWN")
	pool.Mounts = map[string]string{known: "v"}
	r := checkNow(t, mountLeaks, &host{Pool: pool})
	if s, text := r.about("mount-lost", lost); s != Warning || !strings.Contains(text, "umount "+lost) {
		t.Errorf("lost: %q %s", s, text)
	}
	if s, text := r.about("", known); s != "" {
		t.Errorf("known: %s", text)
	}
	if err := mount.Unmount(lost); err != nil {
		t.Fatal(err)
	}
	if s, text := checkNow(t, mountLeaks, &host{Pool: pool}).about("", lost); s != "" {
		t.Errorf("unmounted: %s", text)
	}
}

// TestKeptNamespace: a mount namespace that only a bind mount keeps, with a mount in it.
func TestKeptNamespace(t *testing.T) {
	rootOnly(t)
	dir := privateDir(t)
	fs := testfs.Ext4(t, 16<<20)
	pin := file(t, filepath.Join(dir, "pin"), 0)
	c := testfs.PinMountNamespace(t, pin, func() (*roleChild, int, func()) {
		c := startRole(t, "wait", inOwnMounts)
		return c, c.pid(), c.end
	})
	id := readlink(fmt.Sprintf("/proc/%d/ns/mnt", c.pid()))
	if s, text := checkNow(t, mountLeaks, nil).about("namespace-kept", id); s != "" {
		t.Errorf("while a process lives there: %s", text)
	}
	c.end()
	s, text := checkNow(t, mountLeaks, nil).about("namespace-kept", id)
	if s != Note || !strings.Contains(text, "umount "+pin) {
		t.Errorf("%q %s", s, text)
	}
	// The device under the filesystem is in use there.
	if err := mount.Unmount(pin); err != nil {
		t.Fatal(err)
	}
	if s, text := checkNow(t, mountLeaks, nil).about("namespace-kept", id); s != "" {
		t.Errorf("not kept any more: %s", text)
	}
	_ = fs
}

// TestMountCount: 2,000 mounts in the namespace of a child, which does the check.
func TestMountCount(t *testing.T) {
	rootOnly(t)
	count := func(n, warn int) told {
		c := startRole(t, "mounts", inOwnMounts, t.TempDir(), strconv.Itoa(n), strconv.Itoa(warn))
		defer c.end()
		return decode(t, []byte(c.said))
	}
	before, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	few, many := count(0, 5000), count(2000, 5000)
	own := func(r told) Severity {
		for _, f := range r.Findings {
			if f.Code == "mounts-many" && value(f.Measured, "copy_us") >= 0 { // measured there
				return f.Severity
			}
		}
		return ""
	}
	if got := own(few); got != "" {
		t.Errorf("few mounts: %s, %+v", got, few.Findings)
	}
	if got := own(many); got != Note {
		t.Errorf("2,000 mounts: %q, %+v", got, many)
	}
	if got := own(count(2000, 1900)); got != Warning {
		t.Errorf("2,000 mounts, where 1,900 are too many: %q", got)
	}
	for _, f := range many.Findings {
		if value(f.Measured, "copy_us") >= 0 && (value(f.Measured, "mounts") < 2000 ||
			value(f.Measured, "type_tmpfs") < 2000) {
			t.Errorf("counted %v", f.Measured)
		}
	}
	for _, name := range []string{"read_us", "copy_us", "mount_us", "unmount_us"} {
		if value(few.Measured, name) <= 0 || value(many.Measured, name) <= 0 {
			t.Errorf("%s: %v with few mounts, %v with 2,000", name, value(few.Measured, name), value(many.Measured, name))
		}
	}
	if a, b := value(few.Measured, "table"), value(many.Measured, "table"); b < a+2000*40 {
		t.Errorf("the table has %v bytes with few mounts, %v with 2,000", a, b)
	}
	t.Logf("few mounts: %s\n2,000: %s", few.Summary, many.Summary)
	after, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	if strings.Count(string(after), t.Name()) != strings.Count(string(before), t.Name()) {
		t.Error("mounts have come over into this namespace")
	}
}

// TestMountCostsAreFound: whatever the number is, costs over what is sensible are.
func TestMountCostsAreFound(t *testing.T) {
	rootOnly(t)
	strict := mountDefaults
	strict.read, strict.copy = time.Nanosecond, time.Nanosecond
	strict.note = 1 << 30
	if s, text := checkNow(t, mountCount(strict), nil).about("mounts-slow", ""); s != Warning {
		t.Errorf("%q %s", s, text)
	}
	lax := mountDefaults
	lax.read, lax.copy, lax.note = time.Hour, time.Hour, 1<<30
	if r := checkNow(t, mountCount(lax), nil); len(r.Findings) > 0 {
		t.Errorf("%+v", r.Findings)
	}
}

// TestMeasuringLeavesNothing: mounts, namespaces and threads are as before.
func TestMeasuringLeavesNothing(t *testing.T) {
	rootOnly(t)
	own := readlink("/proc/thread-self/ns/mnt")
	table := readText("/proc/self/mountinfo")
	c := measureMounts()
	if c.copyErr != nil || c.mountErr != nil || c.read <= 0 || c.copy <= 0 || c.mount <= 0 || c.unmount <= 0 ||
		c.bytes == 0 {
		t.Fatalf("%+v", c)
	}
	if now := readlink("/proc/thread-self/ns/mnt"); now != own {
		t.Errorf("namespace %s, was %s", now, own)
	}
	if now := readText("/proc/self/mountinfo"); strings.Count(now, " /proc ") != strings.Count(table, " /proc ") {
		t.Errorf("mounts:\n%s\nwere\n%s", now, table)
	}
}

// TestMeasuringIsNotSeen: where mounts are shared, what is mounted to measure does not
// come over, not even for a moment: the kernel would tell who polls the table.
func TestMeasuringIsNotSeen(t *testing.T) {
	rootOnly(t)
	c := startRole(t, "shared", inOwnMounts, t.TempDir())
	defer c.end()
	if c.said != "quiet, then told" {
		t.Error(c.said)
	}
}

// TestLimitOfMounts: a namespace that is nearly full, made in a child.
func TestLimitOfMounts(t *testing.T) {
	rootOnly(t)
	top, ok := sysctl("fs.mount-max")
	if !ok || top > 200_000 {
		t.Skipf("SKIPPED: fs.mount-max is %d, which would take too many mounts to reach", top)
	}
	c := startRole(t, "mounts-limit", inOwnMounts, t.TempDir(), strconv.FormatInt(top*85/100, 10))
	defer c.end()
	if s, text := decode(t, []byte(c.said)).about("limit-mounts", ""); s != Warning ||
		!strings.Contains(text, "sysctl -w fs.mount-max=") {
		t.Errorf("%q %s", s, text)
	}
	if s, text := checkNow(t, limitsCheck(0.8), nil).about("limit-mounts", ""); s != "" {
		t.Errorf("in this namespace: %s", text)
	}
}

func init() {
	tell := func(check check, ready func(string)) error {
		c := Report{Measured: []Figure{}, Findings: []Finding{}}
		ctx, stop := testContext()
		defer stop()
		if err := check.run(ctx, &host{}, &c); err != nil {
			return err
		}
		b, err := json.Marshal(c)
		if err != nil {
			return err
		}
		ready(string(b))
		return nil
	}
	tmpfs := func(dir string) error {
		if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "mode=755"); err != nil {
			return err
		}
		return unix.Mount("", dir, "", unix.MS_PRIVATE, "")
	}
	roles["shared"] = func(args []string, ready func(string)) error {
		if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SHARED, ""); err != nil {
			return err
		}
		f, err := os.Open("/proc/self/mountinfo")
		if err != nil {
			return err
		}
		defer f.Close()
		changed := func() string {
			p := []unix.PollFd{{Fd: int32(f.Fd()), Events: unix.POLLPRI}}
			if _, err := unix.Poll(p, 0); err != nil {
				return err.Error()
			}
			if p[0].Revents&(unix.POLLPRI|unix.POLLERR) != 0 {
				return "told"
			}
			return "quiet"
		}
		changed() // the beginning
		if c := measureMounts(); c.copyErr != nil || c.mountErr != nil {
			return fmt.Errorf("%+v", c)
		}
		said := changed()
		if err := unix.Mount("tmpfs", args[0], "tmpfs", 0, ""); err != nil {
			return err
		}
		ready(said + ", then " + changed())
		return unix.Unmount(args[0], 0)
	}
	roles["mounts"] = func(args []string, ready func(string)) error {
		n, err := strconv.Atoi(args[1])
		if err != nil {
			return err
		}
		if err := tmpfs(args[0]); err != nil {
			return err
		}
		for i := range n {
			dir := filepath.Join(args[0], strconv.Itoa(i))
			if err := os.Mkdir(dir, 0o755); err != nil {
				return err
			}
			if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=4k"); err != nil {
				return err
			}
		}
		t := mountDefaults
		t.read, t.copy = time.Hour, time.Hour // how long it takes here is others' doing, too
		if t.warn, err = strconv.Atoi(args[2]); err != nil {
			return err
		}
		return tell(check{run: mountCount(t)}, ready)
	}
	// Bind mounts of a whole tree into itself double their number.
	roles["mounts-limit"] = func(args []string, ready func(string)) error {
		want, err := strconv.Atoi(args[1])
		if err != nil {
			return err
		}
		if err := tmpfs(args[0]); err != nil {
			return err
		}
		have := 1
		var trees []string // each holds as many as there were before it
		var sizes []int
		for i := 0; have < want; i++ {
			from, size := args[0], have
			for k := len(sizes) - 1; have+size > want && k >= 0; k-- {
				from, size = trees[k], sizes[k]
			}
			to := filepath.Join(args[0], strconv.Itoa(i))
			if err := os.Mkdir(to, 0o755); err != nil {
				return err
			}
			if err := unix.Mount(from, to, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
				return err
			}
			trees, sizes = append(trees, to), append(sizes, size)
			have += size
		}
		return tell(check{run: limitsCheck(0.8)}, ready)
	}
}
