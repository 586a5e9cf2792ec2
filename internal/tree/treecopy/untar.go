package treecopy

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io"
	"math"
	"os"
	"runtime"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"pando/internal/base/errs"
)

// Untar extracts a tar archive into the empty directory dst: plain, or
// compressed with gzip or zstd, in any dialect of tar.
//
// It does not trust the archive. It refuses names that are absolute or have a ".."
// component, and names and targets of hard links that lead
// through a symbolic link. An archive without its end marker is Damaged,
// because it may be truncated. Data after the marker is ignored, unless it
// is another archive or the marker is the first block: images of disks often
// begin with zeros as well. After an error, dst contains a part of the archive.
//
// A later entry replaces an earlier one with the same name. Owners are set by
// number. Extended attributes, ACLs and flags come from PAX records
// (SCHILY.xattr.*, SCHILY.acl.*, SCHILY.fflags). Missing access times are set to the
// modification times. Missing directories
// get mode 0755 and belong to the caller. The archive's root ("./") keeps its
// owner, times and attributes but gets mode 0755.
//
// Sparse files of GNU tar stay sparse; reading one takes about a minute for
// each TiB of holes.
//
// Another goroutine reads r, up to its end, even after the end of the archive. If Untar returns
// an error, in particular of the context, a Read may still be running; closing the source of r ends it.
func Untar(ctx context.Context, r io.Reader, dst *os.File, opt Options) (Totals, error) {
	defer runtime.KeepAlive(dst)

	root, err := openRoot(dst)
	if err != nil {
		return Totals{}, err
	}

	defer unix.Close(root)

	// Open the archive.
	s := newStream(ctx, r)
	defer s.close()

	if err := checkTar(s); err != nil {
		return Totals{}, err
	}

	// Prepare the destination.
	stage, err := openStage(root, opt)
	if err != nil {
		return Totals{}, err
	}

	u := &untar{
		ctx:  ctx,
		s:    s,
		tr:   tar.NewReader(s),
		n:    newCounters(opt),
		tree: newDirTree(stage.fd),
		buf:  make([]byte, bufferSize),

		empty: true,
		late:  make(map[dirKey]fileFlags),
		out:   make(map[dirKey]string),
	}

	u.set = setter{n: u.n, unprivileged: opt.Unprivileged, ownRoot: opt.OwnRoot}
	u.tree.removed = func(k dirKey) { delete(u.late, k) }

	// Extract all entries, then set attributes, flags last.
	err = u.extractAll()
	if err == nil {
		err = u.leaveAll()
	}

	u.tree.close()
	if err == nil {
		err = stage.finish()
	}
	if err == nil {
		err = u.setLate(dst)
	}
	if err == nil {
		err = u.finishRoot(root)
	}

	return u.n.totals(), err
}

// checkTar returns an error if the stream does not begin like a tar archive.
func checkTar(s *stream) error {
	head, err := s.peek()
	if err != nil {
		return err
	}

	switch {
	case len(head) == 0:
		return errs.New(errs.Invalid, op, "", "the archive is empty: it does not even have an end marker")
	case !isTarHeader(head) && (len(head) < tarBlock || !allZero(head[:tarBlock])):
		if m := Compression(head); m != "" {
			return notTar(" but is compressed with " + m + ", twice perhaps")
		}
		return notTar("")
	}

	return nil
}

// notTar returns the error for a file that is not a tar archive.
func notTar(but string) error {
	return errs.New(errs.Invalid, op, "", "it is not a tar archive%s", but).
		WithHint("give a directory, a tar archive (plain, gzip or zstd) or a disk image")
}

// sparseMax is the size in bytes of the largest accepted sparse file.
const sparseMax = 64 << 40

// untar is one run of Untar. One goroutine uses it.
type untar struct {
	ctx  context.Context
	s    *stream
	tr   *tar.Reader
	n    *counters
	set  setter
	tree *dirTree
	buf  []byte

	empty bool                 // no entry has been read
	late  map[dirKey]fileFlags // flags to be set when all names exist
	out   map[dirKey]string    // files that were left out, with their kind of loss
}

// extractAll extracts every entry. Directories get their attributes later.
func (u *untar) extractAll() error {
	for {
		if err := u.ctx.Err(); err != nil {
			return errs.Wrap(op, "", err)
		}

		// Skip the rest of an entry, so that the next read is a header.
		if _, err := io.Copy(io.Discard, u.tr); err != nil {
			return u.readErr("", err)
		}

		u.s.mark()
		hdr, err := u.tr.Next()
		if err == io.EOF {
			return u.checkEnd()
		}
		if err != nil && !(errors.Is(err, tar.ErrInsecurePath) && hdr != nil) {
			return u.readErr("", err)
		}

		u.empty = false
		if err := u.extractEntry(hdr); err != nil && err != errSkipped {
			return err
		}
	}
}

// checkEnd checks what follows the last entry.
func (u *untar) checkEnd() error {
	if !u.s.zeroHeader {
		return u.readErr("", io.ErrUnexpectedEOF)
	}

	// Read up to the end, which has the checksum of the compression, and because the writer of a
	// pipe waits until all data has been read.
	garbage := false
	for zeros := 0; ; {
		n, err := u.s.Read(u.buf)
		for b := range slices.Chunk(u.buf[:n], tarBlock) {
			if zeros += len(b); u.empty && (zeros >= SniffLen || !allZero(b)) {
				return notTar("")
			}
			if garbage || allZero(b) {
				continue
			}
			if isTarHeader(b) {
				return errs.New(errs.Invalid, op, "", "another archive follows the end of the archive").
					WithHint("unpack all of them with `tar --ignore-zeros`, and import the directory")
			}
			garbage = true
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}

		if err := u.ctx.Err(); err != nil {
			return errs.Wrap(op, "", err)
		}
	}
}

// readErr returns the error for a failed read of the archive.
func (u *untar) readErr(name string, err error) error {
	var e *errs.Error
	switch {
	case errors.As(err, &e):
		return err
	case errors.Is(err, io.ErrUnexpectedEOF), err == io.EOF:
		return errs.New(errs.Damaged, op, quote(name), "the archive is truncated: it ends after %d bytes", u.s.offset).
			WithHint(hintTruncated)
	case errors.Is(err, tar.ErrHeader):
		return errs.New(errs.Damaged, op, quote(name), "the archive is corrupt near byte %d: %w", u.s.offset, err)
	}
	return errs.New(errs.Invalid, op, quote(name), "the archive near byte %d: %w", u.s.offset, err)
}

// refuse returns the error for an entry that cannot or must not be extracted.
func refuse(name, format string, args ...any) *errs.Error {
	return errs.New(errs.Invalid, op, quote(name), format, args...)
}

// split splits a name in an entry of the archive into the components of its directory and the last
// component; both are empty for the root.
func split(entry, name, what string) (dir []string, base string, err error) {
	if strings.HasPrefix(name, "/") {
		return nil, "", refuse(entry, "%s is absolute: %q", what, name)
	}

	for c := range strings.SplitSeq(name, "/") {
		switch c {
		case "", ".":
		case "..":
			return nil, "", refuse(entry, `%s contains "..": %q`, what, name)
		default:
			dir = append(dir, c)
		}
	}

	if strings.IndexByte(name, 0) >= 0 {
		return nil, "", refuse(entry, "%s contains a zero byte: %q", what, name)
	}
	if len(dir) == 0 {
		return nil, "", nil
	}

	return dir[:len(dir)-1], dir[len(dir)-1], nil
}

// extractEntry extracts one entry.
func (u *untar) extractEntry(hdr *tar.Header) error {
	switch hdr.Typeflag {
	case tar.TypeXGlobalHeader:
		return globalHeader(hdr)
	case 'V': // a label of GNU tar
		return nil
	}

	// Check its name and attributes.
	dirs, base, err := split(hdr.Name, hdr.Name, "its name")
	if err != nil {
		return err
	}

	a, xs, err := u.attrs(hdr)
	if err != nil {
		return err
	}

	// Extract directories.
	if isDirEntry(hdr) {
		return u.directory(dirs, base, hdr, &dirMeta{a, xs})
	}
	if base == "" {
		return refuse(hdr.Name, "it names the root but is not a directory")
	}

	// Extract other types.
	parent, err := u.tree.mkdirAll(u.ctx, dirs, false, hdr.Name)
	if err != nil {
		return err
	}

	at, err := u.tree.openNode(parent)
	if err != nil {
		return dstErr(hdr.Name, "open", err)
	}

	f := place{tree: u.tree, parent: parent, at: at, base: base, name: hdr.Name}
	delete(u.out, f.key())

	switch hdr.Typeflag {
	case tar.TypeReg, tar.TypeCont, tar.TypeGNUSparse:
		if err := u.regular(f, hdr, a, xs); err != nil {
			return err
		}
		u.keepLate(f, hdr)
	case tar.TypeLink:
		if err := u.link(f, hdr.Linkname); err != nil {
			return err
		}
	default:
		return u.special(f, hdr, a, xs)
	}

	u.n.addProgress(1, 0)
	return nil
}

// isDirEntry reports whether an entry is a directory.
func isDirEntry(hdr *tar.Header) bool {
	return hdr.Typeflag == tar.TypeDir ||
		hdr.Typeflag == 'D' || // GNU tar's incremental format, with a list of names
		hdr.Typeflag == tar.TypeReg && hdr.Size == 0 && strings.HasSuffix(hdr.Name, "/") // old formats
}

// directory extracts a directory, which gets its attributes later. base is empty for the root.
func (u *untar) directory(dirs []string, base string, hdr *tar.Header, meta *dirMeta) error {
	if base == "" {
		u.tree.root.meta = meta
		u.keepLate(place{name: hdr.Name}, hdr)
		return nil
	}

	n, err := u.tree.mkdirAll(u.ctx, append(dirs, base), true, hdr.Name)
	if err != nil {
		return err
	}

	n.meta = meta
	u.keepLate(place{parent: n.parent, base: n.name, name: hdr.Name}, hdr)
	u.n.addProgress(1, 0)
	return nil
}

// special extracts a symbolic link, a device or a fifo. errSkipped: it was left out.
func (u *untar) special(f place, hdr *tar.Header, a attrs, xs []xattr) (err error) {
	switch hdr.Typeflag {
	case tar.TypeSymlink:
		if hdr.Linkname == "" || strings.IndexByte(hdr.Linkname, 0) >= 0 {
			return refuse(hdr.Name, "it is a symbolic link to %q", hdr.Linkname)
		}
		err = f.replace("symlink", func() error { return u.set.symlink(hdr.Linkname, namedObject(f.at, f.base), f.path) })
		u.leftOut(f, LostSymlinks, err)
	case tar.TypeChar, tar.TypeBlock:
		if hdr.Devmajor < 0 || hdr.Devmajor >= 1<<12 || hdr.Devminor < 0 || hdr.Devminor >= 1<<20 {
			return refuse(hdr.Name, "it has an impossible device number %d:%d", hdr.Devmajor, hdr.Devminor)
		}
		fallthrough
	case tar.TypeFifo:
		rdev := unix.Mkdev(uint32(hdr.Devmajor), uint32(hdr.Devminor))
		if hdr.Typeflag == tar.TypeFifo {
			rdev = 0
		}
		err = f.replace("mknod", func() error { return u.set.mknod(namedObject(f.at, f.base), a.mode, rdev, f.path) })
		u.leftOut(f, LostDevices, err)
	default:
		return errs.New(errs.Unsupported, op, quote(hdr.Name), "Pando cannot extract entries of type %q", hdr.Typeflag)
	}

	u.n.addProgress(1, 0)
	if err != nil {
		return err
	}

	return u.set.applyAttrs(namedObject(f.at, f.base), f.path, a, xs)
}

// globalHeader refuses PAX records for all following entries, except irrelevant ones such as the
// comment that git writes.
func globalHeader(hdr *tar.Header) error {
	for k := range hdr.PAXRecords {
		switch {
		case k == "path", k == "linkpath", k == "size", k == "uid", k == "gid", k == "mtime", k == "atime",
			strings.HasPrefix(k, "SCHILY."), strings.HasPrefix(k, "GNU.sparse."):
			return errs.New(errs.Unsupported, op, "", "the archive has a global header with %q", k).
				WithHint("unpack it with tar and import the directory")
		}
	}
	return nil
}

// attrs returns the attributes in a header.
func (u *untar) attrs(hdr *tar.Header) (attrs, []xattr, error) {
	a := attrs{mode: uint32(hdr.Mode & 0o7777), uid: uint32(hdr.Uid), gid: uint32(hdr.Gid)}

	// chown does not change the owner if the number is MaxUint32.
	if hdr.Uid < 0 || int64(hdr.Uid) >= math.MaxUint32 || hdr.Gid < 0 || int64(hdr.Gid) >= math.MaxUint32 {
		return a, nil, refuse(hdr.Name, "it has an impossible owner %d:%d", hdr.Uid, hdr.Gid)
	}

	switch hdr.Typeflag {
	case tar.TypeChar:
		a.mode |= unix.S_IFCHR
	case tar.TypeBlock:
		a.mode |= unix.S_IFBLK
	case tar.TypeFifo:
		a.mode |= unix.S_IFIFO
	}

	// Read the times.
	a.mtime = timespec(hdr.ModTime)
	a.atime = a.mtime
	if !hdr.AccessTime.IsZero() {
		a.atime = timespec(hdr.AccessTime)
	}

	// Read extended attributes and ACLs.
	var xs []xattr
	have := make(map[string]bool)
	for k, v := range hdr.PAXRecords {
		name, ok := strings.CutPrefix(k, "SCHILY.xattr.")
		if !ok || name == "" || double(name) {
			continue
		}
		if strings.IndexByte(name, 0) >= 0 {
			return a, nil, refuse(hdr.Name, "it has an attribute named %q", name)
		}
		if foreign(name) {
			u.n.xattrs.Add(1)
			continue
		}
		xs = append(xs, xattr{name, []byte(v)})
		have[name] = true
	}

	for key, name := range map[string]string{"SCHILY.acl.access": aclAccess, "SCHILY.acl.default": aclDefault} {
		text := hdr.PAXRecords[key]
		if text == "" || have[name] {
			continue
		}
		acl, err := encodeACL(text)
		if err != nil {
			return a, nil, refuse(hdr.Name, "%w", err).WithHint("make the archive with `tar --numeric-owner`")
		}
		xs = append(xs, xattr{name, acl})
	}

	slices.SortFunc(xs, func(a, b xattr) int { return strings.Compare(a.name, b.name) })
	return a, xs, nil
}

// keepLate remembers the flags in a header, which are set at the end.
func (u *untar) keepLate(p place, hdr *tar.Header) {
	flags, other := parseFlags(hdr.PAXRecords["SCHILY.fflags"])
	if other {
		u.n.countLoss(LostOtherFlags, object{}, p.path)
	}
	if flags != 0 {
		u.late[p.key()] = fileFlags{flags: flags}
	}
}

// setLate sets the flags of everything except the root.
func (u *untar) setLate(dst *os.File) error {
	var l lateFlags
	for k, f := range u.late {
		if k.parent != nil {
			l.items = append(l.items, lateItem{dir: k.parent, name: k.name, flags: f})
		}
	}
	return l.applyLate(u.ctx, &u.set, dst, func(i lateItem) string {
		return strings.TrimPrefix(i.dir.rel()+"/"+i.name, "/")
	})
}

// leftOut remembers that a file was left out, so that its other names are left out as well.
func (u *untar) leftOut(p place, what string, err error) {
	if err == errSkipped {
		u.out[p.key()] = what
	}
}

func timespec(t time.Time) unix.Timespec {
	return unix.Timespec{Sec: t.Unix(), Nsec: int64(t.Nanosecond())}
}

// place is the destination of an entry that is not a directory.
type place struct {
	tree   *dirTree
	parent *dirNode
	at     int // parent's descriptor
	base   string
	name   string // in the archive
}

func (p place) path() string { return p.name }
func (p place) key() dirKey  { return dirKey{p.parent, p.base} }

// replace calls create. If a file exists in its place, it removes that and calls create again.
func (p place) replace(call string, create func() error) error {
	err := retry0(create)
	if errors.Is(err, unix.EEXIST) {
		if err := p.tree.remove(p.parent, p.at, p.base, p.name); err != nil {
			return err
		}
		err = retry0(create)
	}

	var e *errs.Error
	if err == nil || err == errSkipped || errors.As(err, &e) {
		return err
	}

	return dstErr(p.name, call, err)
}

// regular extracts a regular file.
func (u *untar) regular(p place, hdr *tar.Header, a attrs, xs []xattr) (err error) {
	// Create the file.
	sparse := hdr.Typeflag == tar.TypeGNUSparse
	for k := range hdr.PAXRecords {
		sparse = sparse || strings.HasPrefix(k, "GNU.sparse.")
	}

	fd := -1
	err = p.replace("create", func() (err error) {
		fd, err = unix.Openat(p.at, p.base, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
		return err
	})
	if err != nil {
		return err
	}

	defer func() {
		if cerr := unix.Close(fd); cerr != nil && cerr != unix.EINTR && err == nil {
			err = dstErr(p.name, "close", cerr)
		}
	}()

	if sparse {
		// A tiny archive may claim exabytes of zeros, all of which would have to be read.
		if hdr.Size > sparseMax {
			return refuse(hdr.Name, "it claims to be a sparse file of %d bytes", hdr.Size)
		}
		if err := retry0(func() error { return unix.Ftruncate(fd, hdr.Size) }); err != nil {
			return dstErr(p.name, "truncate", err)
		}
	}

	// Write its data.
	for off := int64(0); ; {
		n, rerr := io.ReadFull(u.tr, u.buf)
		if err := u.writeData(fd, u.buf[:n], off, sparse, p.path); err != nil {
			return err
		}

		off += int64(n)
		eof := rerr == io.EOF || rerr == io.ErrUnexpectedEOF
		if eof && off >= hdr.Size {
			break
		}
		if rerr != nil {
			return u.readErr(p.name, rerr)
		}

		if err := u.ctx.Err(); err != nil {
			return errs.Wrap(op, quote(p.name), err)
		}
	}

	return u.set.applyAttrs(openObject(fd), p.path, a, xs)
}

// writeData writes p at off. In sparse files, it skips blocks of zeros.
func (u *untar) writeData(fd int, p []byte, off int64, sparse bool, path func() string) error {
	if !sparse {
		err := writeAt(fd, p, off, path)
		if err == nil {
			u.n.addProgress(0, int64(len(p)))
		}
		return err
	}

	for len(p) > 0 {
		n := 0 // number of bytes up to the next hole
		for n < len(p) && !hole(p[n:]) {
			n += min(blockSize, len(p)-n)
		}
		if err := writeAt(fd, p[:n], off, path); err != nil {
			return err
		}
		u.n.addProgress(0, int64(n))
		for n < len(p) && hole(p[n:]) {
			n += blockSize
		}
		n = min(n, len(p))
		p, off = p[n:], off+int64(n)
	}

	return nil
}

// hole reports whether p begins with a whole block of zeros.
func hole(p []byte) bool { return len(p) >= blockSize && bytes.Equal(p[:blockSize], zeros[:]) }

// link makes a hard link to an earlier entry.
func (u *untar) link(p place, target string) error {
	// Find the target.
	dirs, base, err := split(p.name, target, "the target of the hard link")
	if err != nil {
		return err
	}

	missing := refuse(p.name, "it is a hard link to %q, which is not in the archive", target)
	if base == "" {
		return missing
	}

	node := u.tree.find(dirs)
	if node == nil {
		// It does not exist, or is behind a symbolic link.
		return missing
	}

	if what, out := u.out[dirKey{node, base}]; out {
		u.out[p.key()] = what
		if what == LostDevices && u.set.unprivileged {
			u.n.devices.Add(1)
		} else {
			u.n.countLoss(what, object{}, p.path)
		}
		return nil
	}

	// Open the directories of both.
	at, err := unix.FcntlInt(uintptr(p.at), unix.F_DUPFD_CLOEXEC, 0) // because opening node may close it
	if err != nil {
		return dstErr(p.name, "dup", err)
	}

	defer unix.Close(at)

	from, err := u.tree.openNode(node)
	if err != nil {
		return dstErr(p.name, "open", err)
	}

	// Check the target, and make the link.
	var have, want unix.Stat_t
	if err := unix.Fstatat(from, base, &want, unix.AT_SYMLINK_NOFOLLOW); err == unix.ENOENT {
		return missing
	} else if err != nil {
		return dstErr(p.name, "stat", err)
	}

	if want.Mode&unix.S_IFMT == unix.S_IFDIR {
		return refuse(p.name, "it is a hard link to %q, a directory", target)
	}
	if unix.Fstatat(at, p.base, &have, unix.AT_SYMLINK_NOFOLLOW) == nil && inode(&have) == inode(&want) {
		return nil // this link already exists
	}

	p.at = at
	return p.replace("link", func() error { return unix.Linkat(from, base, at, p.base, 0) })
}

// dirMeta contains the attributes of a directory, which are set when everything else is done.
type dirMeta struct {
	attrs
	xattrs []xattr
}

// leaveAll sets the attributes of directories, children first: the
// mode of a directory may forbid access to its children, and a default ACL or a new
// entry would change attributes that are already set.
func (u *untar) leaveAll() error {
	for _, n := range slices.Backward(u.tree.made) {
		if n.meta == nil || n.removed {
			continue
		}

		if err := u.ctx.Err(); err != nil {
			return errs.Wrap(op, "", err)
		}

		by, err := u.tree.openNode(n)
		fd := -1
		if err == nil {
			fd, err = openDir(by, ".")
		}
		if err != nil {
			return dstErr(n.path(), "open", err)
		}

		err = u.set.applyAttrs(openObject(fd), n.path, n.meta.attrs, n.meta.xattrs)
		unix.Close(fd)
		if err != nil {
			return err
		}

		n.meta = nil
	}

	return nil
}

// finishRoot sets the attributes of the root.
func (u *untar) finishRoot(root int) error {
	m := u.tree.root.meta
	if m == nil {
		if err := unix.Fchmod(root, 0o755); err != nil {
			return dstErr(".", "chmod", err)
		}
		return nil
	}
	m.flags = u.late[dirKey{}]
	return u.set.applyRoot(root, func() string { return "." }, m.attrs, m.xattrs)
}
