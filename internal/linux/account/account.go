// Package account finds users and groups of this host by their names, wherever the host keeps them.
package account

import (
	"context"
	"os/user"
	"strconv"
	"strings"

	"pando/internal/base/errs"
	"pando/internal/base/principal"
	"pando/internal/linux/run"
)

// UID returns the user ID that a word is, or is the name of. Invalid, NotFound.
func UID(ctx context.Context, op, word string) (uint32, error) {
	return id(op, word, "user", func() (string, error) {
		if u, err := user.Lookup(word); err == nil {
			return u.Uid, nil
		}
		return field(ctx, "passwd", word, 2)
	})
}

// GID returns the group ID that a word is, or is the name of. Invalid, NotFound.
func GID(ctx context.Context, op, word string) (uint32, error) {
	return id(op, word, "group", func() (string, error) {
		if g, err := user.LookupGroup(word); err == nil {
			return g.Gid, nil
		}
		return field(ctx, "group", word, 2)
	})
}

// ParseOwner reads USER or USER:GROUP, each a name or an ID. Without a group it is the primary one of the user.
// Invalid, NotFound.
func ParseOwner(ctx context.Context, op, text string) (o principal.Owner, err error) {
	name, group, given := strings.Cut(text, ":")
	if o.UID, err = UID(ctx, op, name); err != nil {
		return o, err
	}
	if given {
		o.GID, err = GID(ctx, op, group)
		return o, err
	}

	primary, err := primaryGroup(ctx, o.UID)
	if err != nil {
		return o, errs.New(errs.Invalid, op, text, "no group is given, and this host knows no user %d", o.UID).
			WithHint("name the group too: %d:GROUP", o.UID)
	}
	o.GID, err = GID(ctx, op, primary)
	return o, err
}

// primaryGroup returns the group ID in the entry of a user.
func primaryGroup(ctx context.Context, uid uint32) (string, error) {
	word := strconv.FormatUint(uint64(uid), 10)
	if u, err := user.LookupId(word); err == nil {
		return u.Gid, nil
	}
	return field(ctx, "passwd", word, 3)
}

// id returns the ID that a word is. Otherwise it is a name, whose ID find returns.
func id(op, word, what string, find func() (string, error)) (uint32, error) {
	if word == "" || strings.HasPrefix(word, "-") || strings.ContainsAny(word, ":\n\x00") {
		return 0, errs.New(errs.Invalid, op, word, "not the name or ID of a %s", what)
	}

	text := word
	if strings.Trim(word, "0123456789") != "" {
		var err error
		if text, err = find(); err != nil {
			return 0, errs.New(errs.NotFound, op, word, "this host has no such %s", what)
		}
	}

	// The largest ID means none.
	n, err := strconv.ParseUint(text, 10, 32)
	if err != nil || n == 1<<32-1 {
		return 0, errs.New(errs.Invalid, op, word, "the ID of a %s is a number up to %d", what, uint32(1<<32-2))
	}
	return uint32(n), nil
}

// field returns a field of an entry that is not in the files of this host, but perhaps in a directory service, as
// getent(1) prints it. Fields are counted from 0: an ID is field 2, the group of a user field 3.
func field(ctx context.Context, database, key string, n int) (string, error) {
	out, err := run.Program(ctx, "getent", database, key)
	if err != nil {
		return "", err
	}
	fields := strings.Split(strings.TrimSpace(string(out)), ":")
	if len(fields) <= n {
		return "", errs.New(errs.IO, "getent", key, "not an entry: %q", out)
	}
	return fields[n], nil
}
