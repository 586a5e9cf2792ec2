package treestream

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"io"
	"os"
	"strconv"

	"golang.org/x/sys/unix"

	"pando/internal/base/errs"
	"pando/internal/linux/kernel"
	"pando/internal/linux/treewalk"
	"pando/internal/tree/treecopy"
)

const opReceive = "receive"

// ApplyOptions are the options of Apply.
type ApplyOptions struct {
	// Diff says that the stream must be the difference to another tree, of which root is a copy. Without it, the stream
	// must be a whole tree.
	Diff bool
	// Unprivileged is for callers without root. They become the owner of everything, and files that only root can make
	// are left out.
	Unprivileged bool
	// Progress, if set, is called with the numbers of files and bytes of content made since its last call.
	Progress func(files, bytes int64)
}

// maxMissing is how many renamed files may be missing, because the filesystem did not support them.
const maxMissing = 1 << 20

// Apply builds the tree of the stream r in the open directory root, which nobody else may use. root is empty or, for
// a difference, a copy of its base. Apply reads r to its end. The Totals count what the filesystem does not
// support and what the caller may not set. Nothing is durable, and after an error the tree is incomplete.
//
// Damaged: r is not a tree stream, is truncated, or does not match the tree. Conflict: r is a difference instead of a
// whole tree, or vice versa; nothing was changed. TooNew, NoSpace, IO, errors of r, and of ctx.
func Apply(ctx context.Context, r io.Reader, root *os.File, o ApplyOptions) (treecopy.Totals, error) {
	d, err := newDecoder(r)
	if err != nil {
		return treecopy.Totals{}, receiveErr(err)
	}

	switch {
	case d.diff && !o.Diff:
		err = errs.New(errs.Conflict, opReceive, "", "the stream contains only the differences from another tree").
			WithHint("receive that tree first")
	case !d.diff && o.Diff:
		err = errs.New(errs.Conflict, opReceive, "", "the stream contains a whole tree, not the differences from another")
	}
	if err != nil {
		return treecopy.Totals{}, err
	}

	a := &applier{
		ctx: ctx, root: root, o: o, dec: d, missing: map[uint64]bool{},
		attrs: treecopy.NewAttributeWriter(treecopy.Options{Unprivileged: o.Unprivileged}),
	}
	err = a.applyAll()
	a.close()
	return a.attrs.Totals(), receiveErr(err)
}

// receiveErr replaces the operation of errors of treecopy, and removes the hint about a volume that is too small.
func receiveErr(err error) error {
	var e *errs.Error
	if !errors.As(err, &e) {
		return err
	}

	known := *e
	if known.Op == "import" || known.Op == "" {
		known.Op = opReceive
	}
	if known.Kind == errs.NoSpace {
		known.Hint = ""
	}

	return &known
}

// applier builds one tree.
type applier struct {
	ctx   context.Context
	root  *os.File
	o     ApplyOptions
	dec   *decoder
	attrs *treecopy.AttributeWriter

	dir     *os.File // the last used directory; nil: none
	dirPath string

	file     *os.File // the file to which content is written; nil: none
	filePath string
	fileSize int64

	xattrs    []treecopy.Xattr // for the next kindAttrs
	xattrSize int

	stage     *os.File // temporary directory for renamed files; nil until it is needed
	stageName string
	missing   map[uint64]bool // slots of renamed files that do not exist

	held []held
}

// held is a protected file with several names. It stays open, because only some of the names may be left at the end.
type held struct {
	file  *os.File
	flags uint32
}

func (a *applier) close() {
	a.leaveDir()
	for _, f := range []*os.File{a.file, a.stage} {
		if f != nil {
			f.Close()
		}
	}
	for _, h := range a.held {
		h.file.Close()
	}
}

// applyAll applies all records.
func (a *applier) applyAll() error {
	for {
		if err := a.ctx.Err(); err != nil {
			return errs.Wrap(opReceive, "", err)
		}

		r, err := a.dec.readRecord()
		if err != nil {
			return err
		}
		if r.kind == kindEnd {
			return a.endStream()
		}

		if r.kind != kindData && r.kind != kindZero {
			if err := a.closeFile(); err != nil {
				return err
			}
		}

		if len(a.xattrs) > 0 && r.kind != kindXattr && r.kind != kindAttrs {
			return damaged("extended attributes of nothing")
		}

		if err := a.applyRecord(&r); err != nil {
			return err
		}
	}
}

// applyRecord applies one record.
func (a *applier) applyRecord(r *record) error {
	switch r.kind {
	case kindRemove, kindOut, kindIn, kindChange, kindUnprotect:
		if !a.o.Diff {
			return damaged("a tree of its own that changes what was there")
		}
	}

	switch r.kind {
	case kindData:
		return a.writeData(r)
	case kindZero:
		return a.zeroRange(r)
	case kindXattr:
		return a.xattr(r)
	case kindUnprotect:
		return a.unprotect(r)
	case kindAttrs, kindFlags:
		return a.attributes(r)
	}

	dir, name, err := a.parent(r.path)
	if err != nil {
		return err
	}

	switch r.kind {
	case kindDir:
		err = unix.Mkdirat(int(dir.Fd()), name, 0o700)
		a.addProgress(1, 0)
	case kindFile:
		err = a.create(r, dir, name)
	case kindSymlink:
		_, err = a.attrs.Symlink(r.target, dir, name, r.path)
		a.addProgress(1, 0)
	case kindNode:
		_, err = a.attrs.Mknod(r.typ, r.rdev, dir, name, r.path)
		a.addProgress(1, 0)
	case kindLink:
		err = a.link(r, dir, name)
		a.addProgress(1, 0)
	case kindRemove:
		err = a.remove(r, dir, name)
	case kindOut:
		err = a.moveOut(r, dir, name)
	case kindIn:
		err = a.moveIn(r, dir, name)
	case kindChange:
		err = a.openExisting(r, dir, name)
	}

	return misfit(r.path, err)
}

func (a *applier) addProgress(files, bytes int64) {
	if a.o.Progress != nil {
		a.o.Progress(files, bytes)
	}
}

// misfit returns the error of a failed step. It is Damaged if a file exists but should not, or vice versa: the stream
// belongs to another tree.
func misfit(path string, err error) error {
	var known *errs.Error
	switch {
	case err == nil:
		return nil
	case errors.As(err, &known) && known.Kind != errs.Exists && known.Kind != errs.Internal && known.Kind != errs.NotFound:
		return err
	case errs.IsAny(err, unix.EEXIST, unix.ENOENT, unix.ENOTDIR, unix.ELOOP, unix.EISDIR, unix.ENOTEMPTY,
		unix.EXDEV, unix.EINVAL):
		return errs.New(errs.Damaged, opReceive, quote(path), "the stream does not fit the tree: %w", err)
	}

	return errs.Wrap(opReceive, quote(path), err)
}

// mayLack reports whether a file of this type may be missing in a tree because the filesystem does not support it or
// the caller may not make it.
func mayLack(typ uint32) bool { return typ != unix.S_IFREG && typ != unix.S_IFDIR }

// parent opens the directory of a path. It stays open until the next call for another directory, or leaveDir.
func (a *applier) parent(path string) (*os.File, string, error) {
	dirPath, name := split(path)
	if a.dir != nil && a.dirPath == dirPath {
		return a.dir, name, nil
	}

	a.leaveDir()
	dir, err := treewalk.Open(a.root, dirPath)
	if err != nil {
		return nil, "", misfit(dirPath, err)
	}
	if a.o.Unprivileged && a.o.Diff { // its mode is set again at the end
		err = widen(int(dir.Fd()), 0o700)
	}
	if err != nil {
		dir.Close()
		return nil, "", misfit(dirPath, err)
	}

	a.dir, a.dirPath = dir, dirPath
	return dir, name, nil
}

// leaveDir closes the open directory, because its path may mean another directory now.
func (a *applier) leaveDir() {
	if a.dir != nil {
		a.dir.Close()
		a.dir = nil
	}
}

// widen adds permission bits that the owner of a file has removed.
func widen(fd int, bits uint32) error {
	st, err := kernel.Stat(fd)
	if err != nil || st.Mode&bits == bits {
		return err
	}
	return unix.Fchmod(fd, st.Mode&0o7777|bits)
}

func (a *applier) create(r *record, dir *os.File, name string) error {
	const flags = unix.O_WRONLY | unix.O_CREAT | unix.O_EXCL | unix.O_NOFOLLOW | unix.O_CLOEXEC
	fd, err := unix.Openat(int(dir.Fd()), name, flags, 0o600)
	if err != nil {
		return err
	}

	a.file, a.filePath, a.fileSize = os.NewFile(uintptr(fd), r.path), r.path, r.size
	a.attrs.SetHints(a.file, r.attrs.Flags, r.attrs.Hints)
	a.addProgress(1, 0)
	if r.size == 0 {
		return nil
	}

	return unix.Ftruncate(fd, r.size)
}

// openExisting opens an existing regular file. It does not open other types, because opening a device may have side
// effects.
func (a *applier) openExisting(r *record, dir *os.File, name string) error {
	st, err := kernel.Lstat(int(dir.Fd()), name)
	if err != nil {
		return err
	}

	if st.Mode&unix.S_IFMT != unix.S_IFREG || st.Size != r.before {
		return errs.New(errs.Damaged, opReceive, quote(r.path),
			"the stream does not fit the tree: it is not a file of %d bytes", r.before)
	}

	if a.o.Unprivileged && st.Mode&0o200 == 0 {
		if err := unix.Fchmodat(int(dir.Fd()), name, st.Mode&0o7777|0o200, 0); err != nil {
			return err
		}
	}

	fd, err := unix.Openat(int(dir.Fd()), name, unix.O_WRONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}

	a.file, a.filePath, a.fileSize = os.NewFile(uintptr(fd), r.path), r.path, r.size
	a.addProgress(1, 0)
	if r.size == r.before {
		return nil
	}

	return unix.Ftruncate(fd, r.size)
}

// closeFile closes the current file. Some filesystems report write errors only then.
func (a *applier) closeFile() error {
	if a.file == nil {
		return nil
	}
	err := a.file.Close()
	a.file = nil
	return misfit(a.filePath, err)
}

func (a *applier) inFile(off, n int64) error {
	switch {
	case a.file == nil:
		return damaged("content of nothing")
	case off > a.fileSize-n:
		return damaged("content behind the end of %s", quote(a.filePath))
	}
	return nil
}

func (a *applier) writeData(r *record) error {
	if err := a.inFile(r.off, int64(len(r.data))); err != nil {
		return err
	}
	_, err := a.file.WriteAt(r.data, r.off)
	a.addProgress(0, int64(len(r.data)))
	return misfit(a.filePath, err)
}

var zeros [128 << 10]byte

// zeroRange punches a hole, or writes zeros where the filesystem does not support holes.
func (a *applier) zeroRange(r *record) error {
	if err := a.inFile(r.off, r.size); err != nil || r.size == 0 {
		return err
	}

	err := unix.Fallocate(int(a.file.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, r.off, r.size)
	if err != unix.EOPNOTSUPP && err != unix.ENOSYS {
		return misfit(a.filePath, err)
	}

	for off, end := r.off, r.off+r.size; off < end; {
		if err := a.ctx.Err(); err != nil {
			return errs.Wrap(opReceive, "", err)
		}
		n, err := a.file.WriteAt(zeros[:min(int64(len(zeros)), end-off)], off)
		if err != nil {
			return misfit(a.filePath, err)
		}
		off += int64(n)
	}

	return nil
}

// link makes another name of a file. If the file was left out, so is the name.
func (a *applier) link(r *record, dir *os.File, name string) error {
	fromPath, fromName := split(r.target)
	from, err := treewalk.OpenFlags(a.root, fromPath, unix.O_PATH|unix.O_DIRECTORY)
	if err != nil {
		return err
	}

	defer from.Close()

	var st unix.Stat_t
	err = unix.Fstatat(int(from.Fd()), fromName, &st, unix.AT_SYMLINK_NOFOLLOW)
	if err == unix.ENOENT && mayLack(r.typ) {
		return nil
	}
	if err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT != r.typ {
		return unix.EINVAL
	}

	err = unix.Linkat(int(from.Fd()), fromName, int(dir.Fd()), name, 0)
	if err == unix.EMLINK {
		return errs.New(errs.Unsupported, opReceive, quote(r.path), "link: %w", err).
			WithHint("the pool's filesystem does not support so many hard links to one file; pull into another pool")
	}

	return err
}

func (a *applier) remove(r *record, dir *os.File, name string) error {
	a.leaveDirAfter(r.typ)
	flags := 0
	if r.typ == unix.S_IFDIR {
		flags = unix.AT_REMOVEDIR
	}
	err := treewalk.Unlink(int(dir.Fd()), name, flags)
	if err == unix.ENOENT && mayLack(r.typ) {
		return nil
	}
	return err
}

// leaveDirAfter makes the next step open its directory again if the removed or moved file is a directory.
func (a *applier) leaveDirAfter(typ uint32) {
	if typ == unix.S_IFDIR {
		a.dirPath = "/" // no directory has this path
	}
}

// moveOut moves a path into the stage, from which moveIn moves it to its new place.
func (a *applier) moveOut(r *record, dir *os.File, name string) error {
	if a.stage == nil {
		if err := a.makeStage(); err != nil {
			return err
		}
	}

	a.leaveDirAfter(r.typ)
	err := unix.Renameat2(int(dir.Fd()), name, int(a.stage.Fd()), slotName(r.slot), unix.RENAME_NOREPLACE)
	if err == unix.EINVAL { // the filesystem does not support the flag, and a stream uses each slot once
		err = unix.Renameat(int(dir.Fd()), name, int(a.stage.Fd()), slotName(r.slot))
	}
	if err == unix.ENOENT && mayLack(r.typ) && len(a.missing) < maxMissing {
		a.missing[r.slot] = true
		return nil
	}

	return err
}

func slotName(slot uint64) string { return strconv.FormatUint(slot, 10) }

// makeStage makes a directory with an unused name in the root.
func (a *applier) makeStage() error {
	var b [16]byte
	if _, err := rand.Read(b[:]); err != nil {
		return err
	}
	a.stageName = ".pando-" + hex.EncodeToString(b[:])
	if err := unix.Mkdirat(int(a.root.Fd()), a.stageName, 0o700); err != nil {
		return err
	}
	var err error
	a.stage, err = treewalk.Open(a.root, a.stageName)
	return err
}

// moveIn moves a path that moveOut has moved into the stage to its new place.
func (a *applier) moveIn(r *record, dir *os.File, name string) error {
	if a.missing[r.slot] {
		delete(a.missing, r.slot)
		return nil
	}

	if a.stage == nil {
		return unix.ENOENT
	}

	a.leaveDirAfter(r.typ)
	err := unix.Renameat2(int(a.stage.Fd()), slotName(r.slot), int(dir.Fd()), name, unix.RENAME_NOREPLACE)
	if err == unix.EINVAL {
		var st unix.Stat_t
		if unix.Fstatat(int(dir.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW) == nil {
			return unix.EEXIST
		}
		err = unix.Renameat(int(a.stage.Fd()), slotName(r.slot), int(dir.Fd()), name)
	}

	return err
}

// removeStage removes the stage. It must run before the root gets its attributes, because it changes the root's times.
func (a *applier) removeStage() error {
	if a.stage == nil {
		return nil
	}
	a.stage.Close()
	a.stage = nil
	err := unix.Unlinkat(int(a.root.Fd()), a.stageName, unix.AT_REMOVEDIR)
	if err == unix.ENOTEMPTY || err == unix.EEXIST {
		return damaged("what was renamed got no place")
	}
	return misfit("", err)
}

func (a *applier) xattr(r *record) error {
	if a.xattrSize += len(r.target) + len(r.data) + 64; a.xattrSize > 2*maxXattrs {
		return damaged("%d bytes of extended attributes of one file", a.xattrSize)
	}
	a.xattrs = append(a.xattrs, treecopy.Xattr{Name: r.target, Value: append([]byte{}, r.data...)})
	return nil
}

// attributes sets attributes, or flags.
func (a *applier) attributes(r *record) error {
	r.attrs.Xattrs = a.xattrs
	a.xattrs, a.xattrSize = nil, 0
	if r.kind == kindFlags {
		if err := a.protectHeld(); err != nil {
			return err
		}
	}

	if r.path == "" {
		if err := a.removeStage(); err != nil {
			return err
		}
		return a.setAttributes(r, a.root, "")
	}

	dir, name, err := a.parentOf(r)
	if err != nil {
		return err
	}

	defer dir.Close()

	var st unix.Stat_t
	err = unix.Fstatat(int(dir.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW)
	if err == unix.ENOENT && mayLack(r.typ) {
		return nil
	}
	if err != nil {
		return misfit(r.path, err)
	}
	if st.Mode&unix.S_IFMT != r.typ {
		return misfit(r.path, unix.EINVAL)
	}

	return a.setAttributes(r, dir, name)
}

// parentOf opens the directory of a file that gets attributes. It does not change the directory's mode, which may
// already be set.
func (a *applier) parentOf(r *record) (*os.File, string, error) {
	dirPath, name := split(r.path)
	if a.dir != nil && a.dirPath == dirPath {
		fd, err := unix.FcntlInt(a.dir.Fd(), unix.F_DUPFD_CLOEXEC, 0)
		return os.NewFile(uintptr(fd), dirPath), name, misfit(dirPath, err)
	}
	dir, err := treewalk.OpenFlags(a.root, dirPath, unix.O_PATH|unix.O_DIRECTORY)
	return dir, name, misfit(dirPath, err)
}

func (a *applier) setAttributes(r *record, dir *os.File, name string) error {
	if r.kind == kindFlags {
		return misfit(r.path, a.attrs.SetFlags(dir, name, r.path, r.attrs))
	}
	return misfit(r.path, a.attrs.Set(dir, name, r.path, r.attrs))
}

// unprotect clears the flags "immutable" and "append-only" of a file.
func (a *applier) unprotect(r *record) error {
	if r.path == "" {
		kernel.UnprotectFile(int(a.root.Fd()))
		return nil
	}

	dir, name, err := a.parentOf(r)
	if err != nil {
		return err
	}

	defer dir.Close()

	fd, err := kernel.OpenForFlags(int(dir.Fd()), name)
	if err != nil {
		return misfit(r.path, err)
	}

	f := os.NewFile(uintptr(fd), r.path)
	flags := kernel.UnprotectFile(fd)
	var st unix.Stat_t
	err = unix.Fstat(fd, &st)
	if err != nil || flags == 0 || st.Mode&unix.S_IFMT != unix.S_IFREG || st.Nlink < 2 {
		f.Close()
		return misfit(r.path, err)
	}

	if a.held = append(a.held, held{f, flags}); len(a.held) > 2*maxHeld {
		return damaged("too many protected files with several names")
	}

	return nil
}

// protectHeld restores the flags of protected files with several names. Files whose flags have changed get the new ones
// later.
func (a *applier) protectHeld() error {
	for _, h := range a.held {
		err := kernel.Protect(int(h.file.Fd()), h.flags)
		h.file.Close()
		if err != nil {
			a.held = nil
			return misfit(h.file.Name(), err)
		}
	}
	a.held = nil
	return nil
}

// endStream checks that the stream has completed everything that it began.
func (a *applier) endStream() error {
	if len(a.missing) > 0 {
		return damaged("what was renamed got no place")
	}
	if len(a.xattrs) > 0 {
		return damaged("extended attributes of nothing")
	}

	if err := a.closeFile(); err != nil {
		return err
	}

	if err := a.removeStage(); err != nil {
		return err
	}

	return a.protectHeld()
}
