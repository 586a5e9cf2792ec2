package btrfs

import (
	"cmp"
	"context"
	"errors"
	"io"
	"os"
	"runtime"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/driver/objdir"
	"pando/internal/linux/btrfsstream"
	"pando/internal/linux/kernel"

	"golang.org/x/sys/unix"
)

var (
	_ driver.Streamer = (*Driver)(nil)
	_ driver.Comparer = (*Driver)(nil)
)

// maxReceived limits how many subvolumes of one filesystem are recorded as received
// from the same one. The kernel keeps their numbers in one item of a tree. The item
// must fit into a node, whose smallest size is 4 KiB; if it does not, older kernels
// make the filesystem read-only.
const maxReceived = 400

// immutable opens an object that can be sent, or that can be a base: whole,
// read-only, and without subvolumes inside, which streams cannot hold.
func (d *Driver) immutable(op string, id driver.ObjectID) (*os.File, kernel.SubvolInfo, error) {
	f, err := d.openSubvolume(id)
	if err != nil {
		return nil, kernel.SubvolInfo{}, err
	}

	var info kernel.SubvolInfo
	var nested []kernel.SubvolChild
	if _, err = d.dir.Get(id); err == nil {
		if info, err = kernel.SubvolInfoOf(f); err == nil {
			nested, err = kernel.SubvolChildren(d.f, info.ID)
		}
	}

	switch {
	case err != nil:
	case !info.ReadOnly:
		err = errs.New(errs.Invalid, op, string(id), "it is not immutable").WithHint("make a snapshot of it")
	case len(nested) > 0:
		err = errs.New(errs.Unsupported, op, string(id),
			"it contains btrfs subvolumes, such as %q, which streams cannot hold", nested[0].Dir+"/"+nested[0].Name).
			WithHint("make them directories in the volume, and make another snapshot")
	}
	if err != nil {
		f.Close()
		return nil, info, errs.Wrap(op, string(id), err)
	}

	return f, info, nil
}

// Same implements driver.Comparer, for two snapshots of one subvolume.
func (d *Driver) Same(_ context.Context, id, base driver.ObjectID) (bool, error) {
	const op = "compare"
	later, now, err := d.immutable(op, id)
	if err != nil {
		return false, notComparable(err)
	}

	defer later.Close()
	earlier, was, err := d.immutable(op, base)
	if err != nil {
		return false, notComparable(err)
	}

	defer earlier.Close()
	if !was.Snapshot || was.ParentUUID != now.ParentUUID || was.MadeBy >= now.MadeBy {
		return false, nil
	}

	same, err := kernel.BtrfsSame(earlier, later, was.MadeBy, now.MadeBy)
	return same, errs.Wrap(op, string(id), err)
}

// notComparable returns nil for an error that only means that two objects cannot be compared, and err otherwise.
func notComparable(err error) error {
	if errs.Is(err, errs.Invalid, errs.Unsupported) {
		return nil
	}
	return err
}

// Send implements driver.Streamer. It uses version 2 of the kernel's format where the
// kernel supports it (Linux 6.0), so that compressed data is sent as stored on disk.
func (d *Driver) Send(ctx context.Context, from, base driver.ObjectID, w io.Writer) error {
	const op = "send"
	if err := ctx.Err(); err != nil {
		return errs.Wrap(op, string(from), err)
	}

	f, _, err := d.immutable(op, from)
	if err != nil {
		return err
	}

	defer f.Close()

	var o kernel.BtrfsSendOptions
	if base != "" {
		if base == from {
			return errs.New(errs.Invalid, op, string(from), "an object cannot be its own base")
		}
		b, info, err := d.immutable(op, base)
		if err != nil {
			return err
		}
		defer b.Close()
		o.Parent = info.ID
	}

	for o.Version = btrfsstream.MaxVersion; ; o.Version-- {
		written, err := sendStream(ctx, f, o, w)
		if err == nil {
			return nil
		}

		// The kernel does not know this version.
		unknown := errs.IsAny(err, unix.EINVAL, unix.EPROTO, unix.EOPNOTSUPP)
		if unknown && !written && o.Version > 1 {
			continue
		}

		if errors.Is(err, unix.EAGAIN) {
			return errs.New(errs.InUse, op, string(from), "its blocks are being deduplicated: %w",
				err).WithHint("try again after that operation finishes")
		}

		return errs.Wrap(op, string(from), err)
	}
}

// sendStream writes a stream to w, and reports whether anything was written.
func sendStream(ctx context.Context, f *os.File, o kernel.BtrfsSendOptions, w io.Writer) (written bool, err error) {
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
		return false, err
	}

	in := os.NewFile(uintptr(p[1]), "pipe")
	_, _ = unix.FcntlInt(uintptr(p[1]), unix.F_SETPIPE_SZ, 1<<20) // only faster

	// Only the read end is non-blocking: closing it must wake the reader.
	if err := unix.SetNonblock(p[0], true); err != nil {
		return false, errors.Join(err, in.Close(), unix.Close(p[0]))
	}

	out := os.NewFile(uintptr(p[0]), "pipe")
	defer out.Close()
	defer context.AfterFunc(ctx, func() { out.Close() })()

	sent := make(chan error, 1)
	go func() {
		err := kernel.BtrfsSend(f, o, in)
		sent <- errors.Join(err, in.Close())
	}()
	t := &tee{r: out, w: w}

	// Check the form of the stream while it is written: an incomplete stream, or two
	// in one (see BtrfsSend), must not pass for a whole one.
	s, err := btrfsstream.NewReader(t)
	if err == nil {
		err = s.Drain()
	}

	out.Close() // the kernel must not wait for a reader
	kernelErr := <-sent
	runtime.KeepAlive(f)

	switch {
	case ctx.Err() != nil:
		return t.written, ctx.Err()
	case t.err != nil:
		return t.written, t.err // of w
	case kernelErr != nil && !errors.Is(kernelErr, unix.EPIPE):
		return t.written, kernelErr
	case err != nil:
		return t.written, errs.New(errs.IO, "send", "", "the kernel did not send a valid stream: %w", err).
			WithHint("try again, and do not stop it (Ctrl-Z) while it runs")
	}

	return t.written, kernelErr
}

// tee is a reader of r that also writes everything it reads to w.
type tee struct {
	r       io.Reader
	w       io.Writer
	written bool
	err     error // of w
}

func (t *tee) Read(b []byte) (int, error) {
	n, err := t.r.Read(b)
	if n > 0 {
		t.written = true
		if _, t.err = t.w.Write(b[:n]); t.err != nil {
			return 0, t.err
		}
	}
	return n, err
}

// Receive implements driver.Streamer. The subvolume is in its final place from the
// beginning, without an identity.
func (d *Driver) Receive(ctx context.Context, id driver.Identity, base driver.ObjectID, r io.Reader) error {
	const op = "receive"
	if err := d.Caps().Check(ctx, op, id); err != nil {
		return err
	}

	if !id.Kind.Immutable() {
		return errs.New(errs.Invalid, op, id.Ref(), "a %s cannot be received: only immutable objects can", id.Kind)
	}

	if err := d.dir.Check(id); err != nil { // before much is read
		return errs.Wrap(op, id.Ref(), err)
	}

	if c, _, err := d.dir.Inspect(id.ID); err != nil || c.Data {
		return errs.Wrap(op, id.Ref(), cmp.Or(err, error(unix.EEXIST)))
	}

	if _, err := d.dir.Get(id.ID); !errs.Is(err, errs.NotFound) {
		return errs.Wrap(op, id.Ref(), unix.EEXIST)
	}

	var parent *os.File
	if base != "" {
		f, info, err := d.immutable(op, base)
		if err != nil {
			return err
		}
		defer f.Close()
		parent = f
		return d.receive(ctx, op, id, parent, info, r)
	}

	return d.receive(ctx, op, id, nil, kernel.SubvolInfo{}, r)
}

func (d *Driver) receive(
	ctx context.Context, op string, id driver.Identity, base *os.File, info kernel.SubvolInfo, r io.Reader,
) (err error) {
	s, err := btrfsstream.NewReader(r)
	if err != nil {
		return errs.Wrap(op, id.Ref(), err)
	}

	begin, err := s.Begin()
	if err != nil {
		return errs.Wrap(op, id.Ref(), err)
	}

	switch {
	case begin.Diff && base == nil:
		return errs.New(errs.Conflict, op, id.Ref(),
			"the stream only holds the differences from another object").WithHint("receive that one first")
	case !begin.Diff && base != nil:
		return errs.New(errs.Conflict, op, id.Ref(), "the stream holds a whole object, not the differences from %s",
			base.Name())
	case begin.Diff && !isSameSubvolume(info, begin.Parent):
		return errs.New(errs.Conflict, op, id.Ref(), "the stream holds the differences from an object other than %s",
			base.Name()).
			WithHint("its base is the subvolume that has, or was received from one that has, the UUID %x", begin.Parent)
	}

	if base == nil {
		err = kernel.SubvolCreate(d.f, d.subvolumeName(id.ID))
	} else {
		err = kernel.SubvolSnapshot(d.f, d.subvolumeName(id.ID), base, false)
	}
	if err != nil {
		return errs.Wrap(op, id.Ref(), err)
	}

	defer func() {
		if err != nil {
			// If this fails too, the remaining data has no identity.
			_ = d.destroyTree(d.subvolumeName(id.ID))
		}
	}()

	f, err := d.openSubvolume(id.ID)
	if err != nil {
		return err
	}

	defer f.Close()

	if err := btrfsstream.Apply(ctx, s, begin, f, base); err != nil {
		return errs.Wrap(op, id.Ref(), err)
	}

	if err := d.sealReceived(f, begin, id.Ephemeral); err != nil {
		return errs.Wrap(op, id.Ref(), err)
	}

	return errs.Wrap(op, id.Ref(), d.dir.Put(id, objdir.DurabilityOf(id)))
}

// isSameSubvolume reports whether a subvolume has that UUID, or was received from one that has it.
func isSameSubvolume(info kernel.SubvolInfo, uuid [16]byte) bool {
	if info.ReceivedUUID != [16]byte{} {
		return info.ReceivedUUID == uuid || info.UUID == uuid
	}
	return info.UUID == uuid
}

// sealReceived makes a received subvolume immutable, so that others can build on it, and durable except for the
// identity.
func (d *Driver) sealReceived(f *os.File, begin btrfsstream.Begin, ephemeral bool) error {
	n, err := kernel.BtrfsReceivedCount(d.f, begin.UUID)
	if err != nil {
		return err
	}

	if n < maxReceived {
		if err := kernel.SubvolSetReceived(f, begin.UUID, begin.TransID); err != nil {
			return err
		}
	}

	// Sync all content before the identity. f has been open since before the first
	// write, so that every write error is reported.
	if !ephemeral {
		if err := unix.Syncfs(int(f.Fd())); err != nil {
			return os.NewSyscallError("syncfs", err)
		}
	}

	return kernel.SubvolSetReadOnly(f, true)
}
