package engine

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"errors"
	"io"
	"os"

	"pando/internal/base/errs"
	"pando/internal/base/warnings"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/engine/content"
	"pando/internal/tree/treediff"
	"pando/internal/tree/treestream"

	"golang.org/x/sys/unix"
)

// SendsStreams reports whether this pool's driver has a native stream format for trees: see SendStream.
func (e *Transfer) SendsStreams() bool {
	_, ok := e.drv.(driver.Streamer)
	return ok
}

// ErrUnchanged says that a tree is the same as its base.
var ErrUnchanged = errors.New("nothing has changed")

// untilSame passes a stream on, unless the stream is empty because nothing has changed.
type untilSame struct{ to io.Writer }

func (w untilSame) Write(b []byte) (int, error) {
	if treestream.IsEmpty(b) {
		return 0, ErrUnchanged
	}
	return w.to.Write(b)
}

// SendTree writes a snapshot or generation that is a tree to w, in the portable format that every driver with trees can
// read (see internal/tree/treestream): all of it, or the differences from its base. Neither can be destroyed before
// SendTree returns. It returns NotFound, Invalid (a volume), Unsupported (an image, or a difference that the format
// cannot express: send the whole tree instead), InUse, ErrUnchanged, and the errors of w.
func (e *Transfer) SendTree(ctx context.Context, q ReadRequest, w io.Writer) (err error) {
	ctx, end := e.ledger.Begin(ctx, opPush)
	defer end(&err)

	if err := e.needRoot(opPush, string(q.Point)); err != nil {
		return err
	}

	h, err := e.ledger.Hold(ctx, opPush, q.Point, q.Base)
	if err != nil {
		return err
	}

	defer h.Release(ctx)

	for i, row := range h.Rows {
		if row.FS.IsImage() {
			return errs.New(errs.Unsupported, opPush, h.Refs[i], "it is an image, not a tree of files")
		}
	}

	if q.IfChanged {
		w = untilSame{w}
	}

	buffered := bufio.NewWriterSize(w, 256<<10) // so that a short stream is a single Write
	o := treestream.SendOptions{Unprivileged: os.Geteuid() != 0}
	err = e.content.WithTree(ctx, q.Point, true, func(root *os.File) error {
		if q.Base == "" {
			return treestream.Send(ctx, buffered, root, o)
		}
		return e.content.WithTree(ctx, q.Base, true, func(base *os.File) error {
			how, err := e.pointHints(ctx, h.Rows[1], h.Rows[0], base, root)
			if err != nil {
				return err
			}
			return treestream.SendDiff(ctx, buffered, base, root, how, o)
		})
	})
	if err == nil {
		err = buffered.Flush()
	}

	return errs.Wrap(opPush, h.Refs[0], err)
}

// pointHints returns what is known about the differences of two trees before they are compared.
func (e *Transfer) pointHints(ctx context.Context, a, b catalog.Row, rootA, rootB *os.File) (treediff.Options, error) {
	var o treediff.Options
	_, since, same, err := e.commonOrigin(ctx, a, b)
	if err != nil {
		return o, err
	}
	if o.SameOrigin = same && e.caps.Sharing; o.SameOrigin {
		o.Younger = since
	}
	x, y := &side{live: content.Live{Row: a}}, &side{live: content.Live{Row: b}}
	return o, (&view{e: e.Engine}).treeHints(ctx, x, y, rootA, rootB, &o)
}

// makeTreePoint makes the point from a stream that SendTree has written. It applies the stream to a draft, which is
// worthless after a power loss until it is the point.
func (r *receive) makeTreePoint(ctx context.Context) error {
	e, q, d := r.e, r.q, r.draft
	d.FS, d.Ephemeral, d.Soon = r.point.FS, true, true
	var err error
	if q.Base != "" {
		err = e.drv.Clone(ctx, q.Base, d)
	} else {
		err = e.drv.Create(ctx, d)
	}
	if err != nil {
		return err
	}

	err = e.content.WithTree(ctx, d.ID, false, func(root *os.File) error { return r.fillTree(ctx, root) })
	if err != nil {
		return err
	}

	if f, ok := e.drv.(driver.Finisher); ok {
		return f.Finish(ctx, r.point)
	}

	if err := e.drv.Snapshot(ctx, d.ID, r.point); err != nil {
		return err
	}

	return e.drv.Destroy(ctx, d.ID)
}

// fillTree applies the stream to the tree at root, and waits for the disk.
func (r *receive) fillTree(ctx context.Context, root *os.File) error {
	o := treestream.ApplyOptions{Diff: r.q.Base != "", Unprivileged: os.Geteuid() != 0}
	totals, err := treestream.Apply(ctx, r.content.Stream, root, o)
	if err == nil {
		err = unix.Syncfs(int(root.Fd()))
	}
	if err != nil {
		return errs.Wrap(opPull, r.ref, err)
	}

	for _, m := range append(skippedMessages(totals.Skipped), lossMessages(totals.NotKept)...) {
		warnings.AddEach(ctx, "%s: %s", r.ref, string(m))
	}

	return nil
}

// CanReceive checks that this pool can store content with a filesystem: an image or a tree. With tree set, the tree
// comes in the portable format, and can be put into an image; otherwise it comes as a native stream that starts with
// the bytes begin. It changes nothing. It returns Unsupported.
func (e *Transfer) CanReceive(what string, fs driver.FS, tree bool, begin []byte) error {
	r := &receive{e: e, ref: what, q: ReceiveRequest{FS: fs, Tree: tree},
		content: Content{Stream: bytes.NewReader(begin)}}
	if tree {
		fs = cmp.Or(treeFS(e.caps), fs)
	}
	if !fs.IsImage() {
		if err := r.checkStream(); err != nil {
			return err
		}
	}
	return e.checkHolds(what, fs)
}

// streamsOf are the drivers with native streams, and the bytes that these start with.
var streamsOf = []struct{ magic, driver string }{
	{"btrfs-stream\x00", "btrfs"},
	{"pando zfs stream", "zfs"},
}

// checkStream refuses a stream that this pool cannot read, before anything is done.
func (r *receive) checkStream() error {
	e, q := r.e, &r.q
	if q.Tree {
		return nil // every pool can store files
	}

	in := bufio.NewReaderSize(r.content.Stream, 64<<10)
	r.content.Stream = in
	for _, s := range streamsOf {
		if s.driver == e.caps.Name {
			continue
		}
		head, err := in.Peek(len(s.magic))
		if err == nil && string(head) == s.magic {
			err := errs.New(errs.Unsupported, opPull, r.ref,
				"it is a stream of the %s driver, which the %s driver cannot read", s.driver, e.caps.Name)
			return err.WithHint("pull it into a pool of the %s driver, or push it again with %s",
				s.driver, errs.Run("push", errs.Param("portable")))
		}
	}

	_, err := e.streamer(opPull, r.ref)
	return err
}
