package listing

import (
	"os/user"
	"strconv"
	"sync"
)

// ownerNames has the names of users by their IDs, as far as they were looked up.
var ownerNames sync.Map

// OwnerName returns the name of a user, or the ID if this host has no user with it.
func OwnerName(uid uint32) string {
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

// ownerCalled returns the user whom a word means as a name or ID; nil if it may mean two, or none.
func ownerCalled(word string) *uint32 {
	id, notID := strconv.ParseUint(word, 10, 32)
	u, notName := user.Lookup(word)
	switch {
	case notID == nil && notName == nil:
		return nil
	case notName == nil:
		id, notID = strconv.ParseUint(u.Uid, 10, 32)
	}
	if notID != nil {
		return nil
	}
	uid := uint32(id)
	return &uid
}
