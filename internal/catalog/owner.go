package catalog

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"sync"

	"pando/internal/errs"
	"pando/internal/kernel"

	"golang.org/x/sys/unix"
)

// owner is this process's proof of life: a file in live/ that it holds locked.
// The kernel drops the lock when the process dies, however it dies, and other
// processes see that also from another PID namespace, where a PID would lie.
type owner struct {
	mu    sync.Mutex
	f     *os.File
	token string
}

// Process describes the process that owns a mark, for people.
type Process struct {
	PID    int
	Start  uint64 // clock ticks since boot
	BootID string
}

// ownerToken returns the name of the live file, making it at first use.
func (c *Catalog) ownerToken() (string, error) {
	c.own.mu.Lock()
	defer c.own.mu.Unlock()
	if c.own.f != nil {
		return c.own.token, nil
	}
	live := filepath.Join(c.dir, "live")
	for {
		f, err := os.CreateTemp(live, "p-")
		if err != nil {
			return "", errs.Wrap("mark", live, err)
		}
		if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err == nil {
			// Between the two calls a clean-up may have taken the file for a
			// dead process's and removed it: then our lock proves nothing.
			var mine, there unix.Stat_t
			if err := unix.Fstat(int(f.Fd()), &mine); err != nil {
				f.Close()
				return "", errs.Wrap("mark", live, err)
			}
			if unix.Lstat(f.Name(), &there) == nil && there.Ino == mine.Ino {
				c.own.f, c.own.token = f, filepath.Base(f.Name())
				return c.own.token, nil
			}
		} else if !errors.Is(err, unix.EWOULDBLOCK) {
			f.Close()
			_ = os.Remove(f.Name())
			return "", errs.Wrap("mark", live, err)
		}
		f.Close()
	}
}

// release gives the proof of life up. Marks that are left would now count as a
// dead process's.
func (o *owner) release() error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.f == nil {
		return nil
	}
	err := os.Remove(o.f.Name())
	if e := o.f.Close(); err == nil {
		err = e
	}
	o.f, o.token = nil, ""
	return errs.Wrap("unmark", "", err)
}

// Grave is the claim on what a dead process left: while it is held, nobody else
// cleans up after the same process.
type Grave struct{ f *os.File }

// Claim takes charge of what the process behind token left. It returns nil if
// that process lives, or if somebody else is in charge already.
func (c *Catalog) Claim(token string) (*Grave, error) {
	c.own.mu.Lock()
	mine := token == c.own.token && c.own.f != nil
	c.own.mu.Unlock()
	if mine {
		return nil, nil
	}
	// The file may be gone: a power loss, or a process that let go of it with
	// marks left. Make it anew, so that there is something to lock.
	path := filepath.Join(c.dir, "live", token)
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
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
	return &Grave{f}, nil
}

// Close ends the claim. With done, all that the process left is cleaned up and
// its live file goes.
func (g *Grave) Close(done bool) error {
	if done {
		if err := os.Remove(g.f.Name()); err != nil && !errors.Is(err, fs.ErrNotExist) {
			g.f.Close()
			return errs.Wrap("recover", g.f.Name(), err)
		}
	}
	return g.f.Close()
}

// StaleOwners lists the live files whose process is dead and which no mark
// names: those of processes that died without work at hand.
func (c *Catalog) removeStaleOwners(named map[string]bool) error {
	live := filepath.Join(c.dir, "live")
	entries, err := os.ReadDir(live)
	if err != nil {
		return errs.Wrap("recover", live, err)
	}
	for _, e := range entries {
		if named[e.Name()] {
			continue
		}
		g, err := c.Claim(e.Name())
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

func self() Process {
	pid := os.Getpid()
	return Process{PID: pid, Start: selfStart(), BootID: kernel.BootID()}
}

var selfStart = sync.OnceValue(func() uint64 { return kernel.ProcStart(os.Getpid()) })
