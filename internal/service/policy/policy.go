// Package policy says what users other than root may do with a pool through the service. Its file is
// /etc/pando/policy.toml:
//
//	[[allow]]
//	groups = ["developers"]    # and users = ["alice", "1005"]: by name or ID
//	goldens = ["web", "ci-*"]  # what they may clone
//	volumes = 20               # how many volumes each of them may have
//	space = "100G"             # how much space these may take together
//	ttl = "7d"                 # how long a volume may stay: it is also the default
//
// The first entry that names a user, or a group of theirs, is what holds for them. Whoever is in none may do nothing.
package policy

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"
	"time"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/principal"
	"pando/internal/base/units"
	"pando/internal/engine"
	"pando/internal/linux/account"

	"github.com/BurntSushi/toml"
	"golang.org/x/sys/unix"
)

const op = "read policy"

// Policy is what users other than root may do. The zero value, and nil, allow nothing.
type Policy struct{ rules []Rule }

// Rule is what a user may do.
type Rule struct {
	Goldens    []string      // patterns of goldens that they may clone
	MaxVolumes int           // most volumes that they may have; 0: any number
	MaxBytes   int64         // space that their volumes may take together, before they get another one; 0: any
	MaxTTL     time.Duration // longest time that a volume may stay; 0: any

	uids, gids []uint32
}

// file is what the file of a policy contains.
type file struct {
	Allow []struct {
		Users, Groups, Goldens []string
		Volumes                int
		Space, TTL             string
	}
}

// Load reads the file of a policy. nil: there is none. Invalid: it is not understood. Permission: others than root can
// write to it.
func Load(ctx context.Context, name string) (*Policy, error) {
	f, err := os.Open(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, errs.Wrap(op, name, err)
	}

	defer f.Close()

	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return nil, errs.Wrap(op, name, err)
	}
	if st.Uid != 0 || st.Mode&0o022 != 0 {
		return nil, errs.New(errs.Permission, op, name, "others than root can write to it").
			WithHint("let it belong to root, with mode 0644")
	}

	var raw file
	meta, err := toml.NewDecoder(f).Decode(&raw)
	if err != nil {
		return nil, errs.New(errs.Invalid, op, name, "%w", err)
	}
	if unknown := meta.Undecoded(); len(unknown) > 0 {
		return nil, errs.New(errs.Invalid, op, name, "unknown key %q", unknown[0].String())
	}

	var p Policy
	for i, a := range raw.Allow {
		r := Rule{Goldens: a.Goldens, MaxVolumes: a.Volumes}
		err := r.fill(ctx, a.Users, a.Groups, a.Space, a.TTL)
		if err != nil {
			return nil, errs.New(errs.Invalid, op, name, "entry %d: %w", i+1, err)
		}
		p.rules = append(p.rules, r)
	}
	return &p, nil
}

// fill checks a rule, and sets what the file has as text.
func (r *Rule) fill(ctx context.Context, users, groups []string, space, ttl string) (err error) {
	if r.uids, err = ids(ctx, users, account.UID); err != nil {
		return err
	}
	if r.gids, err = ids(ctx, groups, account.GID); err != nil {
		return err
	}
	if space != "" {
		if r.MaxBytes, err = units.ParseSize("space", space); err != nil {
			return err
		}
	}
	if ttl != "" {
		if r.MaxTTL, err = units.ParseDuration("ttl", ttl); err != nil {
			return err
		}
	}

	switch {
	case len(r.uids)+len(r.gids) == 0:
		return errors.New("it names neither users nor groups")
	case r.MaxVolumes < 0:
		return errors.New("volumes must not be negative")
	}
	for _, g := range r.Goldens {
		if _, err := path.Match(g, ""); err != nil {
			return errs.New(errs.Invalid, "goldens", g, "not a pattern")
		}
	}
	return nil
}

// ids returns the IDs that words are, or are the names of.
func ids(
	ctx context.Context, words []string, find func(ctx context.Context, op, word string) (uint32, error),
) (out []uint32, err error) {
	for _, w := range words {
		id, err := find(ctx, op, w)
		if err != nil {
			return nil, err
		}
		out = append(out, id)
	}
	return out, nil
}

// For returns the rule that holds for somebody other than root.
func (p *Policy) For(who principal.Principal) (Rule, bool) {
	if p == nil {
		return Rule{}, false
	}
	for _, r := range p.rules {
		in := func(gid uint32) bool { return slices.Contains(r.gids, gid) }
		if slices.Contains(r.uids, who.UID) || slices.ContainsFunc(who.GIDs, in) {
			return r, true
		}
	}
	return Rule{}, false
}

// MayClone reports whether a rule allows to clone a golden.
func (r Rule) MayClone(golden string) bool {
	return slices.ContainsFunc(r.Goldens, func(pattern string) bool {
		is, _ := path.Match(pattern, golden)
		return is
	})
}

// readsGoldens are the operations that change nothing in a golden.
var readsGoldens = []string{"clone", "diff", "golden ls", "ls", "run", "show"}

// Ask decides whether somebody may do what they ask for: it is an engine.Policy. Root may do everything. Others see
// their own volumes, and goldens that they may clone. NotFound: they may not see it. Permission: they see it, but may
// not do that.
func (p *Policy) Ask(a engine.Access) error {
	if a.Who.UID == 0 {
		return nil
	}
	r, ok := p.For(a.Who)
	if !ok {
		return errs.New(errs.Permission, a.Op, a.Ref, "no policy allows user %d to use this pool", a.Who.UID).
			WithHint("ask an administrator of this host for an entry in its policy")
	}

	switch a.Kind {
	case "":
		if a.Ref == "" {
			return errs.New(errs.Permission, a.Op, "", "only root may do this")
		}
		return nil // a name that is free
	case api.KindVolume, api.KindSnapshot:
		if a.OwnerUID != a.Who.UID {
			return errs.New(errs.NotFound, a.Op, a.Ref, "it belongs to somebody else")
		}
		return nil
	}

	name, _, _ := strings.Cut(a.Ref, "@")
	switch {
	case !r.MayClone(name):
		return errs.New(errs.NotFound, a.Op, a.Ref, "it may not be cloned")
	case !slices.Contains(readsGoldens, a.Op):
		return errs.New(errs.Permission, a.Op, a.Ref, "only root may change goldens")
	}
	return nil
}
