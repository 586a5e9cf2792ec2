package treecopy

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"os/user"
	"slices"
	"strconv"
	"strings"
)

// The tags of ACL entries, in the order that the kernel requires.
const (
	aclUserObj  = 0x01
	aclUser     = 0x02
	aclGroupObj = 0x04
	aclGroup    = 0x08
	aclMask     = 0x10
	aclOther    = 0x20

	aclNoID = 0xffffffff
)

// aclEntry is an entry of a POSIX ACL.
type aclEntry struct {
	tag, perm uint16
	id        uint32
}

// encodeACL converts the text of a POSIX ACL, as tar stores it, to the value of
// a system.posix_acl_* attribute. Entries are separated by commas or newlines:
//
//	user::rwx,user:1000:r-x,group::r-x,mask::r-x,other::---
//
// The value is, little-endian: u32 version 2, then for each entry u16 tag,
// u16 permissions, u32 id.
func encodeACL(text string) ([]byte, error) {
	var entries []aclEntry
	for line := range strings.FieldsFuncSeq(text, func(r rune) bool { return r == ',' || r == '\n' || r == 0 }) {
		line, _, _ = strings.Cut(line, "#")
		line = strings.TrimSpace(line)
		if line == "" {
			continue
		}
		e, err := parseACLEntry(line)
		if err != nil {
			return nil, err
		}
		entries = append(entries, e)
	}

	slices.SortStableFunc(entries, func(a, b aclEntry) int {
		return cmp.Or(cmp.Compare(a.tag, b.tag), cmp.Compare(a.id, b.id))
	})
	out := binary.LittleEndian.AppendUint32(nil, 2)
	for _, e := range entries {
		out = binary.LittleEndian.AppendUint16(out, e.tag)
		out = binary.LittleEndian.AppendUint16(out, e.perm)
		out = binary.LittleEndian.AppendUint32(out, e.id)
	}

	return out, nil
}

// parseACLEntry parses one entry of the text of an ACL.
func parseACLEntry(line string) (aclEntry, error) {
	f := strings.Split(strings.TrimPrefix(line, "default:"), ":")
	if len(f) < 3 || len(f) > 4 || f[2] == "" {
		return aclEntry{}, fmt.Errorf("ACL entry %q is not type:name:permissions", line)
	}

	// Parse the type.
	e := aclEntry{id: aclNoID}
	kind := f[0] + ":"
	if f[1] != "" {
		kind += "name"
	}

	switch kind {
	case "user:", "u:":
		e.tag = aclUserObj
	case "user:name", "u:name":
		e.tag = aclUser
	case "group:", "g:":
		e.tag = aclGroupObj
	case "group:name", "g:name":
		e.tag = aclGroup
	case "mask:", "m:":
		e.tag = aclMask
	case "other:", "o:":
		e.tag = aclOther
	default:
		return e, fmt.Errorf("ACL entry %q has an unknown type", line)
	}

	// Parse the permissions.
	for _, c := range strings.TrimSpace(f[2]) {
		switch c {
		case 'r':
			e.perm |= 4
		case 'w':
			e.perm |= 2
		case 'x':
			e.perm |= 1
		case '-':
		default:
			return e, fmt.Errorf("ACL entry %q has unknown permissions", line)
		}
	}

	if e.tag == aclUser || e.tag == aclGroup {
		id, err := aclID(e.tag, f)
		if err != nil {
			return e, err
		}
		e.id = id
	}

	return e, nil
}

// aclID returns the number of the user or group of an entry with the fields f. A fourth field is
// the number of the name in the second (star writes it). A name without a number is looked up on
// this host.
func aclID(tag uint16, f []string) (uint32, error) {
	name := f[1]
	if len(f) == 4 {
		name = strings.TrimSpace(f[3])
	}

	if id, err := strconv.ParseUint(name, 10, 32); err == nil && id != aclNoID {
		return uint32(id), nil
	}

	id := ""
	if tag == aclUser {
		if u, err := user.Lookup(name); err == nil {
			id = u.Uid
		}
	} else if g, err := user.LookupGroup(name); err == nil {
		id = g.Gid
	}

	n, err := strconv.ParseUint(id, 10, 32)
	if err != nil {
		return 0, fmt.Errorf("an ACL names %q, which is unknown on this host", name)
	}

	return uint32(n), nil
}
