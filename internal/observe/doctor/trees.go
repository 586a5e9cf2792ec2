package doctor

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/linux/mount"
	"pando/internal/linux/treewalk"
	"pando/internal/linux/zfs"

	"golang.org/x/sys/unix"
)

const (
	treeDepth     = 4       // how far below a mount a tree may begin
	maxTrees      = 100_000 // trees that are remembered
	maxPlacesOpen = 2000    // filesystems: each takes two descriptors
	minHashes     = 4       // of the names in a tree's root
	giveUpAfter   = 200     // files: a tree of which so many were compared and few agree is no copy
	sampleFiles   = 128
	sampleBytes   = 128 << 10
)

// place is a filesystem that is looked through, by a mount of our own that cannot
// be written to: not even access times change.
type place struct {
	path   string // where people see it
	inside bool   // it lies inside a volume
	mount  *mount.Detached
	root   *os.File
}

// tree is a directory that may be a copy of another, or have copies.
type tree struct {
	place *place
	path  string // relative; "" is the root
	depth int
	born  int64 // in ns
	mins  [minHashes]uint64
	names int
	of    *tree // that it is a copy of
}

func (t *tree) String() string { return filepath.Join(t.place.path, t.path) }

// match is a file that is a copy of another.
type match struct {
	original, copied *place
	originalPath     string
	copiedPath       string
	size             int64
	originalID       fileID
	copiedID         fileID
}

type trees struct {
	c      *Copies
	places []*place
	all    []*tree
	seed   maphash.Seed
	draw   reservoir
	same   classes

	tracker *progress.Tracker
}

func newTrees(c *Copies) *trees {
	return &trees{c: c, same: classes{}, seed: maphash.MakeSeed(), draw: reservoir{size: sampleFiles}}
}

func (t *trees) close() {
	for _, p := range t.places {
		p.close()
	}
}

// openPlaces opens what can be looked through: mounted filesystems of the pool, and
// filesystems on its volumes.
func (t *trees) openPlaces(datasets []Dataset, deadline time.Time) {
	table, err := mount.Table("self")
	if err != nil {
		t.c.skip("all filesystems: " + err.Error())
		return
	}

	bySource, byDevice := map[string]mount.Entry{}, map[uint64]mount.Entry{}
	for _, m := range table {
		switch {
		case m.Root != "/":
		case m.FSType == "zfs":
			bySource[m.Source] = m
		default:
			byDevice[m.Dev] = m
		}
	}

	clones, unmounted, late := 0, 0, 0
	for _, d := range datasets {
		if d.Origin != "" {
			clones++ // it shares with its origin already, without the dedup table
			continue
		}

		m := bySource[d.Name]
		if d.Type == "volume" {
			m = byDevice[deviceNumber(d.Name)]
		}

		if m.Point == "" {
			if d.Type == "filesystem" {
				unmounted++
			}
			continue
		}

		if len(t.places) >= maxPlacesOpen || t.late(deadline) {
			late++
			continue
		}

		p, err := openPlace(m.Point, m.Dev)
		if errs.Is(err, errs.Permission) {
			t.c.skip("filesystems: opening them without changing access times needs root")
			return
		}

		if err != nil {
			t.c.skip(err.Error())
			continue
		}

		p.inside = d.Type == "volume"
		t.places = append(t.places, p)
	}

	for _, n := range []struct {
		n    int
		what string
	}{
		{unmounted, "filesystems that are not mounted"},
		{clones, "clones, which share blocks with their origin"},
		{late, "filesystems skipped for lack of time"},
	} {
		if n.n > 0 {
			t.c.skip(fmt.Sprintf("%d %s", n.n, n.what))
		}
	}

	t.c.Complete = t.c.Complete && late == 0
}

// openPlace opens the filesystem that is mounted at point, if it is that of a
// device, and not another that covers it; 0 is any.
func openPlace(point string, device uint64) (*place, error) {
	p := &place{path: point}
	var err error
	if p.mount, err = mount.Tree(point, true); err != nil {
		return nil, err
	}

	if p.root, err = p.mount.Open(); err == nil {
		var st unix.Stat_t
		if err = unix.Fstat(int(p.root.Fd()), &st); err == nil && device != 0 && device != st.Dev {
			err = errs.New(errs.InUse, "open", point, "another filesystem is mounted over it")
		}
	}
	if err != nil {
		p.close()
		return nil, errs.Wrap("open", point, err)
	}

	return p, nil
}

func (p *place) close() {
	if p.root != nil {
		p.root.Close()
	}
	_ = p.mount.Close() // it was never attached to anything
}

// deviceNumber is that of a volume's block device; 0 without one.
func deviceNumber(volume string) uint64 {
	dev, err := zfs.OpenDevice(volume)
	if err != nil {
		return 0
	}
	defer dev.Close()
	var st unix.Stat_t
	if unix.Fstat(int(dev.Fd()), &st) != nil {
		return 0
	}
	return st.Rdev
}

// openBelow opens something below a place, without following links and without
// leaving it.
func (p *place) openBelow(path string, flags int) (*os.File, error) {
	if path == "" {
		path = "."
	}

	for {
		fd, err := unix.Openat2(int(p.root.Fd()), path, &unix.OpenHow{
			Flags:   uint64(flags | unix.O_CLOEXEC | unix.O_NOFOLLOW | unix.O_NONBLOCK),
			Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_XDEV,
		})
		if err == nil {
			return os.NewFile(uintptr(fd), path), nil
		}
		if !errors.Is(err, unix.EINTR) && !errors.Is(err, unix.EAGAIN) {
			return nil, err
		}
	}
}

func join(dir, rel string) string {
	if dir == "" || rel == "" {
		return dir + rel
	}
	return dir + "/" + rel
}

// late reports whether the time is over, and remembers that not all was done.
func (t *trees) late(deadline time.Time) bool {
	if time.Now().Before(deadline) {
		return false
	}
	t.c.Complete = false
	return true
}

// listDirectories finds the directories that may be copies: all, to some depth. What is gone
// or cannot be read in the meantime is left out.
func (t *trees) listDirectories(ctx context.Context, deadline time.Time) error {
	var queue []*tree
	for _, p := range t.places {
		queue = append(queue, &tree{place: p})
	}

	for len(queue) > 0 {
		if err := ctx.Err(); err != nil {
			return errs.Wrap("doctor", "", err)
		}

		if t.late(deadline) {
			return nil
		}

		if len(t.all) >= maxTrees {
			t.c.Complete = false
			return nil
		}

		d := queue[0]
		queue = queue[1:]
		f, err := d.place.openBelow(d.path, unix.O_RDONLY|unix.O_DIRECTORY)
		if err != nil {
			continue
		}

		entries, err := treewalk.ReadDirents(f)
		var stx unix.Statx_t
		if unix.Statx(int(f.Fd()), "", unix.AT_EMPTY_PATH, unix.STATX_BTIME, &stx) == nil && stx.Mask&unix.STATX_BTIME != 0 {
			d.born = stx.Btime.Sec*1e9 + int64(stx.Btime.Nsec)
		}

		f.Close()
		if err != nil || len(entries) == 0 {
			continue
		}

		t.c.Directories++
		t.tracker.Add(1, 0)
		d.names = len(entries)
		for i := range d.mins {
			d.mins[i] = ^uint64(0)
		}

		for _, e := range entries {
			h := maphash.String(t.seed, e.Name)
			for i := range d.mins {
				d.mins[i] = min(d.mins[i], mix(h+uint64(i)*0x9e3779b97f4a7c15))
			}
			if e.Type == unix.DT_DIR && d.depth < treeDepth {
				queue = append(queue, &tree{place: d.place, path: join(d.path, e.Name), depth: d.depth + 1})
			}
		}

		t.all = append(t.all, d)
	}

	return nil
}

// mix makes one hash of another (the end of splitmix64).
func mix(z uint64) uint64 {
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}

// pair is two trees whose roots list much the same names: with half of the names
// in common the chance of being one is 15 of 16.
type pair struct{ original, copied *tree }

// candidates are pairs that may be copies. Those of the oldest original come first:
// what was copied is older than its copies, which also resemble each other; and
// a directory is older than what is in it, which need not be looked at if the
// directory was copied as a whole.
func (t *trees) candidates() []pair {
	slices.SortStableFunc(t.all, func(a, b *tree) int { return cmp.Compare(a.born, b.born) })
	type band struct {
		i int
		h uint64
	}
	first := map[band][]*tree{}
	var out []pair
	for _, d := range t.all {
		tried := map[*tree]bool{}
		for i, h := range d.mins {
			b := band{i, h}
			for _, o := range first[b] {
				if !tried[o] {
					tried[o] = true
					out = append(out, pair{o, d})
				}
			}
			if len(first[b]) < 3 { // more originals of one shape are not tried
				first[b] = append(first[b], d)
			}
		}
	}

	slices.SortStableFunc(out, func(a, b pair) int {
		return cmp.Or(cmp.Compare(a.original.born, b.original.born),
			cmp.Compare(max(a.original.depth, a.copied.depth), max(b.original.depth, b.copied.depth)))
	})
	return out
}

// within reports whether a is b or lies in it.
func within(a, b *tree) bool {
	return a.place == b.place && (a.path == b.path || b.path == "" || strings.HasPrefix(a.path, b.path+"/"))
}

// claims are trees that are originals or copies: what lies in them is accounted
// for. Paths are those from a place.
type claims map[*place]map[string]bool

func (c claims) add(t *tree) {
	if c[t.place] == nil {
		c[t.place] = map[string]bool{}
	}
	c[t.place][t.path] = true
}

// parent is "" for what lies in the root.
func parent(path string) string { return path[:max(strings.LastIndexByte(path, '/'), 0)] }

// cover reports whether t lies in a tree that was claimed.
func (c claims) cover(t *tree) bool {
	for path := t.path; path != ""; {
		path = parent(path)
		if c[t.place][path] {
			return true
		}
	}
	return false
}

// fileID tells files apart.
type fileID struct{ dev, ino uint64 }

// classes are sets of files that are copies of one another: of each, all but one
// are duplicates, whichever pairs of trees they were found in.
type classes map[fileID]fileID

func (c classes) find(f fileID) fileID {
	for {
		up, ok := c[f]
		if !ok {
			return f
		}
		if upper, ok := c[up]; ok {
			c[f] = upper
		}
		f = up
	}
}

// join makes one class of two, and reports whether they were two.
func (c classes) join(a, b fileID) bool {
	a, b = c.find(a), c.find(b)
	if a == b {
		return false
	}
	c[b] = a
	return true
}

func (t *trees) comparePairs(ctx context.Context, deadline time.Time) error {
	groups := map[*tree]*TreeCopies{}
	var order []*tree
	claimed := claims{}
	pairs := t.candidates()
	for i, p := range pairs {
		if err := ctx.Err(); err != nil {
			return errs.Wrap("doctor", "", err)
		}

		// An original may have more copies; a copy is not compared again.
		if p.original.of != nil || p.copied.of != nil || within(p.copied, p.original) || within(p.original, p.copied) ||
			claimed.cover(p.copied) || claimed.cover(p.original) {
			continue
		}

		if t.late(deadline) {
			break
		}

		// All get a share of the time that is left, so that no large tree takes it.
		slice := min(time.Until(deadline), max(time.Until(deadline)/time.Duration(len(pairs)-i)*4, 500*time.Millisecond))
		r := t.comparePair(ctx, p, time.Now().Add(slice))
		if r == nil {
			continue
		}

		p.copied.of = p.original
		claimed.add(p.copied)
		claimed.add(p.original)
		g := groups[p.original]
		if g == nil {
			g = &TreeCopies{Original: p.original.String()}
			groups[p.original] = g
			order = append(order, p.original)
		}

		g.Copies = append(g.Copies, *r)
	}

	for _, o := range order {
		t.c.Trees = append(t.c.Trees, *groups[o])
	}

	slices.SortStableFunc(t.c.Trees, func(a, b TreeCopies) int { return cmp.Compare(b.bytes(), a.bytes()) })
	return nil
}

func (g TreeCopies) bytes() (n int64) {
	for _, c := range g.Copies {
		n += c.CopiedBytes
	}
	return n
}

// comparePair walks two trees at once; nil if one is no copy of the other. Only if
// it is, do the files count that were found equal, each once, and are they offered
// for sampling.
func (t *trees) comparePair(ctx context.Context, p pair, deadline time.Time) *TreeCopy {
	r := &TreeCopy{Path: p.copied.String(), Complete: true, inside: p.copied.place.inside || p.original.place.inside}
	var found []match
	var weights []int64
	linked := map[uint64]bool{}
	stack := []string{""}
	for len(stack) > 0 {
		if time.Now().After(deadline) || ctx.Err() != nil {
			r.Complete, t.c.Complete = false, false
			break
		}

		rel := stack[len(stack)-1]
		stack = stack[:len(stack)-1]
		a, err := p.original.place.openBelow(join(p.original.path, rel), unix.O_RDONLY|unix.O_DIRECTORY)
		if err != nil {
			continue // it has no such directory
		}

		b, err := p.copied.place.openBelow(join(p.copied.path, rel), unix.O_RDONLY|unix.O_DIRECTORY)
		if err != nil {
			a.Close()
			continue
		}

		entries, err := treewalk.ReadDirents(b)
		if err != nil {
			r.Complete, t.c.Complete = false, false
		}

		for _, e := range entries {
			if e.Type == unix.DT_DIR {
				stack = append(stack, join(rel, e.Name))
			}
			if e.Type != unix.DT_REG {
				continue
			}

			var x, y unix.Stat_t
			if unix.Fstatat(int(b.Fd()), e.Name, &y, unix.AT_SYMLINK_NOFOLLOW) != nil || y.Mode&unix.S_IFMT != unix.S_IFREG {
				continue
			}

			if y.Nlink > 1 {
				if linked[y.Ino] {
					continue
				}
				linked[y.Ino] = true
			}

			r.Files++
			t.c.Files++
			t.tracker.Add(1, y.Blocks*512)
			if unix.Fstatat(int(a.Fd()), e.Name, &x, unix.AT_SYMLINK_NOFOLLOW) != nil || x.Mode&unix.S_IFMT != unix.S_IFREG ||
				!sameFile(&x, &y) {
				continue
			}

			r.CopiedFiles++
			n := min(x.Blocks, y.Blocks) * 512
			r.CopiedBytes += n
			path := join(rel, e.Name)
			found = append(found, match{p.original.place, p.copied.place, join(p.original.path, path), join(p.copied.path, path),
				y.Size,
				fileID{x.Dev, x.Ino}, fileID{y.Dev, y.Ino}})
			weights = append(weights, n)
		}

		a.Close()
		b.Close()
		if r.Files >= giveUpAfter && r.CopiedFiles*4 < r.Files {
			return nil
		}
	}

	if r.CopiedFiles*2 < r.Files || r.CopiedBytes == 0 {
		return nil
	}

	news := false
	for i, m := range found {
		if !t.same.join(m.originalID, m.copiedID) {
			continue
		}
		news = true
		t.draw.offer(m, weights[i])
		if r.inside {
			t.c.InsideBytes += weights[i]
		} else {
			t.c.CopiedBytes += weights[i]
		}
	}

	if !news {
		return nil // both resemble what was found before
	}

	return r
}

// sameFile reports whether one is a copy of the other, by what a copy keeps. Some
// tools keep seconds only.
func sameFile(x, y *unix.Stat_t) bool {
	return (x.Dev != y.Dev || x.Ino != y.Ino) && x.Size == y.Size && x.Mtim.Sec == y.Mtim.Sec &&
		(x.Mtim.Nsec == y.Mtim.Nsec || x.Mtim.Nsec == 0 || y.Mtim.Nsec == 0)
}

// compareSample reads blocks of files that are said to be copies, and compares.
func (t *trees) compareSample(ctx context.Context, deadline time.Time) error {
	rand.Shuffle(len(t.draw.kept), func(i, j int) { t.draw.kept[i], t.draw.kept[j] = t.draw.kept[j], t.draw.kept[i] })
	x, y := make([]byte, sampleBytes), make([]byte, sampleBytes)
	for _, m := range t.draw.kept {
		if err := ctx.Err(); err != nil {
			return errs.Wrap("doctor", "", err)
		}

		if t.late(deadline) {
			return nil
		}

		at := rand.Int64N(max((m.size+sampleBytes-1)/sampleBytes, 1)) * sampleBytes
		a, err1 := m.original.readAt(m.originalPath, x, at)
		b, err2 := m.copied.readAt(m.copiedPath, y, at)
		if err1 != nil || err2 != nil {
			continue // it has been removed
		}

		t.c.Sampled++
		if bytes.Equal(a, b) {
			t.c.SampledEqual++
		}
	}

	return nil
}

func (p *place) readAt(path string, buf []byte, at int64) ([]byte, error) {
	f, err := p.openBelow(path, unix.O_RDONLY)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	n, err := f.ReadAt(buf, at)
	if n == 0 && err != nil {
		return nil, err
	}
	return buf[:n], nil
}
