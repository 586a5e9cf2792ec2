package engine

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/base32"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"
	"slices"
	"strings"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/linux/extent"

	"golang.org/x/sys/unix"
)

// Operations of marks: an object is read to be sent elsewhere, or made of received
// content.
const (
	opPush = "push"
	opPull = "pull"
)

// Transfer is a pool for those who send its points elsewhere and receive others: an engine, with what only they need.
type Transfer struct{ *Engine }

// Transfer returns what sends and receives points.
func (e *Engine) Transfer() *Transfer { return &Transfer{e} }

// Begin makes all calls with the context that it returns one operation, named op, until end is called with its error:
// they have that name in events and in the log, and Shutdown lets all of them happen.
func (e *Transfer) Begin(ctx context.Context, op string) (_ context.Context, end func(*error)) {
	return e.ledger.Begin(ctx, op)
}

// Point is one immutable state: a snapshot of a volume, or a generation of a golden, maybe one that was removed while
// overlays needed it.
type Point struct {
	ID          driver.ObjectID
	Ref         string          // "web@3", "job@before"
	Volume      string          // name of the volume or golden
	Former      []string        // names that the volume or golden had before, the last one first
	Name        string          // of the snapshot, or the number of the generation
	Golden      bool            // it is a generation
	Lineage     driver.ObjectID // shared by all points of one volume or golden, and never by others in this pool
	FS          driver.FS
	SizeBytes   int64  // of the block device; 0 of native
	Sector      uint32 // logical sector size of the block device, bytes; 0 of native
	CreatedAt   time.Time
	Place       int64              // later states of the volume or golden have larger ones, whatever clocks say
	Consistency driver.Consistency // of a snapshot
	// origin of a snapshot's volume, or the volume that a generation was published from; "" if imported
	OriginRef string
	OriginID  driver.ObjectID // of the origin; it may no longer exist
	BaseRef   string          // of a snapshot: the generation that it descends from, "web@3"; "" if none
	BaseID    driver.ObjectID // of the base; "" if it no longer exists
	LowerID   driver.ObjectID // of the generation that it is an overlay on; "" if it is none
}

// IsOverlay reports whether the point holds only the changes to its lower layer.
func (p Point) IsOverlay() bool { return p.LowerID != "" }

// AsLayer returns a generation as the only one of a golden of its own, whose name no other has.
func (p Point) AsLayer() Point {
	const suffix, idLength = ".layer-", 8
	name := p.Volume[:min(len(p.Volume), ref.MaxNameBytes-len(suffix)-idLength)]
	p.Volume = strings.TrimRight(name, ".") + suffix + strings.ToLower(string(p.ID[:idLength]))
	p.Lineage, p.Former = p.ID, nil
	return p
}

// Point describes a snapshot or generation; the name of a golden stands for its current generation. It returns NotFound
// or Invalid (a volume, which changes: take a snapshot first).
func (e *Transfer) Point(ctx context.Context, r ref.Ref) (Point, error) {
	var p Point
	err := e.cat.View(ctx, func(tx *catalog.Tx) error {
		row, err := tx.Resolve(opPush, r)
		if err != nil {
			return err
		}
		p, err = e.pointOf(tx, row)
		return err
	})
	return p, err
}

// PointByID is Point for the ID of an object.
func (e *Transfer) PointByID(ctx context.Context, id driver.ObjectID) (Point, error) {
	var p Point
	err := e.cat.View(ctx, func(tx *catalog.Tx) error {
		row, err := tx.ResolvePoint(opPush, id)
		if err != nil {
			return err
		}
		p, err = e.pointOf(tx, row)
		return err
	})
	return p, err
}

// Points lists the points of a volume or golden, the oldest first. It returns NotFound.
func (e *Transfer) Points(ctx context.Context, volume ref.Name) ([]Point, error) {
	name := volume.String()
	var out []Point
	err := e.cat.View(ctx, func(tx *catalog.Tx) error {
		_, isGolden, err := tx.ResolveGolden(opPush, name)
		if err != nil {
			return err
		}

		var rows []catalog.Row
		if isGolden {
			rows, err = tx.Generations(name)
		} else {
			var vol catalog.Row
			if vol, err = tx.Resolve(opPush, volume.Ref()); err == nil {
				rows, err = tx.Snapshots(vol.Lineage())
			}
		}

		if err != nil {
			return err
		}

		for _, row := range rows {
			p, err := e.pointOf(tx, row)
			if err != nil {
				return err
			}
			out = append(out, p)
		}

		return nil
	})

	return out, err
}

// pointOf describes the snapshot or generation of a row. It returns Invalid for a volume, and Damaged.
func (e *Transfer) pointOf(tx *catalog.Tx, row catalog.Row) (Point, error) {
	p := Point{
		ID: row.ID, Ref: tx.RefOf(row), Name: row.Name, FS: row.FS, SizeBytes: row.SizeBytes, Sector: row.Sector,
		CreatedAt: row.CreatedAt, Place: row.Order, Consistency: row.Consistency, LowerID: row.Lower,
	}
	switch row.Kind {
	case driver.Generation:
		g, ok, err := tx.Golden(row.Golden)
		if err != nil {
			return p, err
		}
		if !ok {
			return p, errs.New(errs.Damaged, opPush, p.Ref, "its golden is missing from the catalogue").
				WithHint("check the pool with %s", errs.Run("fsck"))
		}
		p.Volume, p.Name, p.Golden, p.Place = row.Golden, itoa(row.Generation), true, int64(row.Generation)
		if p.Lineage, p.Former, err = e.goldenLineage(tx, g); err != nil {
			return p, err
		}
		p.OriginRef, p.OriginID = row.Origin, row.OriginID
	case driver.Layer:
		p.Name, p.Golden, p.Place = itoa(row.Generation), true, int64(row.Generation)
		if err := e.goldenOfRemoved(tx, row, &p); err != nil {
			return p, err
		}
	case driver.Snapshot:
		vol, ok, err := tx.LineageHolder(row.Volume)
		if err != nil {
			return p, err
		}

		if !ok {
			return p, errs.New(errs.Damaged, opPush, p.Ref, "its volume is missing from the catalogue").
				WithHint("check the pool with %s", errs.Run("fsck"))
		}

		p.Volume, p.Lineage = vol.Name, row.Volume
		if p.Former, err = tx.FormerNames(vol); err != nil {
			return p, err
		}
		p.OriginRef, p.OriginID = vol.Origin, vol.OriginID
		if row.Golden == "" {
			break
		}

		p.BaseRef = ref.Generation(row.Golden, row.Generation)
		base, ok, err := tx.Generation(row.Golden, row.Generation)
		if err != nil {
			return p, err
		}
		if ok {
			p.BaseID = base.ID
		}
	default:
		return p, errs.New(errs.Invalid, opPush, p.Ref, "it is a volume, not a snapshot or generation").
			WithHint("take a snapshot of it with %s", errs.Run("snapshot", p.Ref))
	}

	return p, nil
}

// goldenOfRemoved fills in the golden that a removed generation is pushed as a part of: its own, or, if that was
// removed as well, one that is only for this generation, because another golden may have the name by now.
func (e *Transfer) goldenOfRemoved(tx *catalog.Tx, row catalog.Row, p *Point) error {
	g, ok, err := tx.Golden(row.Golden)
	if err != nil {
		return err
	}

	if ok && row.Generation < g.Next && !row.CreatedAt.Before(g.CreatedAt) {
		_, taken, err := tx.Generation(row.Golden, row.Generation)
		if err != nil || !taken {
			p.Volume = row.Golden
			if err == nil {
				p.Lineage, p.Former, err = e.goldenLineage(tx, g)
			}
			return err
		}
	}

	alone := Point{ID: row.ID, Volume: row.Golden}.AsLayer()
	p.Volume, p.Lineage = alone.Volume, alone.Lineage
	return nil
}

// goldenLineage returns the lineage of a golden, and its former names. The lineage stays when the golden is renamed. It
// differs between goldens that have had the same name one after the other, as it depends on the creation time, which a
// rebuild can recover; the first name, on which it depends too, is the present one after a rebuild.
func (e *Transfer) goldenLineage(tx *catalog.Tx, g catalog.Golden) (driver.ObjectID, []string, error) {
	former, err := tx.FormerGoldenNames(g)
	first := g.Name
	if len(former) > 0 {
		first = former[len(former)-1]
	}
	sum := sha256.Sum256(fmt.Appendf(nil, "golden\x00%s\x00%s\x00%d", e.pool.Config.ID, first, g.CreatedAt.UnixNano()))
	text := base32.HexEncoding.WithPadding(base32.NoPadding).EncodeToString(sum[:16])
	return driver.ObjectID(strings.ToLower(text)), former, err
}

// Names are the names of a volume or golden.
type Names struct {
	Lineage driver.ObjectID // lineage of its points
	All     []string        // the name that it has, and those that it had before, the last one first
}

// NamesOf returns the names of a volume or golden. It returns NotFound.
func (e *Transfer) NamesOf(ctx context.Context, name string) (n Names, err error) {
	err = e.cat.View(ctx, func(tx *catalog.Tx) error {
		var former []string
		g, isGolden, err := tx.ResolveGolden(opPush, name)
		if err != nil {
			return err
		}
		if isGolden {
			n.Lineage, former, err = e.goldenLineage(tx, g)
		} else {
			var vol catalog.Row
			if vol, err = tx.ResolveVolume(opPush, name); err != nil {
				return err
			}
			n.Lineage = vol.Lineage()
			former, err = tx.FormerNames(vol)
		}
		n.All = append([]string{name}, former...)
		return err
	})
	return n, err
}

// Range is a range of an image, in bytes.
type Range = extent.Range

// Image is the content of a snapshot or generation that is a block image. It can be used
// concurrently until it is closed.
type Image struct {
	R         io.ReaderAt
	SizeBytes int64
	// Ranges yields the ranges to read, in order. They do not overlap, and begin and
	// end at multiples of 4096 bytes, or at the end of the image. Ranges that are Zero
	// need not be read. It may be iterated several times. An error ends it.
	Ranges iter.Seq2[Range, error]
	// Exact means that Ranges contain everything that may differ from the base: all
	// other bytes are as in the base, or zero beyond its end. Otherwise there is no
	// base, or it could not be compared without reading: then Ranges contain
	// everything that may not be zero, and all other bytes are zero.
	Exact bool
	// Base is the content of the base if Exact is set, and nil otherwise. Reading beyond its end returns io.EOF.
	Base io.ReaderAt

	closers []func() error // the last first
}

// ReadRequest says which point to read, in order to send it elsewhere.
type ReadRequest struct {
	Point driver.ObjectID // a snapshot or generation
	Base  driver.ObjectID // another point: read only the differences from it; "": read everything

	IfChanged bool // of SendTree: if nothing differs, write nothing and return ErrUnchanged
}

// OpenImage opens the image of a snapshot or generation, with the ranges that differ from its base. Neither can be
// destroyed before the image is closed: an attempt waits, and reports that the object is being pushed. If the driver
// shares blocks, the differences are found without reading data, at a cost that grows with the number of extents (see
// internal/linux/extent). The image can be used until ctx ends. It returns NotFound, Invalid (a volume), Unsupported (a
// tree: see SendStream) or InUse.
func (e *Transfer) OpenImage(ctx context.Context, q ReadRequest) (*Image, error) {
	ctx, end := e.ledger.Begin(ctx, opPush)
	m := &Image{}
	if err := e.openImage(ctx, q, m); err != nil {
		_ = m.Close()
		end(&err)
		return nil, err
	}

	m.closers = slices.Insert(m.closers, 0, func() error { end(nil); return nil }) // the first is called last
	return m, nil
}

// openImage fills in an image. Everything it opens is closed with the image, in reverse order.
func (e *Transfer) openImage(ctx context.Context, q ReadRequest, m *Image) error {
	if err := e.needRoot(opPush, string(q.Point)); err != nil {
		return err
	}

	h, err := e.ledger.Hold(ctx, opPush, q.Point, q.Base)
	if err != nil {
		return err
	}

	m.onClose(func() error { h.Release(ctx); return nil })
	if !h.Rows[0].FS.IsImage() {
		return errs.New(errs.Unsupported, opPush, h.Refs[0], "it is a tree of files, not an image")
	}

	// Open the image of the point: all its data is to be read.
	path, closePath, err := e.content.OpenPath(ctx, q.Point)
	if err != nil {
		return err
	}

	m.onClose(closePath)
	f, err := os.Open(path)
	if err != nil {
		return errs.Wrap(opPush, path, err)
	}

	m.onClose(f.Close)
	m.R, m.SizeBytes, m.Ranges = f, h.Rows[0].SizeBytes, wrapRangeErrors(ctx, h.Refs[0], extent.Data(ctx, f))

	if q.Base == "" || !h.Rows[1].FS.IsImage() || !e.caps.Sharing {
		return nil
	}

	// Compare its extents with those of the base: only the differences are to be read.
	w, err := e.drv.Attachment(ctx, q.Base)
	if err != nil || w.Block {
		return err
	}

	b, err := os.Open(w.Image)
	if err != nil {
		return errs.Wrap(opPush, h.Refs[1], err)
	}

	m.onClose(b.Close)
	err = extent.Comparable(b, f)
	if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EXDEV) {
		return nil
	}
	if err != nil {
		return errs.Wrap(opPush, h.Refs[0], err)
	}

	m.Ranges, m.Exact, m.Base = wrapRangeErrors(ctx, h.Refs[0], extent.Compare(ctx, b, f)), true, b
	return nil
}

func (m *Image) onClose(do func() error) { m.closers = append(m.closers, do) }

// Close releases the image. It may be called again.
func (m *Image) Close() error {
	var err error
	for _, do := range slices.Backward(m.closers) {
		err = cmp.Or(err, do())
	}
	m.closers = nil
	return err
}

// wrapRangeErrors wraps the errors of a sequence of ranges.
func wrapRangeErrors(ctx context.Context, what string, seq iter.Seq2[extent.Range, error]) iter.Seq2[Range, error] {
	return func(yield func(Range, error) bool) {
		for r, err := range seq {
			if err != nil && ctx.Err() != nil {
				err = ctx.Err()
			}
			if !yield(r, errs.Wrap(opPush, what, err)) {
				return
			}
		}
	}
}

// SendStream writes a snapshot or generation that is a tree to w, in the native format of the pool's driver: all of it,
// or the differences from its base. Neither can be destroyed before SendStream returns. It returns NotFound, Invalid (a
// volume), Unsupported (an image, or a driver that cannot send trees), InUse, and the errors of w.
func (e *Transfer) SendStream(ctx context.Context, q ReadRequest, w io.Writer) (err error) {
	ctx, end := e.ledger.Begin(ctx, opPush)
	defer end(&err)

	id, base := q.Point, q.Base
	if err := e.needRoot(opPush, string(id)); err != nil {
		return err
	}

	s, err := e.streamer(opPush, string(id))
	if err != nil {
		return err
	}

	h, err := e.ledger.Hold(ctx, opPush, id, base)
	if err != nil {
		return err
	}

	defer h.Release(ctx)

	for i, row := range h.Rows {
		if row.FS.IsImage() {
			return errs.New(errs.Unsupported, opPush, h.Refs[i], "it is an image, not a tree of files")
		}
	}

	return s.Send(ctx, id, base, w)
}

// PlanStream returns what is known in advance about the stream that SendStream would write for the same request. It is
// the zero value if the driver knows nothing. It returns NotFound or Invalid.
func (e *Transfer) PlanStream(ctx context.Context, q ReadRequest) (_ driver.StreamPlan, err error) {
	p, ok := e.drv.(driver.Planner)
	if !ok {
		return driver.StreamPlan{}, nil
	}
	for _, id := range []driver.ObjectID{q.Point, q.Base} {
		if id == "" {
			continue
		}
		if err := e.askForPoint(ctx, opPush, id); err != nil {
			return driver.StreamPlan{}, err
		}
	}
	ctx, end := e.ledger.Begin(ctx, opPush)
	defer end(&err)
	return p.Plan(ctx, q.Point, q.Base)
}

// ReceivesRaw reports whether this pool can hold trees that the filesystem of another pool has encrypted.
func (e *Transfer) ReceivesRaw() bool {
	_, ok := e.drv.(driver.Keyed)
	return ok
}

// Key returns the encryption key of a point; the zero value if the pool's filesystem does not encrypt it. It returns
// NotFound.
func (e *Transfer) Key(ctx context.Context, id driver.ObjectID) (driver.Key, error) {
	if err := e.askForPoint(ctx, opPush, id); err != nil {
		return driver.Key{}, err
	}
	return e.keyOf(ctx, id)
}

// keyOf returns the encryption key of an object; the zero value if the pool's filesystem does not encrypt it. NotFound.
func (e *Engine) keyOf(ctx context.Context, id driver.ObjectID) (driver.Key, error) {
	k, ok := e.drv.(driver.Keyed)
	if !ok {
		return driver.Key{}, nil
	}
	return k.Key(ctx, id)
}

// SamePoint reports whether a point is certainly the same as its base, so that there is nothing to send. It costs
// almost nothing: it returns false if the driver cannot tell cheaply. It returns NotFound.
func (e *Transfer) SamePoint(ctx context.Context, q ReadRequest) (_ bool, err error) {
	c, ok := e.drv.(driver.Comparer)
	if !ok || q.Base == "" || q.Base == q.Point {
		return false, nil
	}

	ctx, end := e.ledger.Begin(ctx, opPush)
	defer end(&err)
	h, err := e.ledger.Hold(ctx, opPush, q.Point, q.Base)
	if err != nil {
		return false, err
	}

	defer h.Release(ctx)
	return c.Same(ctx, q.Point, q.Base)
}

// streamer returns what sends and receives trees in the format of the driver. It returns Unsupported.
func (e *Transfer) streamer(op, what string) (driver.Streamer, error) {
	s, ok := e.drv.(driver.Streamer)
	if !ok {
		return nil, errs.New(errs.Unsupported, op, what, "the %s driver has no native stream format for trees", e.caps.Name).
			WithHint("push the tree with %s, which every driver with trees can read", errs.Run("push", errs.Param("portable")))
	}
	return s, nil
}

// Link says that a local object has the content that a manifest in a repository
// describes, so a push can compare with it, and a pull can clone it. Links are hints.
// They are lost with the object, or when the catalogue is rebuilt, and without them more
// data is read.
type Link struct {
	Repo     string // ID of the repository
	Manifest string // ID
	Object   driver.ObjectID
}

// Links lists the links into a repository, the oldest first.
func (e *Transfer) Links(ctx context.Context, repo string) ([]Link, error) {
	var out []Link
	err := e.cat.View(ctx, func(tx *catalog.Tx) error {
		points, err := tx.RemotePoints(repo)
		for _, p := range points {
			out = append(out, Link{Repo: p.Repo, Manifest: p.Manifest, Object: p.Object})
		}
		return err
	})
	return out, err
}

// PutLink adds a link, which may exist already. It is not durable by itself. It returns NotFound if the object does not
// exist.
func (e *Transfer) PutLink(ctx context.Context, l Link) error {
	return e.cat.Update(ctx, catalog.Soft, func(tx *catalog.Tx) error { return putLink(tx, l) })
}

func putLink(tx *catalog.Tx, l Link) error {
	if l.Repo == "" || l.Manifest == "" || l.Object == "" {
		return errs.New(errs.Invalid, "link", l.Manifest, "a link needs a repository, a manifest and an object")
	}
	return tx.PutRemotePoint(catalog.RemotePoint{Repo: l.Repo, Manifest: l.Manifest, Object: l.Object, At: time.Now()})
}

// DropLink removes the links to one manifest. It is not an error if there are none.
func (e *Transfer) DropLink(ctx context.Context, repo, manifest string) error {
	return e.cat.Update(ctx, catalog.Soft, func(tx *catalog.Tx) error { return tx.DropRemotePoint(repo, manifest) })
}

// DropLinks removes the links and heads of a repository. It is not an error if there are none.
func (e *Transfer) DropLinks(ctx context.Context, repo string) error {
	return e.cat.Update(ctx, catalog.Soft, func(tx *catalog.Tx) error { return tx.DropRemote(repo) })
}

// RemoteHead is what the pool remembers of a head in a repository. Without it, pando
// cannot notice that a head was lost or put back to an older state.
type RemoteHead struct {
	Repo     string          // ID of the repository
	Name     string          // of the head
	Lineage  driver.ObjectID // of the local volume or golden; "": the head was only read
	Epoch    uint64          // the highest seen
	Manifest string          // ID of the manifest last pushed or pulled; "": the head was only read
	At       time.Time
	NextSeq  uint64 // number of the next point, the highest seen with Epoch; 0: unknown
}

// RemoteHeads lists the heads of a repository that the pool remembers, by name.
func (e *Transfer) RemoteHeads(ctx context.Context, repo string) ([]RemoteHead, error) {
	var out []RemoteHead
	err := e.cat.View(ctx, func(tx *catalog.Tx) error {
		heads, err := tx.RemoteHeads(repo)
		for _, h := range heads {
			out = append(out, RemoteHead(h))
		}
		return err
	})
	return out, err
}

// PutRemoteHead remembers a head that was pushed or pulled; a zero At stands for now.
// The epoch and the next point never decrease. Not durable by itself.
func (e *Transfer) PutRemoteHead(ctx context.Context, h RemoteHead) error {
	if h.Repo == "" || h.Name == "" {
		return errs.New(errs.Invalid, "link", h.Name, "a head needs a repository and a name")
	}
	if h.At.IsZero() {
		h.At = time.Now()
	}
	return e.cat.Update(ctx, catalog.Soft, func(tx *catalog.Tx) error { return tx.PutRemoteHead(catalog.RemoteHead(h)) })
}

// SeeRemoteHeads remembers epochs and next points of heads of a repository that were
// only read. Not durable by itself.
func (e *Transfer) SeeRemoteHeads(ctx context.Context, repo string, heads []RemoteHead) error {
	if len(heads) == 0 {
		return nil
	}

	now := time.Now()
	return e.cat.Update(ctx, catalog.Soft, func(tx *catalog.Tx) error {
		for _, h := range heads {
			seen := catalog.RemoteHead{Repo: repo, Name: h.Name, Epoch: h.Epoch, NextSeq: h.NextSeq, At: now}
			if err := tx.PutSeenRemoteHead(seen); err != nil {
				return err
			}
		}
		return nil
	})
}

// DropRemoteHead forgets a head. It is not an error if there is none.
func (e *Transfer) DropRemoteHead(ctx context.Context, repo, name string) error {
	return e.cat.Update(ctx, catalog.Soft, func(tx *catalog.Tx) error { return tx.DropRemoteHead(repo, name) })
}
