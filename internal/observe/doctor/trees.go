package doctor

import (
	"bytes"
	"cmp"
	"context"
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
	treeDepth     = 4       // directories below a mount point at which a tree may begin
	maxTrees      = 100_000 // in memory
	maxPlacesOpen = 2000    // filesystems: each needs two descriptors
	minHashes     = 4       // of the names in a tree's root
	giveUpAfter   = 200     // files: a tree of which so many were compared and few agree is not a copy
	sampleFiles   = 128
	sampleBytes   = 128 << 10
)

// place is a filesystem in which findCopies looks for trees. It is open by a read-only mount of our own, so that
// reading changes nothing, not even access times.
type place struct {
	path   string // mount point
	inside bool   // the filesystem is inside a volume
	mount  *mount.Detached
	root   *os.File
}

// tree is a directory that may be a copy of another, or have copies.
type tree struct {
	place *place
	path  string // relative to the place; "" is its root
	depth int
	born  int64 // time of creation in ns; 0 if it is unknown
	mins  [minHashes]uint64
	names int
	of    *tree // the original, if it is a copy
}

// String returns the path for people.
func (t *tree) String() string { return filepath.Join(t.place.path, t.path) }

// match is a file that is a copy of another.
type match struct {
	original, copied *place
	originalPath     string
	copiedPath       string
	size             int64
	originalID       fileID
	copiedID         fileID
	bytes            int64 // on disk, of the smaller of both
}

// trees finds and compares trees, and adds what it finds to c.
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

// close unmounts the places.
func (t *trees) close() {
	for _, p := range t.places {
		p.close()
	}
}

// openPlaces opens the mounted filesystems among datasets, and the mounted filesystems inside volumes among them. It
// skips clones, which share with their origin already, without the dedup table.
func (t *trees) openPlaces(datasets []Dataset, deadline time.Time) {
	mounts, err := readMounts()
	if err != nil {
		t.c.skip("all filesystems: " + err.Error())
		return
	}

	// Open each filesystem.
	clones, unmounted, late := 0, 0, 0
	for _, d := range datasets {
		if d.Origin != "" {
			clones++
			continue
		}

		m := mounts.of(d)
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

	// Record the others.
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

// datasetMounts has the mounts of whole filesystems, by dataset and by device number.
type datasetMounts struct {
	bySource map[string]mount.Entry
	byDevice map[uint64]mount.Entry
}

// readMounts reads the mount table of this process.
func readMounts() (datasetMounts, error) {
	d := datasetMounts{map[string]mount.Entry{}, map[uint64]mount.Entry{}}
	table, err := mount.Table("self")
	for _, m := range table {
		switch {
		case m.Root != "/":
		case m.FSType == "zfs":
			d.bySource[m.Source] = m
		default:
			d.byDevice[m.Dev] = m
		}
	}
	return d, err
}

// of returns the mount of a dataset, or of the filesystem inside a volume; zero if it is not mounted.
func (m datasetMounts) of(d Dataset) mount.Entry {
	if d.Type == "volume" {
		return m.byDevice[deviceNumber(d.Name)]
	}
	return m.bySource[d.Name]
}

// openPlace opens the filesystem that is mounted at point. It returns InUse if that is not the filesystem with the
// given device number, because another one covers it; 0 accepts any.
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
	_ = p.mount.Close() // the mount was never attached, so its end loses nothing
}

// deviceNumber returns the device number of a volume's block device; 0 if it has none.
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

// openBelow opens a file or directory in a place. It follows no symbolic links and does not leave the place.
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
		if !errs.IsAny(err, unix.EINTR, unix.EAGAIN) {
			return nil, err
		}
	}
}

// join joins two relative paths, of which either may be "".
func join(dir, rel string) string {
	if dir == "" || rel == "" {
		return dir + rel
	}
	return dir + "/" + rel
}

// late reports whether the deadline has passed, and records that the search is incomplete.
func (t *trees) late(deadline time.Time) bool {
	if time.Now().Before(deadline) {
		return false
	}
	t.c.Complete = false
	return true
}

// listDirectories lists the directories of all places down to treeDepth: each may be a copy. It skips directories that
// were removed in the meantime or cannot be read.
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

		// Read the next directory, and when it was created.
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

		// Add it, and queue its subdirectories.
		t.c.Directories++
		t.tracker.Add(1, 0)
		d.sign(t.seed, entries)
		t.all = append(t.all, d)
		for _, e := range entries {
			if e.Type == unix.DT_DIR && d.depth < treeDepth {
				queue = append(queue, &tree{place: d.place, path: join(d.path, e.Name), depth: d.depth + 1})
			}
		}
	}

	return nil
}

// sign computes the MinHash signature of the names in a tree's root: trees with the same names have the same, and trees
// with many names in common probably share a part of it.
func (t *tree) sign(seed maphash.Seed, entries []treewalk.Dirent) {
	t.names = len(entries)
	for i := range t.mins {
		t.mins[i] = ^uint64(0)
	}
	for _, e := range entries {
		h := maphash.String(seed, e.Name)
		for i := range t.mins {
			t.mins[i] = min(t.mins[i], mix(h+uint64(i)*0x9e3779b97f4a7c15))
		}
	}
}

// mix derives one hash from another (the end of splitmix64).
func mix(z uint64) uint64 {
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}

// pair is two trees with mostly the same names in their roots: trees with half of the names in common become a pair
// with a probability of 15/16.
type pair struct{ original, copied *tree }

// candidates returns the pairs of trees that may be copies, those of the oldest original first. An original is older
// than its copies, which also resemble each other; and a directory is older than those in it, which need not be
// compared if the directory was copied as a whole.
func (t *trees) candidates() []pair {
	slices.SortStableFunc(t.all, func(a, b *tree) int { return cmp.Compare(a.born, b.born) })
	type band struct {
		i int
		h uint64
	}

	// Pair each tree with older ones that share a hash.
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
			if len(first[b]) < 3 { // at most 3 originals with the same hash
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

// within reports whether a is b, or lies in b.
func within(a, b *tree) bool {
	return a.place == b.place && (a.path == b.path || b.path == "" || strings.HasPrefix(a.path, b.path+"/"))
}

// claims holds the trees that are originals or copies, by place and relative path. What lies in them is accounted for.
type claims map[*place]map[string]bool

func (c claims) add(t *tree) {
	if c[t.place] == nil {
		c[t.place] = map[string]bool{}
	}
	c[t.place][t.path] = true
}

// parent returns the path without its last part; "" for an entry of the root.
func parent(path string) string { return path[:max(strings.LastIndexByte(path, '/'), 0)] }

// cover reports whether t lies in a claimed tree.
func (c claims) cover(t *tree) bool {
	for path := t.path; path != ""; {
		path = parent(path)
		if c[t.place][path] {
			return true
		}
	}
	return false
}

// fileID identifies a file.
type fileID struct{ dev, ino uint64 }

// classes holds sets of files that are copies of one another (a union-find structure): all but one of each set are
// duplicates, whichever pairs of trees they were found in.
type classes map[fileID]fileID

// find returns the representative of the set of f.
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

// join merges the sets of two files, and reports whether they were different.
func (c classes) join(a, b fileID) bool {
	a, b = c.find(a), c.find(b)
	if a == b {
		return false
	}
	c[b] = a
	return true
}

// comparePairs compares the candidates and adds the copies to t.c.Trees, those with most bytes first.
func (t *trees) comparePairs(ctx context.Context, deadline time.Time) error {
	groups := map[*tree]*TreeCopies{}
	var order []*tree
	claimed := claims{}
	pairs := t.candidates()
	for i, p := range pairs {
		if err := ctx.Err(); err != nil {
			return errs.Wrap("doctor", "", err)
		}

		// Skip what is accounted for. An original may have more copies, but a copy is not compared again.
		if p.original.of != nil || p.copied.of != nil || within(p.copied, p.original) || within(p.original, p.copied) ||
			claimed.cover(p.copied) || claimed.cover(p.original) {
			continue
		}

		if t.late(deadline) {
			break
		}

		// Give each pair a share of the remaining time, so that a large tree does not use it up.
		slice := min(time.Until(deadline), max(time.Until(deadline)/time.Duration(len(pairs)-i)*4, 500*time.Millisecond))
		r := t.comparePair(ctx, p, time.Now().Add(slice))
		if r == nil {
			continue
		}

		// Record the copy.
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

// bytes returns the size of all copies on disk.
func (g TreeCopies) bytes() (n int64) {
	for _, c := range g.Copies {
		n += c.CopiedBytes
	}
	return n
}

// comparePair walks two trees at once. It returns nil if one is not a copy of the other, or if both only repeat copies
// that were found before. Otherwise it counts the files that are copies, each once, and offers them for sampling.
func (t *trees) comparePair(ctx context.Context, p pair, deadline time.Time) *TreeCopy {
	r := &TreeCopy{Path: p.copied.String(), Complete: true, inside: p.copied.place.inside || p.original.place.inside}
	w := pairWalk{trees: t, pair: p, copy: r, linked: map[uint64]bool{}, todo: []string{""}}
	for len(w.todo) > 0 {
		if time.Now().After(deadline) || ctx.Err() != nil {
			r.Complete, t.c.Complete = false, false
			break
		}

		rel := w.todo[len(w.todo)-1]
		w.todo = w.todo[:len(w.todo)-1]
		w.compareDirectory(rel)
		if r.Files >= giveUpAfter && r.CopiedFiles*4 < r.Files {
			return nil
		}
	}

	if r.CopiedFiles*2 < r.Files || r.CopiedBytes == 0 {
		return nil
	}

	// Count the files that are not known as copies yet.
	news := false
	for _, m := range w.found {
		if !t.same.join(m.originalID, m.copiedID) {
			continue
		}
		news = true
		t.draw.offer(m)
		if r.inside {
			t.c.InsideBytes += m.bytes
		} else {
			t.c.CopiedBytes += m.bytes
		}
	}

	if !news {
		return nil
	}

	return r
}

// pairWalk is the walk of comparePair through two trees.
type pairWalk struct {
	*trees
	pair
	copy   *TreeCopy
	found  []match
	linked map[uint64]bool // inodes with several links, which count once
	todo   []string        // directories, relative to the trees
}

// compareDirectory compares the files of a directory with those of the same directory in the original, and adds its
// subdirectories to todo. It skips directories that only one tree has.
func (w *pairWalk) compareDirectory(rel string) {
	original, err := w.original.place.openBelow(join(w.original.path, rel), unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return
	}

	defer original.Close()
	copied, err := w.copied.place.openBelow(join(w.copied.path, rel), unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return
	}

	defer copied.Close()
	entries, err := treewalk.ReadDirents(copied)
	if err != nil {
		w.copy.Complete, w.c.Complete = false, false
	}

	for _, e := range entries {
		switch e.Type {
		case unix.DT_DIR:
			w.todo = append(w.todo, join(rel, e.Name))
		case unix.DT_REG:
			w.compareFile(original, copied, rel, e.Name)
		}
	}
}

// compareFile counts a file, and notes it as found if it is a copy of the file with the same name in the original.
func (w *pairWalk) compareFile(original, copied *os.File, dir, name string) {
	var x, y unix.Stat_t
	if unix.Fstatat(int(copied.Fd()), name, &y, unix.AT_SYMLINK_NOFOLLOW) != nil || y.Mode&unix.S_IFMT != unix.S_IFREG {
		return
	}

	if y.Nlink > 1 {
		if w.linked[y.Ino] {
			return
		}
		w.linked[y.Ino] = true
	}

	// Compare it with the original.
	w.copy.Files++
	w.c.Files++
	w.tracker.Add(1, y.Blocks*512)
	if unix.Fstatat(int(original.Fd()), name, &x, unix.AT_SYMLINK_NOFOLLOW) != nil ||
		x.Mode&unix.S_IFMT != unix.S_IFREG || !sameFile(&x, &y) {
		return
	}

	// Note the copy.
	n := min(x.Blocks, y.Blocks) * 512
	w.copy.CopiedFiles++
	w.copy.CopiedBytes += n
	path := join(dir, name)
	w.found = append(w.found, match{
		original: w.original.place, originalPath: join(w.original.path, path), originalID: fileID{x.Dev, x.Ino},
		copied: w.copied.place, copiedPath: join(w.copied.path, path), copiedID: fileID{y.Dev, y.Ino},
		size: y.Size, bytes: n,
	})
}

// sameFile reports whether one file is a copy of the other, by what tools keep when they copy: size and time of
// modification, of which some keep only the seconds.
func sameFile(x, y *unix.Stat_t) bool {
	return (x.Dev != y.Dev || x.Ino != y.Ino) && x.Size == y.Size && x.Mtim.Sec == y.Mtim.Sec &&
		(x.Mtim.Nsec == y.Mtim.Nsec || x.Mtim.Nsec == 0 || y.Mtim.Nsec == 0)
}

// compareSample reads a random block of each sampled pair of files, and counts those that are equal.
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
			continue // a file was removed
		}

		t.c.Sampled++
		if bytes.Equal(a, b) {
			t.c.SampledEqual++
		}
	}

	return nil
}

// readAt reads from a file of the place into buf, and returns what was read, which is shorter at the end of the file.
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
