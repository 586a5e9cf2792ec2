package service

import (
	"context"
	"os"
	"slices"
	"strings"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine"
	"pando/internal/front/policy"

	"github.com/danielgtaylor/huma/v2"
)

// access says who may use a route, and what names in its requests lead to. Each route declares one. It does not matter
// to root and to holders of tokens, who may do everything.
type access int

const (
	_        access = iota
	rootOnly        // nobody else

	// Users whom the policy names, in scopes of these kinds:
	anyUser // requests name no objects; handlers choose what the caller may see
	reads   // requests only read: own volumes, goldens that the policy shows, with see_all the volumes of others
	makes   // own volumes, and goldens that the policy shows: these are only read
	changes // own volumes; goldens are refused
)

// grant is what the policy allows the caller of a request. nil: everything.
type grant struct {
	*policy.Grant
	owner driver.Owner
	Caller
}

type grantKey struct{}

// grantOf returns the grant of a request.
func grantOf(ctx context.Context) *grant {
	g, _ := ctx.Value(grantKey{}).(*grant)
	return g
}

// SetPolicy replaces the policy, for all requests from now on. nil: only root may use the service.
func (s *Service) SetPolicy(p *policy.Policy) {
	userNames.Clear() // users may have changed, too
	s.policy.Store(p)
}

// trusted reports whether a caller may do everything: root, the user that the service runs as, who could do the same
// without it, the service's own tasks, and holders of tokens, who got them from one of these.
func (c Caller) trusted() bool {
	return c.Token != "" || c.task != "" || c.Local && (c.UID == 0 || int(c.UID) == os.Geteuid())
}

// authorize decides what a caller may do with a route. Every route asks it before the body of a request is read.
// Permission.
func (s *Service) authorize(c Caller, id string, a access) (*grant, error) {
	if c.trusted() {
		return nil, nil
	}
	p := s.policy.Load()
	if p == nil || !c.Local {
		return nil, errs.New(errs.Permission, id, "", "%s may not use this service: without a policy, only root may", c).
			WithHint("run it as root, for example with sudo")
	}

	allowed := p.For(policy.User{UID: c.UID, Name: nameOf(c.UID), GIDs: c.Groups})
	if allowed == nil {
		return nil, errs.New(errs.Permission, id, "", "%s may not use this service: no rule of the policy names this user",
			c).
			WithHint("ask root for a rule, or run it as root, for example with sudo")
	}
	if a == rootOnly {
		return nil, errs.New(errs.Permission, id, "", "only root may do this").
			WithHint("run it as root, for example with sudo")
	}
	return &grant{Grant: allowed, owner: driver.Owner{UID: c.UID, GID: c.GID}, Caller: c}, nil
}

// admit refuses callers that may not use a route, before their request is read.
func (s *Service) admit(a access) func(huma.Context, func(huma.Context)) {
	return func(ctx huma.Context, next func(huma.Context)) {
		setRoute(ctx.Context(), ctx.Operation().OperationID)
		g, err := s.authorize(callerOf(ctx.Context()), ctx.Operation().OperationID, a)
		if err == nil {
			err = checkQuery(ctx)
		}
		if err != nil {
			writeProblem(s.api, ctx, problemOf(err))
			return
		}
		if g != nil {
			ctx = huma.WithContext(ctx, g.in(ctx.Context(), a))
		}
		next(ctx)
	}
}

// still returns the context of a request that lasts, with what the policy allows its caller now. Permission.
func (s *Service) still(ctx context.Context, id string, a access) (context.Context, error) {
	g, err := s.authorize(callerOf(ctx), id, a)
	return g.in(ctx, a), err
}

// in returns a context in which the engine knows the limits of the caller.
func (g *grant) in(ctx context.Context, a access) context.Context {
	if g == nil {
		return ctx
	}
	return engine.Within(context.WithValue(ctx, grantKey{}, g), engine.Scope{UID: g.UID, All: g.SeeAll, Reads: a == reads,
		Owned: a == changes, Golden: g.Sees, MaxVolumes: g.MaxVolumes, MaxBytes: g.MaxBytes,
		MaxTTL: g.MaxTTL})
}

// ownOnly returns a context in which the engine finds none but the caller's own volumes.
func (g *grant) ownOnly(ctx context.Context) context.Context {
	allowed := *g.Grant
	allowed.SeeAll = false
	return (&grant{Grant: &allowed, owner: g.owner, Caller: g.Caller}).in(ctx, reads)
}

// permission returns the error for what the policy does not allow.
func permission(op, what, format string, args ...any) *errs.Error {
	return errs.New(errs.Permission, op, what, format, args...)
}

// limitClone makes a clone that of the caller: it belongs to the caller, and has the limits of the policy. Permission,
// Invalid, NotFound.
func (g *grant) limitClone(op string, q *engine.CloneRequest) error {
	if g == nil {
		return nil
	}

	name := q.Name.String()
	switch {
	case !q.Owner.IsZero() && q.Owner != g.owner:
		return permission(op, name, "volumes that you make belong to you").WithHint("remove %s", errs.Param("owner"))
	case q.May != engine.Rights{}:
		return rightsRefused(op, name)
	case g.MaxTTL > 0 && q.TTL > g.MaxTTL:
		return permission(op, name, "the policy allows a ttl of at most %s (got %s)", g.MaxTTL, q.TTL).
			WithHint("use a shorter %s", errs.Param("ttl"))
	case g.MaxTTL > 0 && q.TTL == 0:
		q.TTL = g.MaxTTL
	}
	q.Owner = g.owner
	if !q.Mount {
		return nil
	}

	var err error
	q.MountDir, err = g.place(op, name, q.MountDir)
	return err
}

// limitMount holds a mount to the policy. Permission, Invalid, NotFound.
func (g *grant) limitMount(q *engine.MountRequest) (err error) {
	if g == nil {
		return nil
	}
	if q.May != (engine.Rights{}) {
		return rightsRefused("mount", q.Volume.String())
	}
	q.Dir, err = g.place("mount", q.Volume.String(), q.Dir)
	return err
}

func rightsRefused(op, name string) error {
	return permission(op, name, "volumes of users are always mounted with nosuid and nodev").
		WithHint("remove %s and %s", errs.Param("dev"), errs.Param("suid"))
}

// place returns where a volume of the caller is mounted.
func (g *grant) place(op, name, dir string) (string, error) {
	if len(g.Mounts) == 0 {
		return "", permission(op, name, "the policy does not allow you to mount volumes").
			WithHint("ask root for a directory in mounts of your rule")
	}
	return engine.PlaceForUser(op, g.owner, name, g.Mounts, dir)
}

// mayPin refuses pins, which keep volumes beyond their ttl, if the policy limits that. Permission.
func (g *grant) mayPin(r ref.Ref) error {
	if g == nil || g.MaxTTL == 0 {
		return nil
	}
	return permission("pin", r.String(), "the policy limits how long your volumes live, and a pin would keep them longer").
		WithHint("publish or export what you want to keep")
}

// mayImport is mayMake for an archive. Permission.
func (g *grant) mayImport(op, golden string, properties map[string]bool) error {
	if g != nil && !g.Import {
		return permission(op, golden, "the policy does not allow you to import archives").
			WithHint("ask root for import = true in your rule")
	}
	return g.mayMake(op, golden, properties)
}

// mayMake refuses to make a generation of a golden that the policy does not give to the caller, or to change what the
// golden is like: only root may do that. Permission.
func (g *grant) mayMake(op, golden string, properties map[string]bool) error {
	if g == nil {
		return nil
	}
	if !g.MayPublish(golden) {
		return permission(op, golden, "the policy does not allow you to publish to this golden").
			WithHint("ask root for its name in publish of your rule")
	}

	var set []string
	for name, is := range properties {
		if is {
			set = append(set, name)
		}
	}
	if slices.Sort(set); len(set) > 0 {
		return permission(op, golden, "only root may change properties of a golden").
			WithHint("remove %s", strings.Join(set, " and "))
	}
	return nil
}
