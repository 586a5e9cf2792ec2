package kernel

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The constants of this package against the kernel's own headers.
func TestConstants(t *testing.T) {
	if statxMntIDUnique != unix.STATX_MNT_ID_UNIQUE { // newer than many headers
		t.Errorf("STATX_MNT_ID_UNIQUE is %#x", statxMntIDUnique)
	}
	cc, err := exec.LookPath("cc")
	if err != nil {
		t.Skip("SKIPPED: no C compiler")
	}
	for _, set := range []struct {
		name    string
		include string
		values  map[string]uint64
	}{
		{"fs", "#include <linux/fs.h>\n#include <linux/fiemap.h>", map[string]uint64{
			"FS_IOC_FIEMAP": fsIocFIEMAP, "FITRIM": fsIocFITRIM, "FIFREEZE": fsIocFIFREEZE, "FITHAW": fsIocFITHAW,
			"FS_IOC_FSGETXATTR": fsIocFSGETXATTR, "FS_IOC_FSSETXATTR": fsIocFSSETXATTR,
			"FS_COMPR_FL": FlagCompress, "FS_SYNC_FL": FlagSync, "FS_IMMUTABLE_FL": FlagImmutable, "FS_APPEND_FL": FlagAppend,
			"FS_NODUMP_FL": FlagNoDump, "FS_NOATIME_FL": FlagNoAtime, "FS_ENCRYPT_FL": FlagEncrypted,
			"FS_DIRSYNC_FL": FlagDirSync,
			"FS_VERITY_FL":  FlagVerity, "FS_NOCOW_FL": FlagNoCow, "FS_PROJINHERIT_FL": FlagProjectInherit,
			"FS_CASEFOLD_FL":   FlagCasefold,
			"FS_XFLAG_EXTSIZE": XFlagExtentSize, "FS_XFLAG_EXTSZINHERIT": XFlagExtentSizeInherit,
			"FS_XFLAG_COWEXTSIZE":    XFlagCowExtentSize,
			"sizeof(struct fsxattr)": uint64(unsafe.Sizeof(FSXAttr{})),
		}},
		{"statx", "#include <linux/stat.h>", map[string]uint64{
			"STATX_MNT_ID": statxMntID, "STATX_ATTR_MOUNT_ROOT": statxAttrMountRoot,
		}},
		// Not every system has the headers of these: this is their text.
		{"ext4", "#include <linux/ioctl.h>\n#include <linux/types.h>\n#define EXT4_IOC_RESIZE_FS _IOW('f', 16, __u64)",
			map[string]uint64{
				"EXT4_IOC_RESIZE_FS": ext4IocResizeFS,
			}},
		{"xfs", `#include <linux/ioctl.h>
#include <linux/types.h>
struct xfs_growfs_data { __u64 newblocks; __u32 imaxpct; };
struct xfs_fsop_geom { char bytes[256]; };
#define XFS_IOC_FSGROWFSDATA _IOW('X', 110, struct xfs_growfs_data)
#define XFS_IOC_FSGEOMETRY _IOR('X', 126, struct xfs_fsop_geom)`, map[string]uint64{
			"XFS_IOC_FSGROWFSDATA": xfsIocFSGROWFS, "XFS_IOC_FSGEOMETRY": xfsIocFSGEOM,
		}},
		{"btrfs", "#include <linux/btrfs.h>\n#include <linux/btrfs_tree.h>", map[string]uint64{
			"BTRFS_IOC_SYNC": btrfsIocSync, "BTRFS_IOC_SNAP_CREATE_V2": btrfsIocSnapCreateV2,
			"BTRFS_IOC_SUBVOL_CREATE_V2": btrfsIocSubvolCreate2,
			"BTRFS_IOC_SUBVOL_SETFLAGS":  btrfsIocSetFlags, "BTRFS_IOC_SUBVOL_GETFLAGS": btrfsIocGetFlags,
			"BTRFS_IOC_TREE_SEARCH_V2": btrfsIocTreeSearchV2, "BTRFS_IOC_INO_LOOKUP": btrfsIocInoLookup,
			"BTRFS_IOC_GET_SUBVOL_INFO": btrfsIocGetSubvolInfo, "BTRFS_IOC_SNAP_DESTROY_V2": btrfsIocSnapDestroyV2,
			"BTRFS_IOC_SCRUB_PROGRESS": btrfsIocScrubProgress, "sizeof(struct btrfs_ioctl_scrub_args)": 1024,
			"BTRFS_IOC_DEV_INFO": btrfsIocDevInfo,
			"offsetof(struct btrfs_ioctl_dev_info_args, bytes_used)": 24, "offsetof(struct btrfs_ioctl_dev_info_args, " +
				"total_bytes)": 32,
			"BTRFS_IOC_SEND": btrfsIocSend, "BTRFS_IOC_SET_RECEIVED_SUBVOL": btrfsIocSetReceived,
			"BTRFS_IOC_ENCODED_WRITE": btrfsIocEncodedWrite,
			"BTRFS_SEND_FLAG_VERSION": btrfsSendVersion, "BTRFS_SEND_FLAG_COMPRESSED": btrfsSendCompressed,
			"BTRFS_UUID_TREE_OBJECTID": btrfsUUIDTreeID, "BTRFS_UUID_KEY_RECEIVED_SUBVOL": btrfsUUIDReceivedKey,
			"BTRFS_SUBVOL_RDONLY": btrfsSubvolReadOnly, "BTRFS_SUBVOL_SPEC_BY_ID": btrfsSubvolSpecByID,
			"sizeof(struct btrfs_ioctl_vol_args_v2)":         btrfsArgBytes,
			"offsetof(struct btrfs_ioctl_vol_args_v2, name)": btrfsVolNameOffset,
		}},
	} {
		t.Run(set.name, func(t *testing.T) {
			var names []string
			src := "#include <stdio.h>\n#include <stddef.h>\n" + set.include + "\nint main(void) {\n"
			for name := range set.values {
				names = append(names, name)
				src += "printf(\"%llx\\n\", (unsigned long long)(" + name + "));\n"
			}
			src += "return 0; }\n"
			dir := t.TempDir()
			if err := os.WriteFile(filepath.Join(dir, "c.c"), []byte(src), 0o600); err != nil {
				t.Fatal(err)
			}
			if out, err := exec.Command(cc, "-o", filepath.Join(dir, "c"),
				filepath.Join(dir, "c.c")).CombinedOutput(); err != nil {
				t.Skipf("SKIPPED: the headers of this system do not know them: %s", out)
			}
			out, err := exec.Command(filepath.Join(dir, "c")).Output()
			if err != nil {
				t.Fatal(err)
			}
			for i, line := range strings.Fields(string(out)) {
				want, err := strconv.ParseUint(line, 16, 64)
				// Some headers have them as negative ints.
				if got := set.values[names[i]]; err != nil || got != want && got != want&0xffffffff {
					t.Errorf("%s is %#x here, %#x in the headers, %v", names[i], got, want, err)
				}
			}
		})
	}
}
