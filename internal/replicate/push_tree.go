package replicate

import (
	"context"
	"errors"
	"io"
	"time"

	"pando/internal/driver"
	"pando/internal/engine"
	"pando/internal/errs"
	"pando/internal/repo"

	"golang.org/x/sync/errgroup"
)

// maxChain is how many differences may follow a whole stream: to read the last, all are
// needed.
const maxChain = 30

// treeContent is in which form trees are pushed: as a stream of their driver, or in the one that every driver with
// trees can read, which drivers without a stream of their own always use.
func (p *pusher) treeContent(jb *job) repo.Content {
	if p.q.Portable || jb.portable || !p.e.SendsStreams() {
		return repo.Tree
	}
	return repo.Stream
}

// otherForm reports whether a point is there as a stream that only its driver can read, and should be there for all.
func (p *pusher) otherForm(at repo.Point) bool { return p.q.Portable && at.Content == repo.Stream }

// tree pushes a point that is a tree of files, as a stream. A stream
// cannot be gone on with in its middle, so one that was interrupted begins anew.
func (p *pusher) tree(ctx context.Context, jb *job, h headState, l links) (Pushed, error) {
	if jb.goOn {
		if err := p.endPlanned(ctx, jb.j); err != nil {
			return Pushed{}, err
		}
	}
	for attempt := range baseAttempts {
		var b base
		var origin *repo.Origin
		if attempt < baseAttempts-1 {
			var err error
			if b, origin, err = p.chooseBase(ctx, jb, h, l, p.treeContent(jb)); err != nil {
				return Pushed{}, err
			}
			if b, err = p.intactBase(ctx, jb, b); err != nil {
				return Pushed{}, err
			}
			if idle, err := p.isIdleTree(ctx, jb, b); err != nil {
				return Pushed{}, err
			} else if idle {
				return p.idleTree(ctx, jb, h, b)
			}
			if b.object == "" { // a stream cannot be compared
				b = base{}
			}
			if b.object != "" {
				if ok, err := p.chainBears(ctx, h, b); err != nil {
					return Pushed{}, err
				} else if !ok {
					if same, err := p.isSameTree(ctx, jb, b); err != nil {
						return Pushed{}, err
					} else if same {
						return p.idleTree(ctx, jb, h, b)
					}
					b = base{}
				}
			}
		}
		b, plan, err := p.planTree(ctx, jb, b)
		if err != nil {
			return Pushed{}, err
		}
		out, err := p.stream(ctx, jb, h, b, origin, plan)
		switch {
		case errors.Is(err, errBaseGone):
			if h, l, err = p.lookAgain(ctx, jb, b); err != nil {
				return Pushed{}, err
			}
			continue
		case errs.Is(err, errs.Unsupported) && b.object != "":
			// The base cannot serve as one: it is whole then.
			if b, plan, err = p.planTree(ctx, jb, base{}); err != nil {
				return Pushed{}, err
			}
			return p.stream(ctx, jb, h, b, origin, plan)
		}
		return out, err
	}
	return Pushed{}, errs.New(errs.Conflict, opPush, jb.pt.Ref, "what it builds upon is removed from the remote again and again").WithHint("run the push again")
}

// chainBears reports whether one more difference may be put upon a point: not if there
// are many, or if they are larger than a whole stream was.
func (p *pusher) chainBears(ctx context.Context, h headState, b base) (bool, error) {
	points := map[repo.ID]repo.Point{}
	heads := map[string]bool{}
	look := func(h headState) {
		heads[h.Name] = true
		for _, x := range h.Recent {
			points[x.Manifest] = x
		}
	}
	look(h)
	at, sum := b.point, int64(0)
	points[at.Manifest] = at
	for n := 1; n <= maxChain; n++ {
		if at.Parent.IsZero() {
			return sum <= at.Added, nil
		}
		sum += at.Added
		next, ok := points[at.Parent]
		for _, name := range []string{b.head, at.OriginVol} {
			if ok || name == "" || heads[name] {
				continue
			}
			of, err := p.readHead(ctx, name)
			if err != nil {
				return false, err
			}
			look(of)
			next, ok = points[at.Parent]
		}
		if !ok {
			return false, nil
		}
		at = next
	}
	return false, nil
}

// stream pushes one stream: the whole tree, or what differs from base.
func (p *pusher) stream(ctx context.Context, jb *job, h headState, b base, origin *repo.Origin,
	expected driver.StreamPlan,
) (Pushed, error) {
	pt := jb.pt
	var pins []repo.ID
	if b.object != "" {
		pins = []repo.ID{b.point.Manifest}
	}
	s := p.repo.NewSession(repo.Push, []string{jb.head}, p.me)
	s.Pins = pins
	if err := jb.j.replan(plan{Snapshot: pt.Ref, Took: jb.took, Object: string(pt.ID), Session: s.ID}, false); err != nil {
		return Pushed{}, err
	}
	work, l, err := beginWith(ctx, p.repo, s)
	if err != nil {
		return Pushed{}, err
	}
	out, err := p.streamUnder(work, jb, l, b, origin, expected)
	if errors.Is(err, engine.ErrUnchanged) {
		if err = l.end(ctx); err == nil {
			return p.idleTree(ctx, jb, h, b)
		}
	} else {
		err = p.after(ctx, jb, l, err)
	}
	out.Seconds = time.Since(jb.begun).Seconds()
	return out, err
}

func (p *pusher) streamUnder(ctx context.Context, jb *job, l *lease, b base, origin *repo.Origin,
	expected driver.StreamPlan,
) (Pushed, error) {
	pt, content := jb.pt, p.treeContent(jb)
	var st stats
	var h headState
	g, gctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		var listed bool
		var err error
		if h, listed, err = p.verify(gctx, jb, b); err == nil && !listed {
			err = errBaseGone
		}
		return err
	})
	pl := &pipeline{repo: p.repo, session: l.id, stats: &st, ready: func(context.Context) error { return nil }}
	p.q.Tracker.Start("pushing "+pt.Ref, 0, expected.Bytes)
	g.Go(func() error {
		return pl.run(gctx, func(ctx context.Context, to *batcher) error {
			w := &streamWriter{ctx: ctx, b: to, p: p, stats: &st}
			err := p.send(ctx, jb, b, w)
			if w.err != nil { // it is why the stream has ended
				return w.err
			}
			return err
		})
	})
	if err := g.Wait(); err != nil {
		if cause := context.Cause(ctx); errors.Is(cause, errEnded) {
			err = cause
		}
		return Pushed{}, err
	}
	m := repo.Manifest{
		ID: repo.NewID(), Volume: jb.head, Point: pt.Name, Content: content, FS: string(pt.FS), SizeBytes: pt.SizeBytes, Sector: pt.Sector,
		CreatedAt: pt.CreatedAt, Consistency: string(pt.Consistency), Source: string(pt.ID), Session: l.id, Origin: origin,
		Raw: expected.Raw, Added: st.uploaded.Load(), Stream: pl.frames,
	}
	if b.object != "" {
		m.Parent = b.point.Manifest
	} else {
		m.Logical = st.read.Load()
	}
	uses := map[repo.Segment]int64{}
	for _, f := range pl.frames {
		uses[f.Segment] += int64(f.Stored)
	}
	var err error
	if m.Uses, err = usesOf(uses); err != nil {
		return Pushed{}, err
	}
	st.fill(m.Uses, nil)
	jb.named = true
	if err := p.repo.PutManifest(ctx, m); err != nil {
		return Pushed{}, err
	}
	h, at, err := p.commit(ctx, l, jb.claim, h, pt, &m)
	if err != nil {
		return Pushed{}, err
	}
	err = p.settle(ctx, jb, h, m.ID, l.end)
	out := p.describe(jb, h, at)
	out.Base, out.Full, out.Raw, out.ExpectedBytes = b.ref(), b.object == "", expected.Raw, expected.Bytes
	out.ReadBytes, out.UploadedBytes, out.Segments = st.read.Load(), st.uploaded.Load(), st.segments.Load()
	return out, err
}

// send writes the stream of a point. ErrUnchanged: it is a snapshot that was taken for this push, and holds what the
// newest point of the volume does.
func (p *pusher) send(ctx context.Context, jb *job, b base, w io.Writer) error {
	q := engine.ReadRequest{Point: jb.pt.ID, Base: b.object}
	if p.treeContent(jb) == repo.Stream {
		return p.e.SendStream(ctx, q, w)
	}
	q.IfChanged = p.mayBeIdle(jb, b)
	return p.e.SendTree(ctx, q, w)
}

// streamWriter cuts a stream into frames.
type streamWriter struct {
	ctx   context.Context
	b     *batcher
	p     *pusher
	stats *stats
	err   error
}

func (w *streamWriter) Write(b []byte) (int, error) {
	done := 0
	for done < len(b) {
		n := min(len(b)-done, repo.FrameBytes-w.b.pending())
		if n == 0 {
			if w.err = w.b.flush(w.ctx, 0); w.err != nil {
				return done, w.err
			}
			continue
		}
		to, err := w.b.room(w.ctx, n)
		if err != nil {
			w.err = err
			return done, err
		}
		copy(to, b[done:])
		w.b.raw(n)
		done += n
		w.stats.read.Add(int64(n))
		w.p.q.Tracker.Add(0, int64(n))
	}
	return done, nil
}
