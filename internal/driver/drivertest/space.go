package drivertest

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/driver"

	"golang.org/x/sys/unix"
)

// slack is what a test allows for bookkeeping besides data: headers of slots,
// blocks of directories, rounding.
const slack = 512 << 10

// usage measures an object and checks what always holds.
func (s *suite) usage(id driver.ObjectID) driver.Usage {
	s.t.Helper()
	u, err := s.d.Usage(s.ctx(), id)
	if err != nil {
		s.t.Fatalf("usage: %v", err)
	}
	if u.LogicalBytes != u.ExclusiveBytes+u.SharedBytes || u.ExclusiveBytes < 0 || u.SharedBytes < 0 || u.Extents < 0 {
		s.t.Errorf("usage %+v: want logical = exclusive + shared, none negative", u)
	}
	if (u.LogicalBytes == 0) != (u.Extents == 0) {
		s.t.Errorf("usage %+v: bytes and extents disagree", u)
	}

	return u
}

// between checks a number of bytes, allowing for some more.
func (s *suite) between(what string, got, want int64) {
	s.t.Helper()
	if got < want || got > want+slack {
		s.t.Errorf("%s is %d bytes, want %d and at most %d more", what, got, want, slack)
	}
}

func testUsage(t *testing.T, s *suite) {
	const mib = 1 << 20
	vol, m := s.create(s.fast), model{}
	s.between("an empty volume", s.usage(vol).LogicalBytes, 0)
	s.put(vol, m, "a", file{1, 2 * mib})
	s.put(vol, m, "b", file{2, 2 * mib})
	u := s.usage(vol)
	s.between("a volume with 4 MiB", u.LogicalBytes, 4*mib)
	if u.SharedBytes != 0 {
		t.Errorf("a volume that nobody cloned shares %d bytes", u.SharedBytes)
	}
	if u.Extents < 1 || u.Extents > 400 {
		t.Errorf("4 MiB lie in %d extents", u.Extents)
	}

	clone := s.clone(vol)
	second := s.clone(vol)
	cu := s.usage(clone)
	s.between("a fresh clone, logically,", cu.LogicalBytes, 4*mib)

	if s.caps.Sharing {
		if cu.ExclusiveBytes != 0 || cu.SharedBytes != cu.LogicalBytes {
			t.Errorf("usage of a fresh clone is %+v, want all of it shared", cu)
		}
		if u := s.usage(vol); u.ExclusiveBytes != 0 {
			t.Errorf("usage of a volume that was just cloned is %+v, want all of it shared", u)
		}
	}

	cm := m.copy()
	s.put(clone, cm, "c", file{3, 2 * mib}) // new
	s.put(clone, cm, "b", file{4, 2 * mib}) // in the place of the old
	cu = s.usage(clone)
	s.between("a clone that grew to 6 MiB", cu.LogicalBytes, 6*mib)
	if s.caps.Sharing {
		s.between("what a clone has written", cu.ExclusiveBytes, 4*mib)
		s.between("what a clone has left as it was", cu.SharedBytes, 2*mib)
	}

	s.destroy(second)
	s.destroy(vol)

	if s.caps.Sharing {
		// Space may return later: until then it counts as shared.
		s.eventually("after destroying all others, a clone still shares data", func() bool {
			s.sync()
			cu = s.usage(clone)
			return cu.SharedBytes == 0
		})
	}

	s.between("the last clone", cu.LogicalBytes, 6*mib)
	s.check("the last clone", clone, cm)
}

// eventually waits for what the contract allows to come later.
func (s *suite) eventually(what string, ok func() bool) {
	s.t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for !ok() {
		if time.Now().After(deadline) {
			s.t.Errorf("%s after 20 s", what)
			return
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// free is the free space of the pool's filesystem, bytes, once it has come to
// rest: what was destroyed before may still be returning.
func (s *suite) free() int64 {
	s.t.Helper()
	for last, same := int64(-1), 0; ; {
		s.sync()
		now, err := s.freeNow()
		if err != nil {
			s.t.Fatal(err)
		}
		if now != last {
			last, same = now, 0
		} else if same++; same == 5 {
			return now
		}
		time.Sleep(20 * time.Millisecond)
	}
}

func (s *suite) freeNow() (int64, error) {
	if s.target.Free != nil {
		return s.target.Free(s.dir)
	}
	var st unix.Statfs_t
	err := unix.Statfs(s.dir, &st)
	return int64(st.Bfree) * st.Bsize, err
}

// testCloneSpace checks that what clones take does not grow with the data.
func testCloneSpace(t *testing.T, s *suite) {
	if s.caps.CloneCost == driver.CostData {
		t.Skip("clones are copies here")
	}

	const clones = 8
	cost := func(files int) int64 {
		vol, m := s.create(s.fast), model{}
		for i := range files {
			s.put(vol, m, fileNames[i], file{uint64(i), 3 << 20})
		}
		s.clone(vol) // what only the first one costs
		before := s.free()
		for range clones {
			s.clone(vol)
		}
		return before - s.free()
	}

	files := 10
	if s.target.Slow {
		files = 3
	}

	small, large := cost(1), cost(files)
	t.Logf("%d clones took %d bytes for 3 MiB, %d bytes for %d MiB", clones, small, large, 3*files)
	if large > small+4<<20 {
		t.Errorf("%d clones of %d MiB took %d bytes, of 3 MiB %d: that grows with the data", clones, 3*files, large, small)
	}
}

// testFull fills the pool to the last block and tries to make objects.
func testFull(t *testing.T, s *suite) {
	vol, m := s.create(s.fast), model{}
	for i := range 4 {
		s.put(vol, m, fileNames[i], file{uint64(i), 2 << 20})
	}

	s.sync()
	before := s.names()
	fillPool := s.target.Fill
	if fillPool == nil {
		fillPool = fillDir
	}

	empty, err := fillPool(s.dir)
	if err != nil {
		t.Fatal(err)
	}

	// tries makes objects until one fails. Where making them takes little, many
	// may fit into a full pool.
	failures := 0
	tries := func(what string, must bool, op func(id driver.Identity) error) {
		t.Helper()
		var made []driver.ObjectID
		for deadline := time.Now().Add(2500 * time.Millisecond); time.Now().Before(deadline); {
			id := s.identity(driver.Volume, s.fast)
			err := op(id)
			if err == nil {
				made = append(made, id.ID)
				continue
			}
			failures++
			if !errs.Is(err, errs.NoSpace) || errs.HintOf(err) == "" {
				t.Errorf("%s in a full pool: %v of kind %q with hint %q; want no_space and a hint", what, err, errs.KindOf(err),
					errs.HintOf(err))
			}
			break
		}

		if must && len(made) > 0 {
			t.Errorf("%s in a full pool succeeded %d times, although it copies the data", what, len(made))
		}

		t.Logf("%s in a full pool: %d fitted", what, len(made))
		for _, id := range made {
			s.destroy(id)
		}

		s.wantExactly(vol)
		if after := s.namesBut("filler/"); !slices.Equal(after, before) {
			t.Fatalf("after %s in a full pool %s", what, difference(before, after))
		}
	}

	copies := s.caps.CloneCost == driver.CostData
	tries("clone", copies, func(id driver.Identity) error { return s.d.Clone(s.ctx(), vol, id) })
	tries("snapshot", copies, func(id driver.Identity) error { return s.d.Snapshot(s.ctx(), vol, id) })
	tries("create", false, func(id driver.Identity) error { return s.d.Create(s.ctx(), id) })
	if sealer, ok := s.d.(driver.Sealer); ok {
		tries("seal", false, func(id driver.Identity) error { return sealer.Seal(s.ctx(), vol, id, nil) })
	}

	if failures == 0 {
		t.Log("nothing failed: objects take so little here that a full pool has room for them")
	}

	s.check("in a full pool", vol, m)

	if err := empty(); err != nil {
		t.Fatal(err)
	}

	again := s.derived(vol, driver.Volume)
	s.eventually("with the space returned, there is still no room for a clone", func() bool {
		s.sync()
		err := s.d.Clone(s.ctx(), vol, again)
		if err != nil && !errs.Is(err, errs.NoSpace) {
			t.Fatalf("clone when there is space again: %v", err)
		}
		return err == nil
	})

	if !t.Failed() {
		s.check("clone when there is space again", again.ID, m)
		s.check("origin when there is space again", vol, m)
	}
}

// namesBut is names without those that begin with prefix.
func (s *suite) namesBut(prefix string) []string {
	return slices.DeleteFunc(s.names(), func(n string) bool { return strings.HasPrefix(n, prefix) })
}

// fillDir fills the filesystem of a pool's directory.
func fillDir(dir string) (func() error, error) {
	filler := filepath.Join(dir, "filler")
	return func() error { return os.RemoveAll(filler) }, fill(filler)
}

// fillBut makes a file that takes all the space that its filesystem has for data but that many bytes.
func fillBut(path string, free int64) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer f.Close()

	bytes, err := grow(f)
	if err != nil {
		return err
	}
	if err := f.Truncate(bytes - free); err != nil {
		return err
	}
	return unix.Syncfs(int(f.Fd()))
}

// grow allocates all the space that a filesystem has for data to an empty file, and returns how many bytes that are.
func grow(f *os.File) (bytes int64, err error) {
	for size := int64(64 << 20); size >= 4096; {
		err := unix.Fallocate(int(f.Fd()), 0, bytes, size)
		switch {
		case err == nil:
			bytes += size
		case errors.Is(err, unix.ENOSPC):
			size /= 2
		default:
			return bytes, fmt.Errorf("fallocate: %w", err)
		}
	}

	return bytes, nil
}

// fill takes all the space of a filesystem, for data and for metadata, into the
// new directory dir.
func fill(dir string) error {
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}

	f, err := os.Create(filepath.Join(dir, "data"))
	if err != nil {
		return err
	}
	defer f.Close()

	if _, err := grow(f); err != nil {
		return err
	}

	if err := f.Sync(); err != nil && !errors.Is(err, unix.ENOSPC) {
		return err
	}

	// Small files fill what a filesystem keeps apart for metadata. Part of that
	// is only reserved when it says that it is full, and comes back by a sync.
	small := make([]byte, 2000)
	for n, last := 0, -1; n-last > 10; {
		last = n
		for ; n < 100_000; n++ {
			err := os.WriteFile(filepath.Join(dir, fmt.Sprint("small", n)), small, 0o600)
			if errors.Is(err, unix.ENOSPC) {
				break
			}
			if err != nil {
				return err
			}
		}
		if err := unix.Syncfs(int(f.Fd())); err != nil && !errors.Is(err, unix.ENOSPC) {
			return err
		}
	}

	return nil
}
