package driver

import (
	"fmt"
	"strconv"
	"strings"
)

// Owner is the user to whom a volume belongs, by numbers of this host. Zero: root, who owns what it was cloned from.
type Owner struct {
	UID uint32 `json:"uid"`
	GID uint32 `json:"gid"` // the user's primary group
}

// IsZero reports whether the volume belongs to root.
func (o Owner) IsZero() bool { return o == Owner{} }

// String returns UID:GID, or "" for root.
func (o Owner) String() string {
	if o.IsZero() {
		return ""
	}
	return fmt.Sprintf("%d:%d", o.UID, o.GID)
}

// StoredOwner reads what String returned. Anything else belongs to root: fsck compares it with the identity.
func StoredOwner(s string) Owner {
	uid, gid, _ := strings.Cut(s, ":")
	u, uerr := strconv.ParseUint(uid, 10, 32)
	g, gerr := strconv.ParseUint(gid, 10, 32)
	if uerr != nil || gerr != nil {
		return Owner{}
	}
	return Owner{UID: uint32(u), GID: uint32(g)}
}
