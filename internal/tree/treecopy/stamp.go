package treecopy

import (
	"context"
	"encoding/binary"
	"hash/maphash"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Stamp is a digest of the state of a tree, based on stat(2): if two stamps are
// equal, nothing was written in between. It contains one
// number for each directory, so it takes some 40 bytes of memory a directory,
// however many files there are. It is valid only within this process.
//
// It relies mostly on ctime, which nobody can set. Three kinds of changes can
// escape it:
//
//   - Two changes within one tick of the kernel's clock (1-10 ms) have the same
//     ctime. So taking a stamp ends at least one tick after its last stat:
//     if a file is changed in the same tick in which the stamp saw it, a copy made later
//     reads it after that change.
//   - Writing through a shared mapping changes ctime only on the first write to
//     a page since its last writeback. So taking a stamp begins
//     with a syncfs of the tree's filesystem. That does not help on filesystems without
//     writeback (tmpfs), nor on filesystems mounted below.
//   - A filesystem that stores whole seconds (FAT, ext3, NFS from such a server)
//     hides two changes within one second.
type Stamp struct {
	dirs  map[uint64]uint64 // digests of directories by the key of their path
	ctime unix.Timespec     // of the root
	moved bool              // ignore the root's ctime
	began time.Time
	*dirtySet
}

// Changed returns the number of directories that differ from the previous stamp, each
// with the files directly in it: 0 if nothing has changed.
func (s *Stamp) Changed() int64 { return s.n }

// has reports whether the tree has a directory with this key.
func (s *Stamp) has(key uint64) bool { _, ok := s.dirs[key]; return ok }

// Moved returns a copy of s for comparisons after the root directory was renamed, which
// changes its ctime. Comparisons with the copy miss changes of the root's attributes.
func (s *Stamp) Moved() *Stamp {
	c := *s
	c.moved = true
	return &c
}

// TakeStamp walks src as Measure does, and returns its Totals and a Stamp.
// If before is not nil, the Stamp also contains what has changed since. Changes
// during the walk are not errors: they count as changed in this and in the
// next comparison.
func TakeStamp(ctx context.Context, src string, before *Stamp, opt Options) (*Stamp, Totals, error) {
	s := &stamper{before: before, stamp: &Stamp{dirs: make(map[uint64]uint64), dirtySet: newDirtySet(), began: time.Now()}}
	if f, err := os.Open(src); err == nil {
		_ = unix.Syncfs(int(f.Fd())) // if the disk fails, the walk reports it
		f.Close()
	}
	n, err := measure(ctx, src, opt, s)
	if err != nil {
		return nil, n, err
	}
	return s.stamp, n, awaitTick(ctx)
}

// awaitTick waits until files that change get a later time than now.
func awaitTick(ctx context.Context) error {
	tick := func() int64 {
		var t unix.Timespec
		if unix.ClockGettime(unix.CLOCK_REALTIME_COARSE, &t) != nil {
			return time.Now().UnixNano()
		}
		return t.Nano()
	}

	for start := tick(); tick() == start; {
		if err := ctx.Err(); err != nil {
			return err
		}
		time.Sleep(time.Millisecond)
	}

	return nil
}

// dirtySet is a set of directories that have to be copied again.
type dirtySet struct {
	mu    sync.Mutex
	dirty map[uint64]struct{} // by key
	way   map[uint64]struct{} // the directories above them
	paths []string            // of some of them
	n     int64
}

func newDirtySet() *dirtySet {
	return &dirtySet{dirty: make(map[uint64]struct{}), way: make(map[uint64]struct{})}
}

const maxPaths = 64 // number of paths that a dirtySet keeps

func (s *dirtySet) addDir(d *dir) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.dirty[d.key]; ok {
		return
	}

	s.dirty[d.key] = struct{}{}
	s.n++
	if len(s.paths) < maxPaths {
		s.paths = append(s.paths, d.path())
	}

	for p := d.parent; p != nil; p = p.parent {
		s.way[p.key] = struct{}{}
	}
}

func (s *dirtySet) merge(o *dirtySet) {
	for k := range o.dirty {
		if _, ok := s.dirty[k]; !ok {
			s.dirty[k] = struct{}{}
			s.n++
		}
	}

	for k := range o.way {
		s.way[k] = struct{}{}
	}

	s.paths = append(s.paths, o.paths...)
	slices.Sort(s.paths)
	s.paths = slices.Compact(s.paths)
}

// sparing makes the walk add changed directories to s, unless s is nil, instead of failing.
func (t *walk) sparing(s *dirtySet) *walk {
	if s != nil {
		t.spare = s.addDir
	}
	return t
}

// Paths returns up to limit paths that have changed since the stamp before: of
// files, or of a directory if none of its files is younger than that stamp.
func (s *Stamp) Paths(before *Stamp, limit int) []string {
	// File times are those of the last tick.
	since := before.began.Add(-20 * time.Millisecond)
	var out []string
	dirs := slices.Clone(s.paths)
	slices.Sort(dirs)
	for _, dir := range dirs {
		if len(out) >= limit {
			break
		}
		if found := youngerThan(dir, since, limit-len(out)); len(found) > 0 {
			out = append(out, found...)
		} else {
			out = append(out, dir)
		}
	}

	for i := range out {
		out[i] = quote(out[i])
	}

	return out
}

// youngerThan returns the paths of up to limit files in dir that have changed since then.
func youngerThan(dir string, since time.Time, limit int) []string {
	f, err := os.Open(dir)
	if err != nil {
		return nil
	}

	defer f.Close()
	var out []string
	for {
		names, err := f.Readdirnames(1024)
		slices.Sort(names)
		for _, n := range names {
			var st unix.Stat_t
			path := filepath.Join(dir, n)
			if unix.Lstat(path, &st) == nil && st.Mode&unix.S_IFMT != unix.S_IFDIR && !time.Unix(st.Ctim.Unix()).Before(since) {
				if out = append(out, path); len(out) >= limit {
					return out
				}
			}
		}
		if err != nil {
			return out
		}
	}
}

var stampSeed = maphash.MakeSeed()

const rootKey = 1

// childKey returns the key of the directory name in d. The probability that any two of a million paths have
// the same key is about one in ten million.
func childKey(d *dir, name string) uint64 {
	var h maphash.Hash
	h.SetSeed(stampSeed)
	var b [8]byte
	binary.NativeEndian.PutUint64(b[:], d.key)
	_, _ = h.Write(b[:])
	_, _ = h.WriteString(name)
	return h.Sum64()
}

// stamper takes a stamp during the walk of a measurer. A nil stamper does nothing. The
// digest of a directory is the sum of the digests of its entries, which does not depend on their
// order, mixed with its own attributes.
type stamper struct {
	before *Stamp
	mu     sync.Mutex
	stamp  *Stamp
}

func (w *worker) digest(name string, words ...uint64) uint64 {
	w.hash = w.hash[:0]
	for _, x := range words {
		w.hash = binary.NativeEndian.AppendUint64(w.hash, x)
	}
	w.hash = append(w.hash, name...)
	return maphash.Bytes(stampSeed, w.hash)
}

func (s *stamper) file(w *worker, d *dir, name string, st *unix.Stat_t) {
	if s == nil {
		return
	}
	d.sum.Add(w.digest(name, uint64(st.Dev), st.Ino, uint64(st.Mode), uint64(st.Nlink), uint64(st.Uid)<<32|uint64(st.Gid),
		uint64(st.Rdev), uint64(st.Size), uint64(st.Mtim.Nano()), uint64(st.Ctim.Nano())))
}

// subdir adds the existence of d to the digest of its parent. The state of d is in its own digest.
func (s *stamper) subdir(w *worker, d *dir) {
	if s == nil {
		return
	}
	kernel := uint64(0)
	if d.kernel {
		kernel = 1
	}
	d.parent.sum.Add(w.digest(d.name, d.id.Dev, d.id.Ino, kernel))
}

// leave completes the digest of d and compares it with the previous stamp.
func (s *stamper) leave(w *worker, d *dir) {
	if s == nil {
		return
	}

	// Compute the digest.
	ctime := uint64(d.ctime.Nano())
	if d.parent == nil || d.kernel {
		// The root's ctime is compared separately below. That of /proc and the like changes on its own.
		ctime = 0
	}

	mtime := uint64(d.mtime.Nano())
	if d.kernel {
		mtime = 0
	}

	sum := w.digest("", d.sum.Load(), d.id.Dev, d.id.Ino, uint64(d.mode), uint64(d.uid)<<32|uint64(d.gid), mtime, ctime)
	changed := d.torn.Load()
	s.mu.Lock()
	defer s.mu.Unlock()

	if !changed { // without a digest, it counts as changed in the next stamp as well
		s.stamp.dirs[d.key] = sum
	}

	// Compare it.
	if d.parent == nil {
		s.stamp.ctime = d.ctime
		if b := s.before; b != nil && !b.moved && b.ctime != d.ctime {
			changed = true
		}
	}

	if b := s.before; b != nil && !changed {
		was, ok := b.dirs[d.key]
		changed = !ok || was != sum
	}

	if s.before != nil && changed {
		s.stamp.addDir(d)
	}
}
