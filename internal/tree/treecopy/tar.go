package treecopy

import (
	"context"
	"errors"
	"io"
	"os"
	"runtime"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"pando/internal/base/errs"
	"pando/internal/linux/kernel"
	"pando/internal/linux/treewalk"
)

const opTar = "export"

// LostSockets are sockets, for which tar has no type.
const LostSockets = "sockets"

// WriteTar writes the tree below the open directory root as a tar archive in the PAX format, from which Untar makes the
// same tree: owners, modes, times in nanoseconds, links, extended attributes, ACLs, flags, devices and holes. GNU tar
// and bsdtar can read it too. Nobody may change the tree in the meantime. Totals.NotKept and Totals.Skipped count what
// tar cannot store: sockets, project IDs, extended attributes with "=" in their names. Of opt, WriteTar uses Progress
// and Unprivileged. Its memory depends on the number of files with several names, and on the largest directory.
//
// Conflict: the tree changed. Unsupported: the extended attributes of a file are too large. IO, errors of w, and of
// ctx.
func WriteTar(ctx context.Context, w io.Writer, root *os.File, opt Options) (Totals, error) {
	defer runtime.KeepAlive(root)

	t := &tarrer{
		ctx: ctx, out: tarWriter{w: w}, root: root, n: newCounters(opt), attrs: NewAttributeReader(opt),
		links: map[Inode]string{}, overlay: isOverlay(int(root.Fd())), buf: make([]byte, bufferSize),
	}
	err := t.putDir("")
	if err == nil {
		err = t.out.end()
	}

	t.n.xattrs.Add(t.attrs.c.n.xattrs.Load()) // those that have no meaning elsewhere
	return t.n.totals(), tarErr(err)
}

// tarErr replaces the operation and the hint of errors of this package.
func tarErr(err error) error {
	var e *errs.Error
	if !errors.As(err, &e) || e.Op != op {
		return err
	}
	known := *e
	known.Op = opTar
	if known.Kind == errs.Conflict {
		known.Hint = errs.Messagef("stop the programs that write to it, then retry")
	}
	return &known
}

// tarrer is one run of WriteTar.
type tarrer struct {
	ctx     context.Context
	out     tarWriter
	root    *os.File
	n       *counters
	attrs   *AttributeReader
	links   map[Inode]string // the first names of files with several names
	overlay bool             // see linkID
	buf     []byte
}

// putDir writes a directory and everything below it.
func (t *tarrer) putDir(path string) error {
	f, err := treewalk.Open(t.root, path)
	if err != nil {
		return srcErr(path, "open", err)
	}

	subdirs, err := t.putEntries(f, path)
	f.Close()
	if err != nil {
		return err
	}

	for _, name := range subdirs {
		if err := t.putDir(joinPath(path, name)); err != nil {
			return err
		}
	}

	return nil
}

// putEntries writes an open directory and the files in it, and returns the names of its subdirectories.
func (t *tarrer) putEntries(f *os.File, path string) ([]string, error) {
	a, _, err := t.attrs.ReadFile(f, path)
	if err != nil {
		return nil, err
	}

	name := path + "/"
	if path == "" {
		name = "./"
	}

	if err := t.putHeader(tarEntry{name: name, typ: typeDir}, a, path); err != nil {
		return nil, err
	}

	if path != "" {
		t.n.addProgress(1, 0)
	}

	all, err := treewalk.ReadDirents(f)
	if err != nil {
		return nil, srcErr(path, "getdents", err)
	}

	var subdirs []string
	slices.SortFunc(all, func(x, y treewalk.Dirent) int { return strings.Compare(x.Name, y.Name) })
	for _, e := range all {
		switch err := t.ctx.Err(); {
		case err != nil:
			return nil, err
		case e.Type == unix.DT_DIR:
			subdirs = append(subdirs, e.Name)
			continue
		}
		if err := t.putFile(f, e.Name, joinPath(path, e.Name)); err != nil {
			return nil, err
		}
	}

	return subdirs, nil
}

// putFile writes a file that is not a directory: another name of an earlier file, or all of it.
func (t *tarrer) putFile(dir *os.File, name, path string) error {
	st, err := kernel.Lstat(int(dir.Fd()), name)
	if err != nil {
		return srcErr(path, "stat", err)
	}

	if st.Mode&unix.S_IFMT == unix.S_IFSOCK {
		t.n.countLoss(LostSockets, object{}, func() string { return path })
		return nil
	}

	// Another name of an earlier file has no attributes of its own.
	if st.Nlink > 1 {
		id := linkID(&st, t.overlay)
		if first, ok := t.links[id]; ok {
			t.n.addProgress(1, 0)
			return t.out.putHeader(tarEntry{name: path, link: first, typ: typeLink, mode: st.Mode, uid: st.Uid, gid: st.Gid,
				mtime: st.Mtim, atime: st.Atim})
		}
		t.links[id] = path
	}

	if st.Mode&unix.S_IFMT == unix.S_IFREG {
		err = t.putRegular(dir, name, path)
	} else {
		err = t.putSpecial(dir, name, path)
	}
	if err == nil {
		t.n.addProgress(1, 0)
	}

	return err
}

// tarTypes are the types of files without data.
var tarTypes = map[uint32]byte{
	unix.S_IFLNK: typeSymlink, unix.S_IFCHR: typeChar, unix.S_IFBLK: typeBlock, unix.S_IFIFO: typeFifo,
}

// putSpecial writes a symbolic link, a device or a fifo.
func (t *tarrer) putSpecial(dir *os.File, name, path string) error {
	a, st, err := t.attrs.Read(dir, name)
	if err != nil {
		return err
	}

	e := tarEntry{name: path, typ: tarTypes[st.Mode&unix.S_IFMT]}
	switch e.typ {
	case 0:
		return changed(path) // it has become something else
	case typeChar, typeBlock:
		e.major, e.minor = unix.Major(st.Rdev), unix.Minor(st.Rdev)
	case typeSymlink:
		b := make([]byte, unix.PathMax)
		n, err := unix.Readlinkat(int(dir.Fd()), name, b)
		if err != nil {
			return srcErr(path, "readlink", err)
		}
		e.link = string(b[:n])
	}

	return t.putHeader(e, a, path)
}

// putRegular writes a regular file with its data. The file must not change in the meantime.
func (t *tarrer) putRegular(dir *os.File, name, path string) error {
	f, err := OpenFile(dir, name, path)
	if err != nil {
		return err
	}

	defer f.Close()
	a, st, err := t.attrs.ReadFile(f, path)
	if err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return changed(path)
	}

	// Find the data. A file with holes says where it is.
	ranges, err := dataRanges(f, path, st.Size)
	if err != nil {
		return err
	}

	e := tarEntry{name: path, typ: typeRegular, size: st.Size}
	if len(ranges) != 1 || ranges[0] != (tarRange{0, st.Size}) {
		e.setSparse(ranges)
	}

	if err := t.putHeader(e, a, path); err != nil {
		return err
	}

	for _, r := range ranges {
		if err := t.putData(f, path, r); err != nil {
			return err
		}
	}

	if err := t.out.pad(); err != nil {
		return err
	}

	// Check that nothing has changed.
	now, err := kernel.Stat(int(f.Fd()))
	if err != nil {
		return srcErr(path, "stat", err)
	}
	if now.Size != st.Size || now.Mtim != st.Mtim || now.Ctim != st.Ctim {
		return changed(path)
	}

	return nil
}

// mostTarRanges limits the map of a sparse file, because readers do: Go's reads at most 1 MiB.
const mostTarRanges = 16 << 10

// dataRanges returns the data of a file. If there are too many pieces, those with the shortest holes between
// them are joined.
func dataRanges(f *os.File, path string, size int64) ([]tarRange, error) {
	ranges := []tarRange{}
	for off := int64(0); off < size; {
		from, to, err := NextData(f, off, size)
		if err != nil {
			return nil, srcErr(path, "seek", err)
		}
		if from < to {
			ranges = append(ranges, tarRange{from, to})
		}
		off = max(to, off+1)
	}

	if size == 0 {
		ranges = append(ranges, tarRange{0, 0})
	}

	for gap := int64(blockSize); len(ranges) > mostTarRanges; gap *= 2 {
		ranges = joinRanges(ranges, gap)
	}

	return ranges, nil
}

// joinRanges joins neighbours with holes of up to gap bytes between them.
func joinRanges(ranges []tarRange, gap int64) []tarRange {
	out := ranges[:1]
	for _, r := range ranges[1:] {
		if last := &out[len(out)-1]; r.from-last.to <= gap {
			last.to = r.to
			continue
		}
		out = append(out, r)
	}
	return out
}

// putData writes a range of a file.
func (t *tarrer) putData(f *os.File, path string, r tarRange) error {
	for off := r.from; off < r.to; {
		if err := t.ctx.Err(); err != nil {
			return err
		}

		p := t.buf[:min(int64(len(t.buf)), r.to-off)]
		n, err := f.ReadAt(p, off)
		switch {
		case n == len(p):
		case errors.Is(err, io.EOF):
			return changed(path) // it became shorter
		default:
			return srcErr(path, "read", err)
		}

		if err := t.out.write(p); err != nil {
			return err
		}

		t.n.addProgress(0, int64(n))
		off += int64(n)
	}

	return nil
}

// putHeader writes the header of a file with these attributes.
func (t *tarrer) putHeader(e tarEntry, a Attributes, path string) error {
	e.mode, e.uid, e.gid, e.mtime, e.atime = a.Mode, a.UID, a.GID, a.Mtime, a.Atime
	shown := func() string { return path }
	var flags []string
	for _, k := range tarFlagNames {
		if a.Flags&k.bit != 0 {
			flags = append(flags, k.name)
		}
	}

	if flags != nil {
		e.record("SCHILY.fflags", strings.Join(flags, ","))
	}

	// Count what tar cannot store.
	(&setter{n: t.n}).countFlags(object{}, shown, a.Flags&storedFlags)
	if a.Project != 0 {
		t.n.countLoss(LostProject, object{}, shown)
	}

	for _, x := range a.Xattrs {
		switch {
		case e.recordACL(x):
		case strings.Contains(x.Name, "="):
			t.n.xattrs.Add(1)
		default:
			e.record("SCHILY.xattr."+x.Name, string(x.Value))
		}
	}

	if len(e.records) > maxTarRecords {
		return errs.New(errs.Unsupported, opTar, quote(path), "its extended attributes are too large for a tar archive").
			WithHint("remove some of them")
	}

	return t.out.putHeader(e)
}

// tarFlagNames are the names of flags in archives, as bsdtar writes them; see tarFlags.
var tarFlagNames = []struct {
	bit  uint32
	name string
}{
	{kernel.FlagImmutable, "schg"},
	{kernel.FlagAppend, "sappnd"},
	{kernel.FlagNoDump, "nodump"},
	{kernel.FlagNoAtime, "noatime"},
	{kernel.FlagSync, "sync"},
	{kernel.FlagDirSync, "dirsync"},
	{kernel.FlagProjectInherit, "projinherit"},
}

func joinPath(dir, name string) string {
	if dir == "" {
		return name
	}
	return dir + "/" + name
}
