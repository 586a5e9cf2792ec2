package engine

import (
	"context"
	"errors"
	"os"
	"sync"
	"time"

	"pando/internal/catalog"
	"pando/internal/driver"
	"pando/internal/errs"
	"pando/internal/kernel"
	"pando/internal/loopdev"
	"pando/internal/mount"

	"golang.org/x/sys/unix"
)

// copyPatience is how long a copy of a mount in another namespace may last without being a
// reason to refuse: who makes a namespace gets copies of all mounts, and drops most of them.
const (
	copyPatience = 500 * time.Millisecond
	copyPoll     = 20 * time.Millisecond
)

// releaseGrace is how long a block device may take to vanish before the reason is looked for.
const releaseGrace = 100 * time.Millisecond

// lookImage asks the kernel whether an image is attached, by anybody in any namespace. What
// cannot be found out counts as attached.
func (e *Engine) lookImage(row catalog.Row, a catalog.Attached) where {
	on, err := e.imageAttached(row.ID)
	switch {
	case errs.Is(err, errs.NotFound), errs.Is(err, errs.Damaged), errs.Is(err, errs.TooNew):
		on = a.Loop >= 0 && loopHolds(a) // the driver cannot tell the path of its image
	case err != nil:
		on = true
	}
	if on {
		return elsewhere
	}
	return gone
}

// loopHolds reports whether the recorded loop device still has the recorded image behind it.
func loopHolds(a catalog.Attached) bool {
	b, err := loopdev.Lookup(a.Loop)
	return err == nil && b.Dev == a.Dev && b.Ino == a.Ino
}

// mountedAgain reports whether the recorded image is mounted at its place by another mount than
// the recorded one: detach was killed after it had put it back, or somebody did it by hand.
func mountedAgain(a catalog.Attached) bool {
	m, err := kernel.MountAt(unix.AT_FDCWD, a.Mountpoint)
	switch {
	case err != nil || !m.Root:
		return false
	case a.Loop < 0: // the driver's own device
		return m.Dev == a.Dev
	}
	return m.Dev == loopdev.DeviceNumber(a.Loop) && loopHolds(a)
}

// lookTree looks for the mounts of a tree in all mount namespaces. What cannot be found out
// counts as mounted.
func (e *Engine) lookTree(row catalog.Row, a catalog.Attached) where {
	w, err := e.attachmentOf(context.Background(), row)
	if errs.Is(err, errs.NotFound) {
		return gone
	}
	if err != nil || w.Tree == "" {
		return elsewhere // its driver would have to run a program to tell more
	}
	t, err := e.tables.recent()
	if err != nil {
		return elsewhere
	}
	if found, err := mountsOf(t, a, w); err != nil || len(found) > 0 || !t.Complete() {
		return elsewhere
	}
	return gone
}

// mountsOf finds where a volume is mounted besides the place that its attachment records.
func mountsOf(t *mount.Tables, a catalog.Attached, w driver.Attachment) ([]mount.Holder, error) {
	q := mount.Query{Tree: w.Tree}
	if ns, err := kernel.MountNamespace(); err == nil && ns == a.MountNS {
		q.At = a.Mountpoint
	}
	if w.Tree == "" && w.Image != "" {
		q.Dev = deviceOf(a, w)
	} else if w.Tree == "" { // mounted by name
		if m, err := kernel.MountAt(unix.AT_FDCWD, a.Mountpoint); err == nil && m.Root && m.ID == a.MountID {
			q.Dev = m.Dev
		}
	}
	if q.Tree == "" && q.Dev == 0 {
		return nil, nil // it is mounted nowhere, or its driver does not destroy what is
	}
	found, err := t.Mounts(q)
	if errs.Is(err, errs.NotFound) {
		return nil, nil // the tree is not there
	}
	return found, err
}

// tablesCache keeps the mount tables for those who look at many volumes.
type tablesCache struct {
	mu   sync.Mutex
	last *mount.Tables
	till time.Time
}

// recent returns tables that are at most ten times as old as reading them took: so whoever
// asks time and again spends no more than a tenth of the time on them.
func (c *tablesCache) recent() (*mount.Tables, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	start := time.Now()
	if c.last != nil && start.Before(c.till) {
		return c.last, nil
	}
	t, err := mount.ReadTables(context.Background())
	if err == nil {
		c.last, c.till = t, time.Now().Add(10*time.Since(start))
	}
	return t, err
}

// candidate is a volume that is to be unmounted or destroyed.
type candidate struct {
	row catalog.Row
	att catalog.Attached
	has bool
}

// inUse finds out which volumes somebody uses in a way that taking them away would not notice
// in time, and changes nothing. One reading of all mount tables does for all of them. It returns
// one error for each, nil or InUse.
//
//   - The mounts of trees do not know each other: to unmount one of them, and to remove the tree,
//     succeeds while another namespace has a copy.
//   - A filesystem in an image shows when it is unmounted whether another namespace has a copy;
//     then it is mounted again. What nobody asked for (see gentle) does not even that.
//   - An image may be attached although no attachment is recorded.
func (e *Engine) inUse(ctx context.Context, op string, volumes []candidate) []error {
	out := make([]error, len(volumes))
	var t *mount.Tables
	for i, v := range volumes {
		if v.row.Kind != driver.Volume {
			continue
		}
		w, err := e.attachmentOf(ctx, v.row)
		if err != nil {
			continue // it is damaged or gone: nothing of it can be mounted by a path
		}
		image := v.row.FS.IsImage()
		used := false
		switch {
		case image && !v.has:
			if used, err = e.imageAttached(v.row.ID); err != nil && !errs.Is(err, errs.NotFound) {
				out[i] = err
			}
		case image && (!gentle(op) || v.att.MountID == 0):
		case v.has && v.att.MountID == 0 && !image: // a symbolic link
			if gentle(op) {
				users, _ := mount.TreeUsers(ctx, w.Tree, false)
				used = len(users) > 0
			}
		case v.has && e.look(v.row, v.att) == elsewhere:
			used = true
		default:
			if t == nil {
				if t, err = mount.ReadTables(ctx); err != nil {
					out[i] = err
					continue
				}
			}
			found, err := mountsOf(t, v.att, w)
			if err != nil {
				out[i] = err
				continue
			}
			used = len(found) > 0 && (gentle(op) || !e.copiesEnd(ctx, v.att, w))
		}
		if used {
			out[i] = e.heldError(ctx, op, v.row, v.att, w)
		}
	}
	return out
}

// releaseUnheld waits until an image is no block device any more, as it was unmounted here. The
// device normally vanishes at once. false: it is found to be held, or does not vanish in time.
func (e *Engine) releaseUnheld(ctx context.Context, row catalog.Row, a catalog.Attached, w driver.Attachment, dev uint64, going bool) (bool, error) {
	free, err := e.releaseDevice(ctx, row.ID, w, releaseGrace, going)
	if free || err != nil {
		return free, err
	}
	if dev != 0 {
		if holders, _ := mount.Holders(ctx, mount.Query{Dev: dev, At: a.Mountpoint}); len(holders) > 0 {
			return false, nil
		}
	}
	return e.releaseDevice(ctx, row.ID, w, releaseWait, going)
}

// copiesEnd waits a moment for the copies of a mount in other namespaces to end, as those of a
// container that is just being started do.
func (e *Engine) copiesEnd(ctx context.Context, a catalog.Attached, w driver.Attachment) bool {
	for end := time.Now().Add(copyPatience); time.Now().Before(end) && ctx.Err() == nil; time.Sleep(copyPoll) {
		t, err := mount.ReadTables(ctx)
		if err != nil {
			return false
		}
		if found, err := mountsOf(t, a, w); err == nil && len(found) == 0 {
			return true
		}
	}
	return false
}

// gentle reports whether nobody asked for an operation: then what is in use is left alone at
// once, and nobody looks for who uses it.
func gentle(op string) bool { return op == opExpire || op == opPrune }

// mountAgain puts a volume back that detach has unmounted, but that another mount namespace
// keeps: the same device at the same place, with the same options. If this process is killed
// before it has recorded the new mount, look recognizes it.
func (e *Engine) mountAgain(ctx context.Context, row catalog.Row, a *catalog.Attached, w driver.Attachment, attrs mount.Attributes) error {
	ctx = context.WithoutCancel(ctx)
	// The open device keeps its number, and what is behind it, until the mount holds it.
	var f *os.File
	var err error
	if w.Block {
		f, err = e.activate(ctx, row.ID)
	} else if f, err = os.Open(loopdev.DevicePath(a.Loop)); err == nil && !loopHolds(*a) {
		f.Close()
		err = errs.New(errs.NotFound, "mount", row.Name, "its block device is gone")
	}
	if err != nil {
		return errs.Wrap("mount", row.Name, err)
	}
	defer f.Close()
	if w.Block { // the driver was not asked before
		if w, err = e.drv.Attachment(ctx, row.ID); err != nil {
			return err
		}
	}
	m, err := mount.Device(string(w.FS), f.Name(), w.Options, false)
	if errors.Is(err, unix.EBUSY) && attrs.ReadOnly() {
		m, err = mount.Device(string(w.FS), f.Name(), w.Options, true) // so is the filesystem
	}
	if err != nil {
		return err
	}
	defer m.Close()
	if err := m.SetAttributes(attrs); err != nil {
		return err
	}
	info, err := e.attachAgain(m, a.Mountpoint)
	if err != nil {
		return err
	}
	a.MountID = info.ID
	return e.cat.Update(ctx, catalog.Soft, func(tx *catalog.Tx) error { return tx.Attach(*a) })
}

// attachAgain mounts on the directory at path, whatever others do to the names above it.
func (e *Engine) attachAgain(m *mount.Detached, path string) (kernel.MountInfo, error) {
	p, err := e.openPlace(path)
	if err != nil {
		return kernel.MountInfo{}, err
	}
	defer p.Close()
	dir, err := p.OpenDir()
	if err != nil {
		return kernel.MountInfo{}, errs.Wrap("mount", path, err)
	}
	defer dir.Close()
	return m.AttachTo(dir)
}
