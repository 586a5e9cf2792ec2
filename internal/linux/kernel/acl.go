package kernel

import (
	"encoding/binary"
	"os"

	"golang.org/x/sys/unix"
)

// aclVersion and the tags are those of posix_acl_xattr.h; an ID that means none is all ones.
const (
	aclVersion  = 2
	aclUserObj  = 0x01
	aclUser     = 0x02
	aclGroupObj = 0x04
	aclMask     = 0x10
	aclOther    = 0x20
	aclNoID     = 1<<32 - 1
)

// ShareWith lets one user pass and list a directory (acl(5)), which otherwise only its owner may use: it becomes mode
// 0700 with an access control list. ENOTSUP: the filesystem has no such lists.
func ShareWith(dir *os.File, uid uint32) error {
	list := binary.LittleEndian.AppendUint32(nil, aclVersion)
	for _, e := range []struct {
		tag, perm uint16
		id        uint32
	}{
		{aclUserObj, 7, aclNoID}, {aclUser, 5, uid}, {aclGroupObj, 0, aclNoID}, {aclMask, 5, aclNoID},
		{aclOther, 0, aclNoID},
	} {
		list = binary.LittleEndian.AppendUint16(list, e.tag)
		list = binary.LittleEndian.AppendUint16(list, e.perm)
		list = binary.LittleEndian.AppendUint32(list, e.id)
	}
	return unix.Fsetxattr(int(dir.Fd()), "system.posix_acl_access", list, 0)
}
