//go:build linux && (amd64 || arm64)

package faulttest

import (
	"fmt"
	"strings"
)

// MutatingIoctls are the ioctl requests that count as steps, by number.
// Options.Ioctls adds to them.
var MutatingIoctls = map[uint32]string{
	// Any file system.
	0x40049409: "FICLONE",
	0x4020940d: "FICLONERANGE",
	0xc0189436: "FIDEDUPERANGE",
	0xc0045877: "FIFREEZE",
	0xc0045878: "FITHAW",
	0xc0185879: "FITRIM",
	0x40086602: "FS_IOC_SETFLAGS",
	0x40087602: "FS_IOC_SETVERSION",
	0x401c5820: "FS_IOC_FSSETXATTR",
	0x41009432: "FS_IOC_SETFSLABEL",
	0x40806685: "FS_IOC_ENABLE_VERITY",

	// Block and loop devices.
	0x125d: "BLKROSET",
	0x125f: "BLKRRPART",
	0x1261: "BLKFLSBUF",
	0x1269: "BLKPG",
	0x1277: "BLKDISCARD",
	0x127d: "BLKSECDISCARD",
	0x127f: "BLKZEROOUT",
	0x4c00: "LOOP_SET_FD",
	0x4c01: "LOOP_CLR_FD",
	0x4c02: "LOOP_SET_STATUS",
	0x4c04: "LOOP_SET_STATUS64",
	0x4c06: "LOOP_CHANGE_FD",
	0x4c07: "LOOP_SET_CAPACITY",
	0x4c08: "LOOP_SET_DIRECT_IO",
	0x4c09: "LOOP_SET_BLOCK_SIZE",
	0x4c0a: "LOOP_CONFIGURE",
	0x4c80: "LOOP_CTL_ADD",
	0x4c81: "LOOP_CTL_REMOVE",
	0x4c82: "LOOP_CTL_GET_FREE",

	// ext4 and XFS.
	0x40086610: "EXT4_IOC_RESIZE_FS",
	0x4004662b: "EXT4_IOC_CHECKPOINT",
	0x4030582a: "XFS_IOC_RESVSP64",
	0x4030582b: "XFS_IOC_UNRESVSP64",
	0x40305839: "XFS_IOC_ZERO_RANGE",
	0xc0c0586d: "XFS_IOC_SWAPEXT",
	0x4010586e: "XFS_IOC_FSGROWFSDATA",
	0x8004587d: "XFS_IOC_GOINGDOWN",

	// btrfs.
	0x50009401: "BTRFS_IOC_SNAP_CREATE",
	0x50009402: "BTRFS_IOC_DEFRAG",
	0x50009403: "BTRFS_IOC_RESIZE",
	0x50009404: "BTRFS_IOC_SCAN_DEV",
	0x50009405: "BTRFS_IOC_FORGET_DEV",
	0x00009408: "BTRFS_IOC_SYNC",
	0x5000940a: "BTRFS_IOC_ADD_DEV",
	0x5000940b: "BTRFS_IOC_RM_DEV",
	0x5000940c: "BTRFS_IOC_BALANCE",
	0x5000940e: "BTRFS_IOC_SUBVOL_CREATE",
	0x5000940f: "BTRFS_IOC_SNAP_DESTROY",
	0x40309410: "BTRFS_IOC_DEFRAG_RANGE",
	0x40089413: "BTRFS_IOC_DEFAULT_SUBVOL",
	0x40089416: "BTRFS_IOC_WAIT_SYNC",
	0x50009417: "BTRFS_IOC_SNAP_CREATE_V2",
	0x80089418: "BTRFS_IOC_START_SYNC",
	0x50009418: "BTRFS_IOC_SUBVOL_CREATE_V2",
	0x4008941a: "BTRFS_IOC_SUBVOL_SETFLAGS",
	0xc400941b: "BTRFS_IOC_SCRUB",
	0xc4009420: "BTRFS_IOC_BALANCE_V2",
	0x40049421: "BTRFS_IOC_BALANCE_CTL",
	0xc0c89425: "BTRFS_IOC_SET_RECEIVED_SUBVOL",
	0xc0109428: "BTRFS_IOC_QUOTA_CTL",
	0x40189429: "BTRFS_IOC_QGROUP_ASSIGN",
	0x4010942a: "BTRFS_IOC_QGROUP_CREATE",
	0x8030942b: "BTRFS_IOC_QGROUP_LIMIT",
	0x4040942c: "BTRFS_IOC_QUOTA_RESCAN",
	0xca289435: "BTRFS_IOC_DEV_REPLACE",
	0x40309439: "BTRFS_IOC_SET_FEATURES",
	0x5000943a: "BTRFS_IOC_RM_DEV_V2",
	0x5000943f: "BTRFS_IOC_SNAP_DESTROY_V2",
	0x40809440: "BTRFS_IOC_ENCODED_WRITE",
}

// ioctl looks the request up, and names the files that it is about beside the
// one that it is made on.
func ioctl(p *caller, a args) (what, bool) {
	request := uint32(a[1])
	name, ok := MutatingIoctls[request]
	if !ok {
		if name, ok = p.opt.Ioctls[request]; !ok {
			return what{}, false
		}
	}

	w := named(p.fdPath(int(int32(a[0]))))
	var other string
	switch name {
	case "FICLONE", "LOOP_SET_FD", "LOOP_CHANGE_FD":
		other = p.fdPath(int(int32(a[2])))
	case "FICLONERANGE": // struct file_clone_range begins with the descriptor
		other = p.fdPath(int(int32(p.word(a[2]))))
	case "LOOP_CONFIGURE": // and so does struct loop_config
		other = p.fdPath(int(int32(p.word(a[2]))))
	case "BTRFS_IOC_SNAP_CREATE_V2", "BTRFS_IOC_SUBVOL_CREATE_V2", "BTRFS_IOC_SNAP_DESTROY_V2":
		// The name in struct btrfs_ioctl_vol_args_v2, in the directory that the call is made on.
		if n := p.str(a[2] + 56); n != "" && len(w.paths) == 1 {
			w.paths[0] += "/" + n
		}
	}

	w.detail = strings.TrimSpace(fmt.Sprintf("%s %s %s", name, w, other))
	if strings.HasPrefix(other, "/") {
		w.paths = append(w.paths, other)
	}

	return w, true
}
