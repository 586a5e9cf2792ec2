package cli

import (
	"errors"
	"os/user"
	"strconv"
	"strings"

	"pando/internal/base/errs"
	"pando/internal/driver"

	"github.com/spf13/cobra"
)

// ownerFlag adds --owner, and returns what it says; root if it is missing.
func ownerFlag(c *cobra.Command, op string) func() (driver.Owner, error) {
	var text string
	c.Flags().StringVar(&text, "owner", "",
		"give each new volume to `USER[:GROUP]`, who owns the files in its mount that belong to root on disk (default: root)")
	return func() (driver.Owner, error) {
		if !c.Flags().Changed("owner") {
			return driver.Owner{}, nil
		}
		return parseOwner(op, text)
	}
}

// parseOwner reads USER, USER:GROUP, or numbers in their place; the group is that of the user. Invalid.
func parseOwner(op, text string) (driver.Owner, error) {
	name, group, hasGroup := strings.Cut(text, ":")
	bad := func(format string, args ...any) (driver.Owner, error) {
		return driver.Owner{}, errs.New(errs.Invalid, op, text, format, args...).
			WithHint("name a user of this host, such as alice, or numbers as in 1000:1000")
	}

	// Find the user.
	uid, gid := name, ""
	u, err := user.Lookup(name)
	if err != nil {
		u, err = user.LookupId(name)
	}
	if err == nil {
		uid, gid = u.Uid, u.Gid
	}

	// Find the group.
	if hasGroup {
		gid = group
		g, err := user.LookupGroup(group)
		if unknown := new(user.UnknownGroupError); err != nil && !errors.As(err, unknown) {
			return bad("looking up the group: %w", err)
		}
		if err == nil {
			gid = g.Gid
		}
	}

	id, err := strconv.ParseUint(uid, 10, 32)
	if err != nil || id == noID {
		return bad("there is no user %q", name)
	}
	if gid == "" {
		return bad("user %q is in no list of users, so its group must be named", name)
	}
	g, err := strconv.ParseUint(gid, 10, 32)
	if err != nil || g == noID {
		return bad("there is no group %q", group)
	}

	return driver.Owner{UID: uint32(id), GID: uint32(g)}, nil
}

// noID is no user and no group: chown(2) leaves the owner alone.
const noID = 1<<32 - 1

// ownerName returns the name of the owner of a volume, or the number of one that is in no list of users; "" for root.
func ownerName(o *driver.Owner) string {
	if o == nil {
		return ""
	}
	uid := strconv.FormatUint(uint64(o.UID), 10)
	if u, err := user.LookupId(uid); err == nil {
		return u.Username
	}
	return uid
}
