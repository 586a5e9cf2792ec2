package catalog

import (
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
)

// TestSeenOwner: in a user's pool the user owns the file, even if root writes it first.
func TestSeenOwner(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: only root gives files to others: run the tests as root")
	}
	dir := t.TempDir()
	if err := os.Chown(dir, 1234, 5678); err != nil {
		t.Fatal(err)
	}
	s := seenOf(dir)
	s.recordCommits(7)
	st, err := os.Lstat(s.path)
	if err != nil {
		t.Fatal(err)
	}
	if o := st.Sys().(*syscall.Stat_t); o.Uid != 1234 || o.Gid != 5678 || st.Mode() != 0o600 {
		t.Errorf("%d:%d %v", o.Uid, o.Gid, st.Mode())
	}
	if n := s.readCommits(); n != 7 {
		t.Errorf("it says %d", n)
	}
}

// TestSeenManyWriters: whoever is slower does not put an older count back.
func TestSeenManyWriters(t *testing.T) {
	s := seenOf(t.TempDir())
	s.recordCommits(1)
	var all sync.WaitGroup
	for n := range int64(200) {
		all.Go(func() { s.recordCommits(n + 1) })
	}
	all.Wait()
	if n := s.readCommits(); n != 200 {
		t.Errorf("it says %d", n)
	}
}

func TestLostErrorCounts(t *testing.T) {
	for n, want := range map[int64]string{1: "its last change, which was on disk",
		2: "its last 2 changes, which were on disk"} {
		if err := (&Catalog{lost: n}).LostError(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%d: %v", n, err)
		}
	}
}
