// Package stack finds the layers below a path, from its filesystem down to the disks: filesystem, loop device, the
// file's filesystem, partition, disk. It changes nothing.
package stack

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"pando/internal/base/errs"
	"pando/internal/linux/mount"
	"pando/internal/observe/blockdev"

	"golang.org/x/sys/unix"
)

// Kind is the kind of a layer.
type Kind string

// The kinds of layers. Those of block devices are those of package blockdev.
const (
	Filesystem Kind = "filesystem" // on block devices
	InMemory   Kind = "memory"     // tmpfs, ramfs, zram, ...: lost in a power failure
	Network    Kind = "network"    // nfs, cifs, ceph, 9p, virtiofs, ...: the layers below are elsewhere
	FUSE       Kind = "fuse"       // a program, which alone knows the layers below
	Overlay    Kind = "overlay"    // its upper directory is below
	Zpool      Kind = "zpool"      //
	Unknown    Kind = "unknown"    // a filesystem whose device could not be found
)

// Layer is one thing that data passes through on its way down.
type Layer struct {
	Kind  Kind   `json:"kind"`
	Name  string `json:"name"`  // unique in the stack: "ext4 on /mnt/x", "loop3", "vda1", "zpool tank"
	Depth int    `json:"depth"` // 0: at the top; layers side by side (the disks of a RAID) have the same
	// Role is the role of a device in the layer above, if it has a special one: "log", "cache", "spare", "special",
	// "dedup".
	Role string `json:"role,omitempty"`
	// Group is the top-level vdev of a device in a zpool, such as "mirror-0": writes go to all devices of a group.
	Group string `json:"group,omitempty"`

	FSType string `json:"fstype,omitempty"` // of a filesystem: "ext4", "fuse.NAME"
	// Mount is the filesystem's entry in this process's mount table.
	Mount mount.Entry `json:"-"`
	// Dataset is the ZFS filesystem or volume.
	Dataset string `json:"dataset,omitempty"`

	// Device, of layers that are block devices.
	Device *blockdev.Device `json:"-"`
}

// Stack is the layers below a path, from the top down.
type Stack struct {
	Path   string  `json:"path"` // absolute, without symbolic links
	Layers []Layer `json:"layers"`
	// Hidden is the reason why nothing is known below the last layer; "" if the stack ends in disks.
	Hidden string `json:"hidden,omitempty"`
}

// Devices returns the layers that are block devices.
func (s *Stack) Devices() []Layer {
	var out []Layer
	for _, l := range s.Layers {
		if l.Device != nil {
			out = append(out, l)
		}
	}
	return out
}

// Above returns the index of the layer on top of layer i, the first one found if there are several; -1 for the top.
func (s *Stack) Above(i int) int {
	for a := i - 1; a >= 0; a-- {
		if s.Layers[a].Depth < s.Layers[i].Depth {
			return a
		}
	}
	return -1
}

// Bottom returns the devices without a device below: disks, and loop devices whose files are in memory or out of sight.
func (s *Stack) Bottom() []Layer {
	var out []Layer
	for i, l := range s.Layers {
		if l.Device == nil {
			continue
		}
		below := s.Layers[i+1:]
		if end := slices.IndexFunc(below, func(b Layer) bool { return b.Depth <= l.Depth }); end >= 0 {
			below = below[:end]
		}
		if !slices.ContainsFunc(below, func(b Layer) bool { return b.Device != nil }) {
			out = append(out, l)
		}
	}
	return out
}

// maxDepth is the maximum depth of a stack.
const maxDepth = 24

// Of finds the layers below path: an existing file, directory, or node of a block device. NotFound, Permission, or
// Unsupported if it is something else.
func Of(ctx context.Context, path string) (*Stack, error) {
	table, err := mount.Table("self")
	if err != nil {
		return nil, errs.Wrap(op, path, err)
	}
	return In(ctx, table, path)
}

const op = "find the layers below"

// In is Of with a mount table of this process that was just read, for many paths.
func In(ctx context.Context, table []mount.Entry, path string) (*Stack, error) {
	real, err := filepath.Abs(path)
	if err == nil {
		real, err = filepath.EvalSymlinks(real)
	}
	if err != nil {
		return nil, errs.Wrap(op, path, err)
	}

	b := &builder{ctx: ctx, stack: &Stack{Path: real}, table: table, seen: map[string]bool{}}
	var st unix.Stat_t
	if err := unix.Stat(real, &st); err != nil {
		return nil, errs.Wrap(op, path, &os.PathError{Op: "stat", Path: real, Err: err})
	}

	switch st.Mode & unix.S_IFMT {
	case unix.S_IFBLK:
		d, err := blockdev.Lookup(st.Rdev)
		if err != nil {
			return nil, errs.Wrap(op, path, err)
		}
		b.addDevice(d, 0, "")
	case unix.S_IFREG, unix.S_IFDIR:
		b.addPath(real, 0)
	default:
		return nil, errs.New(errs.Unsupported, op, path, "is not a file, directory or block device")
	}

	return b.stack, ctx.Err()
}

type builder struct {
	ctx   context.Context
	stack *Stack
	table []mount.Entry
	group string          // of the device to add next
	seen  map[string]bool // names in the stack: a layer below two disks of a RAID is added once
}

// hide records why the search ends.
func (b *builder) hide(format string, args ...any) {
	if b.stack.Hidden == "" {
		b.stack.Hidden = fmt.Sprintf(format, args...)
	}
}

// add adds a layer, unless the stack has it already.
func (b *builder) add(l Layer) bool {
	if b.seen[l.Name] {
		return false
	}
	if l.Depth > maxDepth {
		b.hide("more than %d layers", maxDepth)
		return false
	}
	b.seen[l.Name] = true
	b.stack.Layers = append(b.stack.Layers, l)
	return true
}

// inMemory and overNetwork are types of filesystems that do not keep data on a block device of this host.
var (
	inMemory    = words("tmpfs ramfs hugetlbfs devtmpfs rootfs")
	overNetwork = words("nfs nfs4 cifs smb3 ceph 9p virtiofs afs lustre gpfs glusterfs beegfs orangefs ocfs2 gfs2 " +
		"vboxsf fuse.sshfs fuse.glusterfs fuse.s3fs fuse.rclone fuse.ceph")
)

func words(s string) map[string]bool {
	m := map[string]bool{}
	for w := range strings.FieldsSeq(s) {
		m[w] = true
	}
	return m
}

// addPath adds the filesystem of a addPath and the layers below it.
func (b *builder) addPath(path string, depth int) {
	m, ok := mount.At(b.table, path)
	if !ok {
		b.hide("the mount table does not show the filesystem of %s", path)
		return
	}

	l := Layer{Kind: Filesystem, Name: m.FSType + " on " + m.Point, Depth: depth, Group: b.group, FSType: m.FSType,
		Mount: m}
	b.group = ""
	switch {
	case inMemory[m.FSType]:
		l.Kind = InMemory
	case overNetwork[m.FSType]:
		l.Kind = Network
	case m.FSType == "fuse" || strings.HasPrefix(m.FSType, "fuse."):
		l.Kind = FUSE
	case m.FSType == "overlay":
		l.Kind = Overlay
	case m.FSType == "zfs":
		l.Dataset, _, _ = strings.Cut(m.Source, "@")
	}

	if !b.add(l) {
		return
	}

	switch l.Kind {
	case InMemory:
		b.hide("%s keeps its files in memory", m.FSType)
	case Network:
		b.hide("%s: the layers below are on another machine (%s)", m.FSType, m.Source)
	case FUSE:
		b.hide("%s is a FUSE program (%s): only the program knows the layers below", m.FSType, m.Source)
	case Overlay:
		upper := option(m.Super, "upperdir")
		if _, path := mount.SplitOverlaySource(m.Source); path != "" {
			b.addUpper(path, depth+1)
		} else if upper == "" {
			b.hide("an overlay without an upper directory is read-only")
		} else if _, err := os.Stat(upper); err != nil {
			b.hide("the upper directory of the overlay is not visible from here: %s", upper)
		} else {
			b.addPath(upper, depth+1)
		}
	default:
		b.addFilesystem(&b.stack.Layers[len(b.stack.Layers)-1], path, depth+1)
	}
}

// addUpper adds what has the upper layer of an overlay: a block device, whose filesystem is mounted nowhere else, or a
// directory.
func (b *builder) addUpper(path string, depth int) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		b.hide("the upper layer of the overlay is not visible from here: %s", path)
		return
	}

	if st.Mode&unix.S_IFMT != unix.S_IFBLK {
		b.addPath(path, depth)
		return
	}

	d, err := blockdev.Lookup(st.Rdev)
	if err != nil {
		b.hide("%s: %v", path, err)
		return
	}
	b.addDevice(d, depth, "")
}

// option returns the value of an option in a list.
func option(list, name string) string {
	for o := range strings.SplitSeq(list, ",") {
		if k, v, ok := strings.Cut(o, "="); ok && k == name {
			return v
		}
	}
	return ""
}

// addFilesystem adds the devices of a addFilesystem on block devices of this host.
func (b *builder) addFilesystem(l *Layer, path string, depth int) {
	fstype, source := l.FSType, l.Mount.Source
	switch fstype {
	case "zfs":
		b.zpool(l.Dataset, depth)
		return
	case "btrfs":
		devs, err := btrfsDevices(source)
		if err == nil && len(devs) > 0 {
			for _, d := range devs {
				b.addDevice(d, depth, "")
			}
			return
		}
	}

	mounted := l.Mount
	if d, err := blockdev.Lookup(mounted.Dev); err == nil {
		b.addDevice(d, depth, "")
		if log, ok := externalLog(mounted, d); ok {
			b.addDevice(log, depth, "log")
		}
		return
	}

	d, err := blockdev.LookupPath(source)
	if err != nil {
		l.Kind = Unknown
		b.hide("%s at %s is not on a visible block device (%s)", fstype, path, source)
		return
	}

	b.addDevice(d, depth, "")
}

// externalLog finds the separate log device of a filesystem on data, if it has one.
func externalLog(m mount.Entry, data blockdev.Device) (blockdev.Device, bool) {
	node := ""
	switch m.FSType {
	case "xfs":
		node = option(m.Super, "logdev")
	case "ext4":
		// The mount table does not show it. The journal's thread is named after its device, followed by the inode number if
		// the journal is a file of the filesystem: "jbd2/loop1", "jbd2/vda1-8".
		pid, err := os.ReadFile("/sys/fs/ext4/" + data.Name + "/journal_task")
		if err != nil {
			return blockdev.Device{}, false
		}
		comm, err := os.ReadFile("/proc/" + strings.TrimSpace(string(pid)) + "/comm")
		if err != nil {
			return blockdev.Device{}, false
		}
		name, ok := strings.CutPrefix(strings.TrimSpace(string(comm)), "jbd2/")
		if ok && !strings.HasPrefix(name, data.Name+"-") {
			node = "/dev/" + name
		}
	}

	if node == "" {
		return blockdev.Device{}, false
	}

	d, err := blockdev.LookupPath(node)
	return d, err == nil && d.Number != data.Number
}

// addDevice adds a block addDevice and the layers below it.
func (b *builder) addDevice(d blockdev.Device, depth int, role string) {
	group := b.group
	b.group = ""
	if !b.add(Layer{Kind: Kind(d.Kind), Name: d.Name, Depth: depth, Role: role, Group: group, Device: &d}) {
		return
	}

	switch d.Kind {
	case blockdev.Loop:
		file := d.Backing
		if strings.HasSuffix(file, " (deleted)") {
			b.hide("the file behind %s has been deleted: %s", d.Name, file)
			return
		}

		if _, err := os.Stat(file); err != nil {
			b.hide("the file behind %s is not visible from here: %s", d.Name, file)
			return
		}

		if other, err := isOther(d, file); err == nil && other {
			b.hide("the file behind %s is not visible from here: %s is another file", d.Name, file)
			return
		}

		b.addPath(file, depth+1)
	case blockdev.Zvol:
		dataset, err := zvolDataset(d)
		if err != nil {
			b.hide("the dataset of %s: %v", d.Name, err)
			return
		}
		b.stack.Layers[len(b.stack.Layers)-1].Dataset = dataset
		b.zpool(dataset, depth+1)
	case blockdev.Memory:
		b.hide("%s is memory", d.Name)
	case blockdev.Other:
		b.hide("the layers below %s are unknown", d.Name)
	default:
		below, err := d.Below()
		if err != nil {
			b.hide("the layers below %s: %v", d.Name, err)
			return
		}
		for _, x := range below {
			b.addDevice(x, depth+1, "")
		}
	}
}

// isOther reports whether the path of a loop device's file leads to another file: the path is from the mount namespace
// in which the device was attached. It fails without root.
func isOther(d blockdev.Device, file string) (bool, error) {
	dev, err := os.Open(d.Path())
	if err != nil {
		return false, err
	}

	defer dev.Close()
	info, err := unix.IoctlLoopGetStatus64(int(dev.Fd()))
	if err != nil {
		return false, err
	}

	var st unix.Stat_t
	if err := unix.Stat(file, &st); err != nil {
		return false, err
	}

	return st.Ino != info.Inode, nil // not by the device: btrfs has others for stat
}

// btrfsDevices finds all devices of a btrfs by the node of one of them.
func btrfsDevices(source string) ([]blockdev.Device, error) {
	one, err := blockdev.LookupPath(source)
	if err != nil {
		return nil, err
	}

	links, err := filepath.Glob("/sys/fs/btrfs/*/devices/*")
	if err != nil {
		return nil, err
	}

	of := map[string][]blockdev.Device{}
	mine := ""
	for _, l := range links {
		text, err := os.ReadFile(filepath.Join(l, "dev"))
		if err != nil {
			continue // it has been unmounted
		}

		var major, minor uint32
		if _, err := fmt.Sscanf(string(text), "%d:%d", &major, &minor); err != nil {
			continue
		}

		d, err := blockdev.Lookup(unix.Mkdev(major, minor))
		if err != nil {
			continue
		}

		fs := filepath.Dir(l)
		of[fs] = append(of[fs], d)
		if d.Number == one.Number {
			mine = fs
		}
	}

	if mine == "" {
		return nil, errors.New("not in /sys/fs/btrfs")
	}

	return of[mine], nil
}
