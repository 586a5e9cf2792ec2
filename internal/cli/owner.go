package cli

import (
	"os/user"
	"strconv"
	"sync"
)

// ownerNames has the names of users by their IDs, as far as they were looked up.
var ownerNames sync.Map

// ownerName returns the name of a user, or the ID if this host has no user with it.
func ownerName(uid uint32) string {
	if name, ok := ownerNames.Load(uid); ok {
		return name.(string)
	}

	name := strconv.FormatUint(uint64(uid), 10)
	if u, err := user.LookupId(name); err == nil {
		name = u.Username
	}
	ownerNames.Store(uid, name)
	return name
}
