package replicate

import (
	"context"
	"io"

	"pando/internal/base/progress"
	"pando/internal/driver"
	"pando/internal/engine"
	"pando/internal/remote/repo"
)

// treeContent returns the form in which a tree is pushed: a stream of its driver, or the portable form that every
// driver with trees can read. Drivers without a stream of their own always use the portable form.
func (p *pusher) treeContent(x *pointPush) repo.Content {
	if p.q.Portable || x.portable || !p.e.SendsStreams() {
		return repo.Tree
	}
	return repo.Stream
}

// needsOtherForm reports whether a point is on the remote as a stream that only its driver can read, although the
// request asks for the portable form.
func (p *pusher) needsOtherForm(at repo.Point) bool { return p.q.Portable && at.Content == repo.Stream }

// filesContent pushes a tree of files: a stream of the whole tree, or of the difference from the base.
type filesContent struct {
	*pointPush

	form     repo.Content
	expected driver.StreamPlan
	frames   []repo.Frame
}

// contentOf returns the content of a push.
func contentOf(x *pointPush) contentPush {
	if x.pt.FS.IsImage() {
		return &imageContent{pointPush: x}
	}
	return &filesContent{pointPush: x, form: x.p.treeContent(x)}
}

func (c *filesContent) contentKind() repo.Content { return c.form }

// openContent opens nothing, because a stream is read in one go. It keeps the base if that is in this pool, because a
// stream cannot be compared with the remote, and if its chain may be extended.
func (c *filesContent) openContent(ctx context.Context) (unchanged bool, err error) {
	if idle, err := c.p.isIdleTree(ctx, c.pointPush, c.base); err != nil || idle {
		return idle, err
	}

	if c.base.object == "" {
		c.base = base{}
	} else if bears, err := c.p.canExtendChain(ctx, c.head, c.base); err != nil {
		return false, err
	} else if !bears {
		if same, err := c.p.isSameTree(ctx, c.pointPush, c.base); err != nil || same {
			return same, err
		}
		c.base = base{}
	}

	c.base, c.expected, err = c.p.planTree(ctx, c.pointPush, c.base)
	return false, err
}

func (c *filesContent) closeContent() error { return nil }

// describeManifest sets the frames of the stream.
func (c *filesContent) describeManifest(m *repo.Manifest) error {
	m.Raw, m.Stream, m.Uses = c.expected.Raw, c.frames, c.stats.listUses(repo.NodeRef{}, nil)
	if c.base.object == "" {
		m.Logical = c.stats.read.Load()
	}

	return nil
}

func (c *filesContent) reportResult(out *Pushed) {
	out.Full, out.Raw, out.ExpectedBytes = c.base.object == "", c.expected.Raw, c.expected.Bytes
}

// storeSegments runs the pipeline over the stream.
func (c *filesContent) storeSegments(ctx context.Context) error {
	pl := &pipeline{repo: c.p.repo, session: c.session.ID, stats: c.stats, ready: c.lease.waitBegun}
	progress.From(ctx).StartOf(progress.Pushing, c.pt.Ref, 0, c.expected.Bytes)
	err := pl.storeAll(ctx, c.produce)
	c.frames = pl.frames
	return err
}

// produce reads the stream into batches.
func (c *filesContent) produce(ctx context.Context, to *batcher) error {
	w := &streamWriter{ctx: ctx, b: to, p: c.p, stats: c.stats}
	err := c.sendStream(ctx, w)
	if w.err != nil { // it is why the stream ended
		return w.err
	}
	return err
}

// sendStream writes the stream. Errors: ErrUnchanged if this push took the snapshot itself and the snapshot equals the
// newest point of the volume.
func (c *filesContent) sendStream(ctx context.Context, w io.Writer) error {
	q := engine.ReadRequest{Point: c.pt.ID, Base: c.base.object}
	if c.form == repo.Stream {
		return c.p.e.SendStream(ctx, q, w)
	}
	q.IfChanged = c.p.mayBeIdle(c.pointPush, c.base)
	return c.p.e.SendTree(ctx, q, w)
}

// streamWriter cuts a stream into frames.
type streamWriter struct {
	ctx   context.Context
	b     *batcher
	p     *pusher
	stats *stats
	err   error
}

// Write adds b to the batches. It never returns a short count without an error.
func (w *streamWriter) Write(b []byte) (int, error) {
	done := 0
	for done < len(b) {
		n := min(len(b)-done, repo.FrameBytes-w.b.pendingBytes())
		if n == 0 {
			if w.err = w.b.flushBatch(w.ctx, 0); w.err != nil {
				return done, w.err
			}
			continue
		}

		to, err := w.b.reserveRoom(w.ctx, n)
		if err != nil {
			w.err = err
			return done, err
		}

		copy(to, b[done:])
		w.b.addRaw(n)
		done += n
		w.stats.read.Add(int64(n))
		progress.From(w.ctx).Add(0, int64(n))
	}

	return done, nil
}
