package catalog

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"

	"pando/internal/base/errs"
	"pando/internal/linux/kernel"

	"golang.org/x/sys/unix"
)

// Operation is one piece of work that marks belong to: one call of a method that changes something, however many of
// them a process makes at once. Its proof of life is its live file, a file in live/ that it holds locked. The kernel
// drops the lock when the process dies, however it dies, and other processes notice that even from another PID
// namespace, where a PID would lie. Two operations of one process exclude each other like those of two processes.
//
// An operation that ends without marks leaves its file, still locked, to the next one of the same process: see idle.
//
// It may be used concurrently.
type Operation struct {
	c       *Catalog
	op      string // name of what is done, for events
	mu      sync.Mutex
	f       *os.File // live file; nil before the first mark, and after the end
	token   string   // name of f; "" once the next operation may use it
	spare   bool     // whether f was made of a spare: see takeSpare
	ended   bool
	marks   int  // marks that were committed and not removed
	running int  // transactions that have not ended
	unsure  bool // whether a transaction failed that may or may not have been committed
}

// Process describes the process that owns a mark, for users.
type Process struct {
	PID    int
	Start  uint64 // clock ticks since boot
	BootID string
}

// Begin begins an operation named op. It costs nothing before its first mark.
func (c *Catalog) Begin(op string) *Operation { return &Operation{c: c, op: op} }

// markOwner is what marks belong to: an operation or an orphan.
type markOwner interface {
	ensureLiveFile() (string, error) // the name of the live file, which is there
	liveFileName() string            // the same, "" if there is none yet
	operation() string               // the name of what is done
}

// markOwnerIn is a markOwner in the pool in dir.
type markOwnerIn struct {
	markOwner
	dir string
}

type markOwnerKey struct{}

// In returns a context whose transactions mark and unmark for the operation.
func (o *Operation) In(ctx context.Context) context.Context {
	return context.WithValue(ctx, markOwnerKey{}, markOwnerIn{o, o.c.dir})
}

func (o *Operation) liveFileName() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.token
}

func (o *Operation) operation() string { return o.op }

// ensureLiveFile returns the name of the live file, making it at first use.
func (o *Operation) ensureLiveFile() (string, error) {
	o.mu.Lock()
	defer o.mu.Unlock()

	if o.ended {
		return "", errs.New(errs.Internal, "mark", "", "the operation has ended")
	}
	if o.f != nil {
		return o.token, nil
	}

	if f := o.c.idle.takeLiveFile(); f != nil {
		o.f, o.token = f, filepath.Base(f.Name())
		return o.token, nil
	}

	live := filepath.Join(o.c.dir, "live")
	for {
		f, err := os.CreateTemp(live, "p-")
		if errs.KindOf(err) == errs.NoSpace {
			return o.spareToken()
		}
		if err != nil {
			return "", errs.Wrap("mark", live, err)
		}

		if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err == nil {
			// Between the two calls a clean-up may have removed the file as a dead process's: then our lock proves nothing.
			same, err := isFile(f)
			if err != nil {
				f.Close()
				return "", errs.Wrap("mark", live, err)
			}
			if same {
				o.f, o.token = f, filepath.Base(f.Name())
				return o.token, nil
			}
		} else if !errors.Is(err, unix.EWOULDBLOCK) {
			f.Close()
			_ = os.Remove(f.Name())
			return "", errs.Wrap("mark", live, err)
		}

		f.Close()
	}
}

// spareToken is ensureLiveFile on a disk without room for another file.
func (o *Operation) spareToken() (string, error) {
	token := fmt.Sprintf("p-%d", rand.Uint64())
	f, err := takeSpare(o.c.dir, token)
	if err != nil {
		return "", err
	}
	o.f, o.token, o.spare = f, token, true
	return token, nil
}

// isFile reports whether an open file is still the one with its name.
func isFile(f *os.File) (bool, error) {
	var mine, there unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &mine); err != nil {
		return false, err
	}
	return unix.Lstat(f.Name(), &there) == nil && there.Dev == mine.Dev && there.Ino == mine.Ino, nil
}

// End ends the operation, once and for all. Marks that are left, because their work could not be undone, count as a
// dead process's from now on: the next command cleans up, in this process or another. End needs no space on the disk.
// Calling it again does nothing.
func (o *Operation) End() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.ended = true
	if o.f == nil {
		return
	}

	f := o.f
	o.f = nil
	if o.leavesNoMarks() && o.c.idle.putLiveFile(f) {
		o.token = "" // from now on, marks of that name belong to the next operation
		return
	}

	path := filepath.Join(o.c.dir, "live", o.token)
	if !o.spare || !returnSpare(path) {
		_ = os.Remove(path) // a leftover is not locked, and is collected later
	}

	unlockLiveFile(f)
}

// unlockLiveFile drops the lock of a live file, and closes it.
func unlockLiveFile(f *os.File) {
	// A program that is just being started has the file open as well, until exec.
	_ = unix.Flock(int(f.Fd()), unix.LOCK_UN)
	_ = f.Close() // nothing was written
}

// Orphan is an operation that has ended with marks left, or whose process has died, locked: until Close, no other
// process cleans up after it.
type Orphan struct {
	f     *os.File
	path  string
	spare bool   // f was made of a spare: see takeSpare
	dir   string // of the pool
}

// In returns a context whose transactions mark and unmark for the orphaned operation.
func (g *Orphan) In(ctx context.Context) context.Context {
	return context.WithValue(ctx, markOwnerKey{}, markOwnerIn{g, g.dir})
}

func (g *Orphan) ensureLiveFile() (string, error) { return g.liveFileName(), nil }
func (g *Orphan) liveFileName() string            { return filepath.Base(g.path) }
func (g *Orphan) operation() string               { return "recover" }

// LockOrphan locks the operation behind token for cleaning up after it. It returns nil if the operation is alive, or if
// another process is cleaning up.
func (c *Catalog) LockOrphan(token string) (*Orphan, error) {
	path := filepath.Join(c.dir, "live", token)
	for {
		// The file may be missing after a power loss, or when an operation ended with marks left. Make it again, so that
		// there is something to lock.
		f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
		if errs.KindOf(err) == errs.NoSpace {
			if f, err = takeSpare(c.dir, token); err != nil {
				return nil, err
			}
			return &Orphan{f, path, true, c.dir}, nil
		}

		if err != nil {
			return nil, errs.Wrap("recover", path, err)
		}

		if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
			f.Close()
			if errors.Is(err, unix.EWOULDBLOCK) {
				return nil, nil
			}
			return nil, errs.Wrap("recover", path, err)
		}

		// The last holder of the lock may have removed the file since it was opened: then others lock another file.
		same, err := isFile(f)
		if err == nil && same {
			return &Orphan{f, path, false, c.dir}, nil
		}

		f.Close()
		if err != nil {
			return nil, errs.Wrap("recover", path, err)
		}
	}
}

// Close unlocks the orphan. With done, everything that the operation left is cleaned up, and its live file is removed.
func (g *Orphan) Close(done bool) error {
	if done {
		if g.spare && returnSpare(g.path) {
			return g.f.Close()
		}
		if err := os.Remove(g.path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			g.f.Close()
			return errs.Wrap("recover", g.path, err)
		}
	}
	return g.f.Close()
}

// removeStaleOwners removes the live files that are not locked and that no mark names: those of processes that died
// without work at hand.
func (c *Catalog) removeStaleOwners(named map[string]bool) error {
	live := filepath.Join(c.dir, "live")
	entries, err := os.ReadDir(live)
	if err != nil {
		return errs.Wrap("recover", live, err)
	}

	for _, e := range entries {
		if named[e.Name()] || isSpare(e.Name()) {
			continue
		}
		g, err := c.LockOrphan(e.Name())
		if err != nil {
			return err
		}
		if g != nil {
			if err := g.Close(true); err != nil {
				return err
			}
		}
	}

	return nil
}

func thisProcess() Process {
	pid := os.Getpid()
	return Process{PID: pid, Start: selfStart(), BootID: kernel.BootID()}
}

var selfStart = sync.OnceValue(func() uint64 { return kernel.ProcStart(os.Getpid()) })
