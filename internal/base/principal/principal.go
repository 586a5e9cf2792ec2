// Package principal says who asks for something: the context of a call carries it.
package principal

import (
	"context"
	"os"
	"slices"
)

// Principal is a user of this host. The zero value is root, without groups.
type Principal struct {
	UID  uint32   `json:"uid"`
	GIDs []uint32 `json:"gids"` // groups of the user, the primary one first, each once
}

// Owner is a user and a group as the owner of files.
type Owner struct {
	UID uint32 `json:"uid"`
	GID uint32 `json:"gid"`
}

// Owner returns the owner of the files that a user makes.
func (p Principal) Owner() Owner {
	o := Owner{UID: p.UID}
	if len(p.GIDs) > 0 {
		o.GID = p.GIDs[0]
	}
	return o
}

// Process returns the principal that this process acts as: its effective user, and its groups.
func Process() Principal {
	p := Principal{UID: uint32(os.Geteuid()), GIDs: []uint32{uint32(os.Getegid())}}
	more, _ := os.Getgroups() // without them it may do less
	for _, g := range more {
		if !slices.Contains(p.GIDs, uint32(g)) {
			p.GIDs = append(p.GIDs, uint32(g))
		}
	}
	return p
}

type key struct{}

// With returns a context of calls that p asks for.
func With(ctx context.Context, p Principal) context.Context {
	return context.WithValue(ctx, key{}, p)
}

// From returns who asks for the calls with a context, if the context says so.
func From(ctx context.Context) (p Principal, ok bool) {
	p, ok = ctx.Value(key{}).(Principal)
	return p, ok
}
