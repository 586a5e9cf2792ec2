package doctor

import (
	"context"
	"crypto/rand"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/testing/testfs"

	"golang.org/x/sys/unix"
)

func noise(n int) []byte {
	b := make([]byte, n)
	_, _ = rand.Read(b) // it never fails
	return b
}

func write(t *testing.T, path string, b []byte) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, b, 0o644); err != nil {
		t.Fatal(err)
	}
}

// tick waits until the clock of files, which is coarse, has moved. The time of a file that was read is no measure:
// since Linux 6.13 its next time is a fine one.
func tick(t *testing.T) {
	t.Helper()
	read := func() (now unix.Timespec) {
		if err := unix.ClockGettime(unix.CLOCK_REALTIME_COARSE, &now); err != nil {
			t.Fatal(err)
		}
		return now
	}
	for start := read(); read() == start; {
		time.Sleep(time.Millisecond)
	}
}

// copyTree copies as people do, some time after the original was made.
func copyTree(t *testing.T, from, to string) {
	t.Helper()
	tick(t)
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("cp", "-a", from, to).CombinedOutput(); err != nil {
		t.Fatalf("cp: %v: %s", err, out)
	}
}

// look looks for copies in directories, each of which stands for a filesystem.
func look(t *testing.T, limit time.Duration, dirs ...string) *Copies {
	t.Helper()
	c := &Copies{Complete: true}
	tr := newTrees(c)
	defer tr.close()
	for _, d := range dirs {
		p, err := openPlace(d, 0)
		if err != nil {
			t.Fatal(err)
		}
		tr.places = append(tr.places, p)
	}
	end := time.Now().Add(limit)
	for _, f := range []func(context.Context, time.Time) error{tr.listDirectories, tr.comparePairs, tr.compareSample} {
		if err := f(t.Context(), end); err != nil {
			t.Fatal(err)
		}
	}
	return c
}

func needRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: opening trees without a trace needs root")
	}
}

// found lists originals and copies, relative to dir.
func found(dir string, c *Copies) (out []string) {
	for _, g := range c.Trees {
		for _, k := range g.Copies {
			out = append(out, strings.ReplaceAll(g.Original+" > "+k.Path, dir+"/", ""))
		}
	}
	slices.Sort(out)
	return out
}

func TestCopiesOfTrees(t *testing.T) {
	needRoot(t)
	dir := testfs.Tmpfs(t, 64<<20)
	for _, f := range []string{"bin/a", "bin/b", "etc/c", "etc/d/e", "f"} {
		write(t, dir+"/golden/"+f, noise(64<<10))
	}
	copyTree(t, dir+"/golden", dir+"/jobs/1/data") // two levels below, beside a file of its own
	write(t, dir+"/jobs/1/log", noise(100<<10))
	copyTree(t, dir+"/golden", dir+"/jobs/2/data")
	write(t, dir+"/jobs/2/data/f", noise(64<<10))       // changed
	write(t, dir+"/jobs/2/data/more", noise(64<<10))    // new
	for _, f := range []string{"bin/a", "etc/c", "f"} { // the same names, nothing else
		write(t, dir+"/other/"+f, noise(64<<10))
	}
	c := look(t, time.Minute, dir)
	want := []string{"golden > jobs/1/data", "golden > jobs/2/data"}
	if got := found(dir, c); !slices.Equal(got, want) || !c.Complete {
		t.Errorf("%v, complete: %v", got, c.Complete)
	}
	if want := int64(9 * 64 << 10); c.CopiedBytes != want || c.InsideBytes != 0 {
		t.Errorf("%d bytes copied, not %d", c.CopiedBytes, want)
	}
	if c.Sampled != 9 || c.SampledEqual != 9 {
		t.Errorf("%d of %d equal", c.SampledEqual, c.Sampled)
	}
}

// Filesystems that are copies of each other as a whole.
func TestCopiesOfFilesystems(t *testing.T) {
	needRoot(t)
	a, b := testfs.Tmpfs(t, 8<<20), testfs.Tmpfs(t, 8<<20)
	for _, f := range []string{"bin/a", "etc/b", "c"} {
		write(t, a+"/"+f, noise(64<<10))
	}
	copyTree(t, a+"/.", b)
	c := look(t, time.Minute, a, b)
	if len(c.Trees) != 1 || len(c.Trees[0].Copies) != 1 || c.Trees[0].Copies[0].CopiedFiles != 3 ||
		c.CopiedBytes != 3*64<<10 {
		t.Errorf("%+v", c)
	}
}

// Files that look like copies and are none are found by reading.
func TestCopiesThatAreNone(t *testing.T) {
	needRoot(t)
	dir := testfs.Tmpfs(t, 8<<20)
	when := time.Now().Add(-time.Hour)
	for _, f := range []string{"1/a", "1/b", "2/a", "2/b"} {
		write(t, dir+"/"+f, noise(64<<10))
		if err := os.Chtimes(dir+"/"+f, when, when); err != nil {
			t.Fatal(err)
		}
	}
	c := look(t, time.Minute, dir)
	if len(c.Trees) != 1 || c.Sampled != 2 || c.SampledEqual != 0 {
		t.Fatalf("%+v", c)
	}
	if e := c.explain(exactly(1<<30), exactly(0)); e.Low != 0 || e.High >= 100<<10 {
		t.Errorf("explained: %+v", e)
	}
}

// A hard link is one file; a file linked into the other tree is no copy of itself.
func TestCopiesAndHardLinks(t *testing.T) {
	needRoot(t)
	dir := testfs.Tmpfs(t, 8<<20)
	for _, f := range []string{"1/a", "1/b", "1/c"} {
		write(t, dir+"/"+f, noise(64<<10))
	}
	if err := os.Link(dir+"/1/a", dir+"/1/a2"); err != nil {
		t.Fatal(err)
	}
	copyTree(t, dir+"/1", dir+"/2") // keeps the link
	if err := os.Mkdir(dir+"/3", 0o755); err != nil {
		t.Fatal(err)
	}
	for _, f := range []string{"a", "b", "c"} {
		if err := os.Link(dir+"/1/"+f, dir+"/3/"+f); err != nil {
			t.Fatal(err)
		}
	}
	c := look(t, time.Minute, dir)
	if got := found(dir, c); !slices.Equal(got, []string{"1 > 2"}) || c.CopiedBytes != 3*64<<10 {
		t.Errorf("%v, %d bytes", got, c.CopiedBytes)
	}
}

// Nothing is counted twice when copies lie in copies.
func TestCopiesInCopies(t *testing.T) {
	needRoot(t)
	dir := testfs.Tmpfs(t, 64<<20)
	for _, f := range []string{"x/a", "x/b", "c", "d"} {
		write(t, dir+"/g/"+f, noise(64<<10))
	}
	copyTree(t, dir+"/g/x", dir+"/g/y") // within the original
	copyTree(t, dir+"/g", dir+"/one")
	copyTree(t, dir+"/g", dir+"/two")
	c := look(t, time.Minute, dir)
	if got := found(dir, c); !slices.Equal(got, []string{"g > one", "g > two"}) || c.CopiedBytes != 2*6*64<<10 {
		t.Errorf("%v, %d bytes", got, c.CopiedBytes)
	}
}

// A tree that has something in common with both, and is older than both, does not
// hide that one is a copy of the other; and nothing is counted twice.
func TestCopiesOfWhatIsOlder(t *testing.T) {
	needRoot(t)
	dir := testfs.Tmpfs(t, 64<<20)
	for _, f := range []string{"old/lib/a", "old/lib/b", "old/m", "old/n", "old/o"} {
		write(t, dir+"/"+f, noise(64<<10))
	}
	for _, f := range []string{"p", "q", "r", "s"} {
		write(t, dir+"/g/"+f, noise(64<<10))
	}
	copyTree(t, dir+"/old/lib", dir+"/g/lib")
	copyTree(t, dir+"/g", dir+"/one")
	c := look(t, time.Minute, dir)
	got := found(dir, c)
	if !slices.Contains(got, "g > one") {
		t.Error(got)
	}
	// Of lib there are two copies, of the other four files one.
	if want := int64((2*2 + 4) * 64 << 10); c.CopiedBytes != want {
		t.Errorf("%v: %d bytes, not %d", got, c.CopiedBytes, want)
	}
}

// Time that is over ends the search, and the report says so.
func TestCopiesOutOfTime(t *testing.T) {
	needRoot(t)
	dir := testfs.Tmpfs(t, 8<<20)
	write(t, dir+"/1/a", noise(64<<10))
	copyTree(t, dir+"/1", dir+"/2")
	if c := look(t, 0, dir); c.Complete || len(c.Trees) > 0 {
		t.Errorf("%+v", c)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	f := &Facts{Pool: "t", DDT: tableOf(t, 1, 1)}
	if _, err := f.findCopies(ctx, time.Minute); err != nil {
		t.Errorf("nothing to look at: %v", err)
	}
	tr := newTrees(&Copies{})
	defer tr.close()
	p, err := openPlace(dir, 0)
	if err != nil {
		t.Fatal(err)
	}
	tr.places = append(tr.places, p)
	if err := tr.listDirectories(ctx, time.Now().Add(time.Minute)); !errs.Is(err, errs.Canceled) {
		t.Errorf("interrupted: %v", err)
	}
}

// What is looked through has no trace of it, not even in access times.
func TestLookingLeavesNoTrace(t *testing.T) {
	needRoot(t)
	dir := testfs.New(t, "ext4", 16<<20).Dir()
	if err := unix.Mount("", dir, "", unix.MS_REMOUNT|unix.MS_STRICTATIME, ""); err != nil {
		t.Fatal(err)
	}
	write(t, dir+"/1/a", noise(64<<10))
	copyTree(t, dir+"/1", dir+"/2")
	past := unix.Timespec{Sec: 1000}
	paths := []string{dir + "/1", dir + "/1/a", dir + "/2", dir + "/2/a"}
	for _, p := range paths {
		if err := unix.UtimesNanoAt(unix.AT_FDCWD, p, []unix.Timespec{past, {Nsec: unix.UTIME_OMIT}}, 0); err != nil {
			t.Fatal(err)
		}
	}
	if c := look(t, time.Minute, dir); c.Sampled != 1 {
		t.Errorf("%+v", c)
	}
	for _, p := range paths {
		var st unix.Stat_t
		if err := unix.Stat(p, &st); err != nil || st.Atim != past {
			t.Errorf("%s was read at %v; %v", p, st.Atim, err)
		}
	}
	if f, err := openPlace(dir, unix.Mkdev(0, 1)); !errs.Is(err, errs.InUse) {
		t.Errorf("another filesystem was opened: %v, %v", f, err)
	}
}

func TestEqualVolumes(t *testing.T) {
	const block, blocks = 16 << 10, 64
	dir := t.TempDir()
	first := noise(block * blocks)
	volume := func(name string, change func(b []byte)) openVolume {
		b := slices.Clone(first)
		change(b)
		write(t, filepath.Join(dir, name), b)
		f, err := os.Open(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { f.Close() })
		return openVolume{Dataset{Name: name, ReferencedBytes: block * blocks, volumeBytes: block * blocks}, f}
	}
	same := func([]byte) {}
	half := func(b []byte) { copy(b[len(b)/2:], noise(len(b)/2)) }
	empty := func(b []byte) { clear(b) }
	for what, c := range map[string]struct {
		volumes  []openVolume
		fraction float64 // of all that is there, which is a copy
	}{
		"two equal": {[]openVolume{volume("a1", same), volume("a2", same)}, 0.5},
		"four equal": {[]openVolume{volume("b1", same), volume("b2", same), volume("b3", same), volume("b4", same)},
			0.75},
		"a half equal": {[]openVolume{volume("c1", same), volume("c2", half)}, 0.25},
		"all differ": {[]openVolume{volume("d1", same), volume("d2", func(b []byte) {
			half(b)
			copy(b, noise(len(b)/2))
		})}, 0},
		"two equal, empty": {[]openVolume{volume("e1", same), volume("e2", same), volume("e3", empty)}, 0.5},
	} {
		report := &Copies{}
		g, err := report.compareGroup(t.Context(), c.volumes, block, time.Now().Add(time.Minute))
		if err != nil || g.Places != maxPlaces {
			t.Fatalf("%s: %+v, %v", what, g, err)
		}
		// With 4000 places, 99.99 % of all draws are within twice the interval.
		is := int64(c.fraction * float64(g.PresentBytes))
		slack := g.PresentBytes / 50
		if g.Explained.Low > is+slack || g.Explained.High < is-slack || g.Explained.High-g.Explained.Low > g.PresentBytes/10 {
			t.Errorf("%s: %+v, should be about %d of %d", what, g, is, g.PresentBytes)
		}
	}
	// Nothing is concluded from little.
	report := &Copies{}
	g, err := report.compareGroup(t.Context(), []openVolume{volume("f1", empty), volume("f2", empty)}, block,
		time.Now().Add(time.Minute))
	if err != nil || g.Places != 0 || g.Explained != (Range{0, g.PresentBytes}) || len(report.NotLookedAt) == 0 {
		t.Errorf("empty: %+v, %v", g, err)
	}
}
