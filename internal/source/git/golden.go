package git

import (
	"context"
	"slices"
	"strconv"
	"strings"

	"pando/internal/api"
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
	Env     []string              // environment of git and of the command that prepares it
	Update  bool                  // whether it is the next generation of a golden, from this source from now on
	Keep    *int                  // newest generations that the golden keeps from now on, 0: all; nil: as before
	Overlay *driver.OverlayPolicy // policy of the golden from now on; nil: as before
	Labels  map[string]string     // labels to add to those of the golden
}

// Made is the result of Import and Refresh. Its JSON form is stable.
type Made struct {
	api.Object
	URL string `json:"url"` // address of the repository
	// branch that is checked out; absent: none, as HEAD is a commit there
	Branch    string `json:"branch,omitempty"`
	Commit    string `json:"commit"`    // commit that is checked out
	Unchanged bool   `json:"unchanged"` // nothing was new: there is no new generation
	Prepared  bool   `json:"prepared"`  // the command to prepare it ran
	// references to older generations that the golden no longer keeps
	Removed []string `json:"removed,omitempty"`
}

// Import makes a golden of a repository, with all branches and tags, and its default branch checked out. With Update it
// is like Refresh, but from another source. Nothing is left of it if it fails or is killed. Durable on return. Invalid,
// Exists, NotFound (the repository), Permission, IO (the repository cannot be reached), NoSpace, Unsupported (no git).
func Import(ctx context.Context, e *engine.Engine, q ImportRequest) (Made, error) {
	if err := q.Source.check(); err != nil {
		return Made{}, err
	}

	m := &maker{e: e, op: opImport, golden: q.Golden, source: q.Source, env: q.Env,
		publish: engine.PublishRequest{Keep: q.Keep, Overlay: q.Overlay, Labels: q.Labels}}
	ctx, unlock, waited, err := e.LockSource(ctx, q.Golden)
	if err != nil {
		return Made{}, err
	}
	defer unlock()

	// Find out whether there is a golden to begin with.
	was, err := e.GoldenSource(ctx, q.Golden)
	switch {
	case errs.Is(err, errs.NotFound):
		m.expect = &api.Object{}
	case err != nil:
		return Made{}, err
	case waited && !q.Update: // another process has just made it
		s, err := ParseSource(opImport, q.Golden.String(), was.Source)
		if mirror, ok := newestMirror(was, q.Source); err == nil && ok && s.asks(q.Source) {
			return Made{Object: mirror.Object, URL: s.URL, Commit: commitOf(mirror.Object), Unchanged: true}, nil
		}
		fallthrough
	case !q.Update:
		return Made{}, errs.New(errs.Exists, opImport, q.Golden.String(), "golden %q already exists", q.Golden).
			WithHint("fetch what is new with %s, or replace its source with %s", errs.Run("golden refresh", q.Golden.String()),
				errs.Param("update"))
	default:
		m.force = true
		// Nothing of another repository stays, and options may need more than what is here.
		if s, err := ParseSource(opImport, q.Golden.String(), was.Source); err == nil && s.fetches(q.Source) {
			m.begin(was)
		}
	}

	return m.run(ctx)
}

// RefreshRequest says which golden to refresh.
type RefreshRequest struct {
	Golden ref.Name
	Env    []string // environment of the user, as in ImportRequest
}

// Refresh fetches what is new in the repository of a golden, and makes it the next generation. It makes none if nothing
// is new. It continues the newest generation that it or Import made: git never runs in what a session could write to.
// Published generations stay, but nothing of them is in the new one. The golden stays as it is if this fails or is
// killed. Durable on return. Invalid (the golden does not come from git), NotFound, Conflict (somebody has published a
// generation in the meantime), and the errors of Import.
func Refresh(ctx context.Context, e *engine.Engine, q RefreshRequest) (Made, error) {
	ctx, unlock, _, err := e.LockSource(ctx, q.Golden)
	if err != nil {
		return Made{}, err
	}
	defer unlock()

	m, err := refreshMaker(ctx, e, q)
	if err != nil {
		return Made{}, err
	}
	return m.run(ctx)
}

// refreshMaker looks up what a refresh begins with, and returns the maker of the next generation. NotFound, Invalid.
func refreshMaker(ctx context.Context, e *engine.Engine, q RefreshRequest) (*maker, error) {
	was, err := e.GoldenSource(ctx, q.Golden)
	if err != nil {
		return nil, err
	}

	source, err := ParseSource(opRefresh, q.Golden.String(), was.Source)
	if err != nil {
		return nil, err
	}

	m := &maker{e: e, op: opRefresh, golden: q.Golden, source: source, env: q.Env}
	m.begin(was)
	m.expect = &was.Current
	m.force = m.from != generation(was.Current)
	return m, nil
}

// CheckoutRequest says what to check out in clones of a golden.
type CheckoutRequest struct {
	Revision string   // a branch, tag, commit, or other reference of the repository
	Offline  bool     // fetch nothing
	Env      []string // as in ImportRequest
}

// Checkout makes clones that are at a branch, tag or commit of the repository that their golden comes from. Of that,
// they fetch only what is missing. Invalid (the golden does not come from git, or the generation was published from a
// volume, in which a session could change the repository that git would run in), NotFound, and the kinds of
// engine.Clone.
func Checkout(
	ctx context.Context, e *engine.Engine, q CheckoutRequest, clones engine.CloneRequest,
) ([]api.Object, error) {
	prepare, err := planCheckout(ctx, e, q, &clones)
	if err != nil {
		return nil, err
	}
	return e.CloneAndPrepare(ctx, clones, prepare)
}

// planCheckout decides which generation to clone, and returns what prepares its clones.
func planCheckout(
	ctx context.Context, e *engine.Engine, q CheckoutRequest, clones *engine.CloneRequest,
) (engine.Prepare, error) {
	golden, err := ref.ParseName(opCheckout, clones.From.Name)
	if err != nil {
		return nil, err
	}

	was, err := e.GoldenSource(ctx, golden)
	if err != nil {
		return nil, err
	}

	source, err := ParseSource(opCheckout, golden.String(), was.Source)
	if err != nil {
		return nil, err
	}

	revision := q.Revision
	if !isRevision(revision) {
		return nil, errs.New(errs.Invalid, opCheckout, revision, "not the name of a branch, tag or commit")
	}

	mirror, err := mirrorToClone(was, source, clones.From)
	if err != nil {
		return nil, err
	}
	clones.From, clones.Object = generation(mirror), mirror.ID

	return func(ctx context.Context, name, dir string) error {
		r, err := openRepository(repository{op: opCheckout, name: name, dir: dir, source: source, env: q.Env})
		if err != nil {
			return err
		}
		if err := r.distrustIndex(ctx); err != nil {
			return err
		}
		return r.checkout(ctx, revision, q.Offline)
	}, nil
}

// isRevision reports whether a text may name a branch, a tag or a commit: see git help check-ref-format.
func isRevision(s string) bool {
	bad := s == "" || s == "@" || strings.ContainsAny(s, " ~^:?*[\\\t\n\x7f") || strings.HasPrefix(s, "-") ||
		strings.HasPrefix(s, "+") || strings.HasPrefix(s, "/") || strings.HasSuffix(s, "/") || strings.HasSuffix(s, ".")
	for _, part := range []string{"..", "//", "@{", "/.", ".lock/"} {
		bad = bad || strings.Contains(s+"/", part)
	}
	return !bad
}

// mirrorToClone returns the generation that a reference to a golden names, if git may run in clones of it. NotFound,
// Invalid.
func mirrorToClone(was engine.Sourced, s Source, from ref.Ref) (api.Object, error) {
	if from.At == "" {
		from = generation(was.Current)
	}
	n, ok := from.Generation()
	if !ok || !slices.Contains(was.Numbers, n) {
		return api.Object{}, errs.New(errs.NotFound, opCheckout, from.String(), "no generation has this number").
			WithHint("list generations with %s", errs.Run("golden show", from.Name))
	}
	if m, ok := was.Mirror(n); ok && madeOf(m, s) {
		return m.Object, nil
	}

	e := errs.New(errs.Invalid, opCheckout, from.String(),
		"it was not made from the repository by Pando, but published, imported or pulled: git does not run in it, as a "+
			"session may have changed what git obeys")
	if m, ok := newestMirror(was, s); ok {
		return api.Object{}, e.WithHint("clone the newest generation of the repository with %s, or this one without %s",
			errs.Run("clone", generation(m.Object).String(), errs.Param("git-ref"), "REVISION"), errs.Param("git-ref"))
	}
	return api.Object{}, e.WithHint("make a generation of the repository with %s, or clone this one without %s",
		errs.Run("golden refresh", from.Name), errs.Param("git-ref"))
}

// generation returns the reference of a generation.
func generation(g api.Object) ref.Ref {
	return ref.Ref{Name: g.Golden, At: strconv.Itoa(g.Generation)}
}

// commitMark separates the URL from the commit in the origin of a generation.
const commitMark = "#"

// madeOf reports whether a mirror was made from the repository of a source.
func madeOf(m engine.Mirror, s Source) bool {
	url, _, marked := cutLast(m.Origin, commitMark)
	return marked && url == s.URL
}

// newestMirror returns the newest generation that Import or Refresh made from the repository of a source.
func newestMirror(was engine.Sourced, s Source) (engine.Mirror, bool) {
	for _, m := range was.Mirrors {
		if madeOf(m, s) {
			return m, true
		}
	}
	return engine.Mirror{}, false
}

// commitOf returns the commit of a generation that was made here.
func commitOf(g api.Object) string {
	_, commit, _ := cutLast(g.Origin, commitMark)
	return commit
}

// cutLast is strings.Cut at the last separator: a URL may contain others.
func cutLast(s, sep string) (before, after string, found bool) {
	i := strings.LastIndex(s, sep)
	if i < 0 {
		return s, "", false
	}
	return s[:i], s[i+len(sep):], true
}

// maker makes one generation.
type maker struct {
	e       *engine.Engine
	op      string
	golden  ref.Name
	from    ref.Ref     // the generation to begin with, a mirror; the zero Ref: an empty directory
	object  string      // its ID
	expect  *api.Object // see engine.Filled
	source  Source
	env     []string
	force   bool // make a generation even if nothing is new
	publish engine.PublishRequest

	out Made
}

// begin chooses the generation to begin with: the newest that was made from the repository. Without one, which users
// may have removed, everything is fetched again.
func (m *maker) begin(was engine.Sourced) {
	mirror, ok := newestMirror(was, m.source)
	if ok {
		m.from, m.object = generation(mirror.Object), mirror.ID
	}
	if m.source.PreparedIn != mirror.Volume { // a newer one has been removed
		m.source.Prepared = ""
	}
}

// fresh reports whether the maker begins with an empty directory.
func (m *maker) fresh() bool { return m.from == ref.Ref{} }

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

	_, err := m.e.RunFunc(ctx, engine.RunRequest{From: m.from, Object: m.object, Empty: m.fresh()}, m.fill)
	m.out.URL = m.source.URL
	return m.out, err
}

// fill brings a mounted volume up to date, and publishes it.
func (m *maker) fill(ctx context.Context, vol api.Object) error {
	r, err := openRepository(repository{op: m.op, name: m.golden.String(), dir: vol.Mountpoint, source: m.source,
		env: m.env})
	if err != nil {
		return err
	}

	if m.fresh() {
		err = r.create(ctx)
	} else if err = r.configure(ctx); err == nil {
		err = r.distrustIndex(ctx)
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

	after, err := r.state(ctx)
	if err != nil {
		return err
	}

	if m.out.Commit, err = r.head(ctx); err != nil {
		return err
	}

	if before == after && !m.force && !m.fresh() {
		was, err := m.e.GoldenSource(ctx, m.golden)
		if err == nil && was.Current.ID != m.expect.ID {
			err = errs.New(errs.Conflict, m.op, r.name, "%s has been published in the meantime", generation(was.Current)).
				WithHint("try again")
		}
		m.out.Object, m.out.Unchanged = was.Current, true
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
func (m *maker) publishVolume(ctx context.Context, vol api.Object) error {
	name, err := ref.ParseName(m.op, vol.Name)
	if err != nil {
		return err
	}

	m.source.PreparedIn = vol.ID
	text, err := m.source.encode()
	if err != nil {
		return err
	}

	q := m.publish
	q.Golden, q.Volume = m.golden, name
	q.Filled = &engine.Filled{Source: text, Origin: m.source.URL + commitMark + m.out.Commit, Current: m.expect}
	done, err := m.e.Publish(ctx, q)
	m.out.Object, m.out.Removed = done.Object, done.Removed
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
	if len(s.PrepareKey) > 0 && sum == s.Prepared && !m.fresh() {
		return nil
	}

	progress.From(ctx).StartOf(progress.Preparing, s.Prepare, 0, 0)
	o := run.Options{Dir: r.dir, Env: r.environment()}
	if _, _, err := o.Output(ctx, "sh", "-c", "exec >&2\n"+s.Prepare); err != nil { // all output, in its order
		return r.prepareFailed(err)
	}

	s.Prepared, m.out.Prepared = sum, true
	return nil
}
