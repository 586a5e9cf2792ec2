// Package users is what people and programs do with a pool through a service. Root may do everything. Others do what
// the policy allows: they get volumes of their own, as many and for as long as it says, mounted in a directory that
// only they can reach, where the files belong to them. The context of a call says who asks (package principal).
package users

import (
	"context"
	"errors"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/principal"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine"
	"pando/internal/linux/kernel"
	"pando/internal/service/listing"
	"pando/internal/service/policy"
)

// Users does what users ask for. Its methods may be called concurrently.
type Users struct {
	e      *engine.Engine
	policy *policy.Policy
	dir    string

	making sync.Map // uid of a user: *sync.Mutex, held while a volume is made for them
}

// New makes a pool ask a policy about all calls from now on (nil: only root may do anything), and returns what users do
// with it. The volumes of each user other than root are mounted below DIR/UID. dir belongs to root, and nobody else can
// write to it.
func New(e *engine.Engine, p *policy.Policy, dir string) *Users {
	e.SetPolicy(p.Ask)
	return &Users{e: e, policy: p, dir: dir}
}

// CloneRequest says which volumes to make, and for how long.
type CloneRequest struct {
	From      ref.Ref
	Name      ref.Name
	Count     int           // 0: one, with the name; otherwise NAME-1 to NAME-COUNT
	SizeBytes int64         // 0: the size of the origin
	TTL       time.Duration // 0: the longest that is allowed
	Ephemeral bool
	Overlay   *bool // nil: as the golden says
	Labels    driver.Labels
	Mount     bool
	Dir       string // directory where it is mounted, for root only; "": the place of the user
}

// Clone makes volumes. Without a policy for it, its errors are those of [engine.Engine.Clone]. NoSpace: a limit of the
// policy is reached. Invalid: they would stay longer than allowed.
func (u *Users) Clone(ctx context.Context, q CloneRequest) ([]api.Object, error) {
	c := engine.CloneRequest{From: q.From, Name: q.Name, Count: q.Count, SizeBytes: q.SizeBytes, TTL: q.TTL,
		Ephemeral: q.Ephemeral, Labels: q.Labels, Mount: q.Mount, MountDir: q.Dir, GoldenDecides: q.Overlay == nil}
	c.Overlay = q.Overlay != nil && *q.Overlay

	who, rule, err := u.asker(ctx, "clone", q.Name.String())
	if err != nil {
		return nil, err
	}
	if rule == nil {
		if err := checkDir("clone", q.Dir); err != nil {
			return nil, err
		}
		return u.e.Clone(ctx, c)
	}

	if c.TTL, err = allowedTTL(q, rule.MaxTTL); err != nil {
		return nil, err
	}
	if q.Mount {
		if c.MountDir, c.May, err = u.place(who, "clone", q.Name.String(), q.Dir); err != nil {
			return nil, err
		}
		if q.Count == 0 {
			c.MountDir = filepath.Join(c.MountDir, q.Name.String())
		}
	}

	// Nobody can pass a limit by asking for several at once.
	one, _ := u.making.LoadOrStore(who.UID, &sync.Mutex{})
	one.(*sync.Mutex).Lock()
	defer one.(*sync.Mutex).Unlock()
	if err := u.checkLimits(ctx, who, rule, q); err != nil {
		return nil, err
	}
	return u.e.Clone(ctx, c)
}

// Mount mounts a volume at its owner's place, or for root at dir. NotFound, Invalid, InUse, Permission, Conflict,
// Unsupported (raw volumes, and where the kernel cannot show the files as those of the user).
func (u *Users) Mount(ctx context.Context, volume ref.Name, dir string) (api.Object, error) {
	who, rule, err := u.asker(ctx, "mount", volume.String())
	if err != nil {
		return api.Object{}, err
	}
	if err := checkDir("mount", dir); err != nil {
		return api.Object{}, err
	}
	q := engine.MountRequest{Volume: volume, Dir: dir}
	if rule != nil {
		if q.Dir, q.May, err = u.place(who, "mount", volume.String(), dir); err != nil {
			return api.Object{}, err
		}
		q.Dir = filepath.Join(q.Dir, volume.String())
	}
	return u.e.Mount(ctx, q)
}

// Umount unmounts a volume: see [engine.Engine.Umount].
func (u *Users) Umount(ctx context.Context, volume ref.Name, discard bool) (api.Object, error) {
	return u.e.Umount(ctx, engine.UmountRequest{Volume: volume, Discard: discard})
}

// Destroy destroys a volume with its snapshots. NotFound, InUse.
func (u *Users) Destroy(ctx context.Context, volume ref.Name) (engine.Destroyed, error) {
	r, err := u.e.Destroy(ctx, engine.DestroyRequest{What: []ref.Pattern{{Ref: ref.Ref{Name: volume.String()}}}})
	if r == nil || err != nil {
		return engine.Destroyed{}, err
	}
	if err := errors.Join(r.Failed...); err != nil || len(r.Destroyed) == 0 {
		return engine.Destroyed{}, err
	}
	return r.Destroyed[0], nil
}

// Volumes lists volumes: users see their own. Invalid.
func (u *Users) Volumes(ctx context.Context, q listing.Request) (listing.Page, error) {
	who, rule, err := u.asker(ctx, "ls", "")
	if err != nil {
		return listing.Page{}, err
	}
	if rule != nil {
		// Of many volumes only their own are read.
		q.Filters = append(q.Filters, "owner="+strconv.FormatUint(uint64(who.UID), 10))
		if q.Limit == 0 {
			q.Limit = math.MaxInt32
		}
	}
	return listing.List(ctx, u.e, q)
}

// Volume describes a volume. NotFound, Invalid.
func (u *Users) Volume(ctx context.Context, volume ref.Name) (api.Detail, error) {
	d, err := u.e.Show(ctx, ref.Ref{Name: volume.String()})
	if err == nil && d.Kind != api.KindVolume {
		err = errs.New(errs.Invalid, "show", volume.String(), "it is not a volume, but a golden")
	}
	return d, err
}

// Goldens lists goldens: users see what they may clone.
func (u *Users) Goldens(ctx context.Context) ([]api.Golden, error) {
	if _, _, err := u.asker(ctx, "golden ls", ""); err != nil {
		return nil, err
	}
	return u.e.Goldens(ctx)
}

// Golden describes a golden with its generations. NotFound, Invalid.
func (u *Users) Golden(ctx context.Context, golden ref.Name) (api.Golden, error) {
	d, err := u.e.Show(ctx, ref.Ref{Name: golden.String()})
	if err == nil && d.Kind != api.KindGeneration {
		err = errs.New(errs.Invalid, "show", golden.String(), "it is not a golden, but a volume")
	}
	if err != nil {
		return api.Golden{}, err
	}
	return u.e.Golden(ctx, d)
}

// Pool describes the pool, for root. Permission.
func (u *Users) Pool(ctx context.Context) (api.Pool, error) {
	return u.e.Pool(ctx, engine.PoolRequest{})
}

// asker returns who asks, and the rule that holds for them: nil for root. Permission.
func (u *Users) asker(ctx context.Context, op, name string) (who principal.Principal, r *policy.Rule, err error) {
	who, ok := principal.From(ctx)
	if !ok {
		return who, nil, errs.New(errs.Internal, op, name, "the call does not say who asks")
	}
	if who.UID == 0 {
		return who, nil, nil
	}
	if rule, ok := u.policy.For(who); ok {
		return who, &rule, nil
	}
	return who, nil, u.policy.Ask(engine.Access{Who: who, Op: op, Ref: name})
}

// allowedTTL returns how long volumes may stay: as long as asked for, or else as the rule says.
func allowedTTL(q CloneRequest, most time.Duration) (time.Duration, error) {
	switch {
	case most == 0:
		return q.TTL, nil
	case q.TTL == 0:
		return most, nil
	case q.TTL > most:
		return 0, errs.New(errs.Invalid, "clone", q.Name.String(), "your volumes may stay for %d s at most",
			int64(most/time.Second)).
			WithHint("use a shorter %s, or none", errs.Param("ttl"))
	}
	return q.TTL, nil
}

// checkLimits refuses volumes that a user may not have beside those that they have. NoSpace.
func (u *Users) checkLimits(ctx context.Context, who principal.Principal, r *policy.Rule, q CloneRequest) error {
	if r.MaxVolumes == 0 && r.MaxBytes == 0 {
		return nil
	}

	volumes, bytes := 0, int64(0)
	err := u.e.ScanVolumes(ctx, engine.VolumeScan{By: engine.ByName, Owner: &who.UID}, func(v api.Object) bool {
		volumes++
		bytes += v.ExclusiveBytes
		return true
	})
	if err != nil {
		return err
	}

	name, more := q.Name.String(), max(q.Count, 1)
	switch {
	case r.MaxVolumes > 0 && volumes+more > r.MaxVolumes:
		return errs.New(errs.NoSpace, "clone", name, "you have %s, and may have %d at most",
			errs.Plural(volumes, "volume"), r.MaxVolumes).
			WithHint("destroy volumes that you do not need: %s", errs.Run("ls"))
	case r.MaxBytes > 0 && bytes >= r.MaxBytes:
		return errs.New(errs.NoSpace, "clone", name, "your volumes take %d bytes, and may take %d at most",
			bytes, r.MaxBytes).
			WithHint("destroy volumes that you do not need: %s", errs.Run("ls"))
	}
	return nil
}

// place returns the directory in which the volumes of a user are mounted, and how. It makes the directory if it is not
// there. Permission: they want another one.
func (u *Users) place(
	who principal.Principal, op, name, dir string,
) (place string, may engine.Rights, err error) {
	if dir != "" {
		return "", may, errs.New(errs.Permission, op, name, "only root may choose where volumes are mounted").
			WithHint("name no directory: it is then mounted below %s", u.placeOf(who))
	}

	place = u.placeOf(who)
	if err := makePlace(place, who.UID); err != nil {
		return "", may, errs.Wrap(op, place, err)
	}
	owner := who.Owner()
	may.Owner = &owner
	return place, may, nil
}

// checkDir refuses a directory whose meaning would depend on where the service was started. Invalid.
func checkDir(op, dir string) error {
	if dir != "" && !filepath.IsAbs(dir) {
		return errs.New(errs.Invalid, op, dir, "the directory must be an absolute path")
	}
	return nil
}

func (u *Users) placeOf(who principal.Principal) string {
	return filepath.Join(u.dir, strconv.FormatUint(uint64(who.UID), 10))
}

// makePlace makes a directory that root alone may change, and a user may enter. Unsupported.
func makePlace(dir string, uid uint32) error {
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := kernel.ShareWith(f, uid); err != nil {
		return errs.New(errs.Unsupported, "share", dir, "with user %d: %w", uid, err)
	}
	return nil
}
