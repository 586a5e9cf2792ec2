package git

import (
	"context"
	"strconv"
	"strings"

	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine"
	"pando/internal/linux/run"
)

const (
	opImport   = "import"
	opRefresh  = "refresh"
	opCheckout = "check out"
)

// ImportRequest says which golden to make from a repository.
type ImportRequest struct {
	Golden  ref.Name
	Source  Source
	Env     []string              // of git and of the command that prepares it, as of exec.Cmd
	Update  bool                  // make the next generation of an existing golden, from this source from now on
	Keep    *int                  // of the golden: newest generations to keep from now on, 0: all; nil: as before
	Overlay *driver.OverlayPolicy // of the golden from now on; nil: as before
	Tracker *progress.Tracker
}

// Made is the result of Import and Refresh. Its JSON form is stable.
type Made struct {
	engine.Info
	URL       string   `json:"url"`
	Branch    string   `json:"branch"`            // that is checked out; "": none, because HEAD is a commit on the remote
	Commit    string   `json:"commit"`            // that is checked out
	Unchanged bool     `json:"unchanged"`         // nothing was new: there is no new generation
	Prepared  bool     `json:"prepared"`          // the command to prepare it ran
	Removed   []string `json:"removed,omitempty"` // older generations, by the golden's retention
}

// Import makes a golden of a repository, with all branches and tags, and its default branch checked out. With Update it
// is like Refresh, but from another source. Nothing is left of it if it fails or is killed. Durable on return. Invalid,
// Exists, NotFound (the repository), Permission, IO (the repository cannot be reached), NoSpace, Unsupported (no git).
func Import(ctx context.Context, e *engine.Engine, q ImportRequest) (Made, error) {
	if err := q.Source.check(); err != nil {
		return Made{}, err
	}

	m := &maker{e: e, op: opImport, golden: q.Golden, source: q.Source, env: q.Env, tracker: q.Tracker,
		publish: engine.PublishRequest{Keep: q.Keep, Overlay: q.Overlay}}
	ctx, unlock, waited, err := e.LockSource(ctx, q.Golden, q.Tracker)
	if err != nil {
		return Made{}, err
	}
	defer unlock()

	// Find out whether there is a golden to begin with.
	text, current, err := e.GoldenSource(ctx, q.Golden, q.Tracker)
	switch {
	case errs.Is(err, errs.NotFound):
		m.fresh = true
	case err != nil:
		return Made{}, err
	case waited && !q.Update: // another process has just made it
		was, err := ParseSource(opImport, q.Golden.String(), text)
		if err == nil && was.URL == q.Source.URL {
			return Made{Info: current, URL: was.URL, Commit: commitOf(current), Unchanged: true}, nil
		}
		fallthrough
	case !q.Update:
		return Made{}, errs.New(errs.Exists, opImport, q.Golden.String(), "golden %q already exists", q.Golden).
			WithHint("fetch what is new with %s, or replace its source with %s", errs.Run("golden refresh", q.Golden.String()),
				errs.Param("update"))
	default:
		was, err := ParseSource(opImport, q.Golden.String(), text)
		m.fresh = err != nil || was.URL != q.Source.URL // nothing of another repository stays
		m.from, m.trusted = generation(current), madeHere(current, q.Source)
		m.force = true
	}

	return m.run(ctx)
}

// RefreshRequest says which golden to refresh.
type RefreshRequest struct {
	Golden  ref.Name
	Env     []string // as in ImportRequest
	Tracker *progress.Tracker
}

// Refresh fetches what is new in the repository of a golden, and makes it the next generation. It makes none if nothing
// is new. The golden stays as it is if this fails or is killed. Durable on return. Invalid (the golden does not come
// from git), NotFound, Conflict (somebody has published a generation in the meantime), and the errors of Import.
func Refresh(ctx context.Context, e *engine.Engine, q RefreshRequest) (Made, error) {
	ctx, unlock, _, err := e.LockSource(ctx, q.Golden, q.Tracker)
	if err != nil {
		return Made{}, err
	}
	defer unlock()

	text, current, err := e.GoldenSource(ctx, q.Golden, q.Tracker)
	if err != nil {
		return Made{}, err
	}

	source, err := ParseSource(opRefresh, q.Golden.String(), text)
	if err != nil {
		return Made{}, err
	}

	m := &maker{e: e, op: opRefresh, golden: q.Golden, source: source, env: q.Env, tracker: q.Tracker,
		from: generation(current), trusted: madeHere(current, source)}
	return m.run(ctx)
}

// CheckoutRequest says what to check out in clones of a golden.
type CheckoutRequest struct {
	Revision string   // a branch, tag, commit, or other reference of the repository
	Offline  bool     // fetch nothing
	Env      []string // as in ImportRequest
	Tracker  *progress.Tracker
}

// Checkout makes a request one for clones that are at a branch, tag or commit of the repository that their golden comes
// from. Of that, they fetch only what is missing. Invalid (the golden does not come from git), NotFound.
func Checkout(ctx context.Context, e *engine.Engine, q CheckoutRequest, clones *engine.CloneRequest) error {
	golden, err := ref.ParseName(opCheckout, clones.From.Name)
	if err != nil {
		return err
	}

	text, current, err := e.GoldenSource(ctx, golden, q.Tracker)
	if err != nil {
		return err
	}

	source, err := ParseSource(opCheckout, golden.String(), text)
	if err != nil {
		return err
	}

	revision := q.Revision
	if strings.HasPrefix(revision, "-") || strings.ContainsAny(revision, " ~^:?*[\\") || revision == "" {
		return errs.New(errs.Invalid, opCheckout, revision, "not the name of a branch, tag or commit")
	}

	// Only of the current generation is it known who made it, and another may be published at any time.
	if clones.From.At == "" {
		clones.From = generation(current)
	}
	trusted := clones.From == generation(current) && madeHere(current, source)

	clones.Prepare = func(ctx context.Context, name, dir string) error {
		r := &repository{op: opCheckout, name: name, dir: dir, source: source, env: q.Env, tracker: q.Tracker}
		if err := r.makeSafe(ctx, trusted); err != nil {
			return err
		}
		return r.checkout(ctx, revision, q.Offline)
	}
	return nil
}

// generation returns the reference of a generation.
func generation(g engine.Info) ref.Ref {
	return ref.Ref{Name: g.Golden, At: strconv.Itoa(g.Generation)}
}

// commitMark separates the URL from the commit in the origin of a generation.
const commitMark = "#"

// madeHere reports whether a generation was made by Import or Refresh from the source, and not published from a volume,
// in which a session may have changed the repository.
func madeHere(g engine.Info, s Source) bool { return strings.HasPrefix(g.Origin, s.URL+commitMark) }

// commitOf returns the commit of a generation that was made here.
func commitOf(g engine.Info) string {
	return g.Origin[strings.LastIndex(g.Origin, commitMark)+1:]
}

// maker makes one generation.
type maker struct {
	e       *engine.Engine
	op      string
	golden  ref.Name
	from    ref.Ref // the generation to begin with, unless fresh
	source  Source
	env     []string
	fresh   bool // begin with an empty directory
	trusted bool // nobody has changed the current generation
	force   bool // make a generation even if nothing is new
	tracker *progress.Tracker
	publish engine.PublishRequest

	out Made
}

// run fills a volume from the source, publishes it, and destroys it.
func (m *maker) run(ctx context.Context) (Made, error) {
	programs := []string{"git"}
	if m.source.LFS {
		programs = append(programs, "git-lfs")
	}
	for _, name := range programs {
		if _, err := run.Look(name); err != nil {
			return Made{}, errs.Wrap(m.op, m.golden.String(), err)
		}
	}

	_, err := m.e.Run(ctx, engine.RunRequest{From: m.from, Empty: m.fresh, Do: m.fill, Tracker: m.tracker})
	m.out.URL = m.source.URL
	return m.out, err
}

// fill brings a mounted volume up to date, and publishes it.
func (m *maker) fill(ctx context.Context, vol engine.Info) error {
	r := &repository{op: m.op, name: m.golden.String(), dir: vol.Mountpoint, source: m.source, env: m.env,
		tracker: m.tracker}
	var err error
	if m.fresh {
		err = r.create(ctx)
	} else {
		err = r.makeSafe(ctx, m.trusted)
	}
	if err != nil {
		return err
	}

	// Fetch, and check the default branch out.
	before, err := r.state(ctx)
	if err != nil {
		return err
	}

	if m.out.Branch, err = r.update(ctx); err != nil {
		return err
	}

	if !m.fresh && !m.trusted { // nothing that a session left stays
		m.source.Prepared = ""
		if err := r.clean(ctx); err != nil {
			return err
		}
	}

	after, err := r.state(ctx)
	if err != nil {
		return err
	}

	if m.out.Commit, err = r.head(ctx); err != nil {
		return err
	}

	if before == after && m.trusted && !m.force {
		_, m.out.Info, err = m.e.GoldenSource(ctx, m.golden, m.tracker)
		m.out.Unchanged = true
		return err
	}

	if err := r.settle(ctx); err != nil {
		return err
	}

	if err := m.prepare(ctx, r); err != nil {
		return err
	}

	return m.publishVolume(ctx, vol)
}

// publishVolume makes the volume the next generation.
func (m *maker) publishVolume(ctx context.Context, vol engine.Info) error {
	name, err := ref.ParseName(m.op, vol.Name)
	if err != nil {
		return err
	}

	text, err := m.source.encode()
	if err != nil {
		return err
	}

	q := m.publish
	q.Golden, q.Volume, q.Source, q.Tracker = m.golden, name, &text, m.tracker
	q.From = m.source.URL + commitMark + m.out.Commit
	q.Force = m.fresh
	done, err := m.e.Publish(ctx, q)
	m.out.Info, m.out.Removed = done.Info, done.Removed
	return err
}

// prepare runs the command that prepares the work tree, unless the files that it depends on are those of the last time.
func (m *maker) prepare(ctx context.Context, r *repository) error {
	s := &m.source
	if s.Prepare == "" {
		return nil
	}

	sum, err := s.prepareSum(r.dir)
	if err != nil {
		return errs.Wrap(m.op, r.name, err)
	}
	if len(s.PrepareKey) > 0 && sum == s.Prepared && !m.fresh {
		return nil
	}

	m.tracker.Start("preparing: "+s.Prepare, 0, 0)
	o := run.Options{Dir: r.dir, Env: r.environment()}
	if _, _, err := o.Output(ctx, "sh", "-c", s.Prepare); err != nil {
		return r.problem("the command to prepare it failed", err)
	}

	s.Prepared, m.out.Prepared = sum, true
	return nil
}
