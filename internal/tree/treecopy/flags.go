package treecopy

import (
	"context"
	"errors"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"pando/internal/linux/kernel"
	"pando/internal/linux/treewalk"
)

// This file copies what chattr(1) and xfs_io(8) set: flags, project IDs, and
// hints about storage.
//
// Flags and project IDs come last. Immutable and append-only files and directories cannot be changed,
// linked to or moved, and a directory with an inherited project does not accept
// links to files of other projects. Hints come first, because they work only on
// files without data.

// fileFlags are the flags, project and hints of a file. Most files have the zero value.
type fileFlags struct {
	flags   uint32 // of kernel.Flag...
	project uint32
	hints   kernel.FSXAttr // XFlags, ExtentSize and CowExtentSize only
}

func (f *fileFlags) none() bool { return f.flags == 0 && f.project == 0 && f.hints.XFlags == 0 }

const (
	protectFlags = kernel.FlagImmutable | kernel.FlagAppend
	hintFlags    = kernel.FlagCompress | kernel.FlagNoCow
	hintXFlags   = kernel.XFlagExtentSize | kernel.XFlagExtentSizeInherit | kernel.XFlagCowExtentSize
	// storedFlags say how the source stores a file. They are not copied, but reported because they matter.
	storedFlags = kernel.FlagEncrypted | kernel.FlagVerity | kernel.FlagCasefold
)

// keptFlags are the copied flags, in the order in which they are set if they must be set one by one. The
// protecting ones come last, because ext4 changes no flags of immutable files.
var keptFlags = []struct {
	bit  uint32
	what string
}{
	{kernel.FlagNoDump, LostNoDump},
	{kernel.FlagNoAtime, LostNoAtime},
	{kernel.FlagSync, LostSync},
	{kernel.FlagDirSync, LostDirSync},
	{kernel.FlagProjectInherit, LostProjectInherit},
	{kernel.FlagAppend, LostAppend},
	{kernel.FlagImmutable, LostImmutable},
}

const keepMask = kernel.FlagNoDump | kernel.FlagNoAtime | kernel.FlagSync | kernel.FlagDirSync |
	kernel.FlagProjectInherit | protectFlags

// readFlags reads the flags of an open file of the source. Those that its filesystem does not support are
// zero.
func readFlags(fd int) (f fileFlags) {
	if flags, err := kernel.GetFlags(fd); err == nil {
		f.flags = flags & (keepMask | hintFlags | storedFlags)
	}
	if x, err := kernel.GetFSXAttr(fd); err == nil {
		f.project = knownProject(x.Project)
		if f.hints.XFlags = x.XFlags & hintXFlags; f.hints.XFlags != 0 {
			f.hints.ExtentSize, f.hints.CowExtentSize = x.ExtentSize, x.CowExtentSize
		}
	}
	return f
}

// readSpecialFlags reads the flags of a file that cannot be opened, which has only a project.
func readSpecialFlags(at int, name string) (f fileFlags) {
	if p, err := kernel.SpecialProject(at, name); err == nil {
		f.project = knownProject(p)
	}
	return f
}

// knownProject returns p, or 0 (no project) if p is the number for an invalid project.
func knownProject(p uint32) uint32 {
	if p == 1<<32-1 {
		return 0
	}
	return p
}

// setHints sets the hints of an empty file or a complete directory to those of the
// source. It ignores errors, because other filesystems store files differently.
func setHints(fd int, f fileFlags) {
	if f.flags&hintFlags != 0 {
		if have, err := kernel.GetFlags(fd); err == nil {
			_ = kernel.SetFlags(fd, have|f.flags&hintFlags)
		}
	}

	if f.hints.XFlags != 0 {
		if x, err := kernel.GetFSXAttr(fd); err == nil {
			x.XFlags |= f.hints.XFlags
			x.ExtentSize, x.CowExtentSize = f.hints.ExtentSize, f.hints.CowExtentSize
			_ = kernel.SetFSXAttr(fd, x)
		}
	}
}

// fatal reports whether an error comes from the disk, not from an unsupported request.
func fatal(err error) bool {
	return errors.Is(err, unix.EIO) || errors.Is(err, unix.EROFS) ||
		errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT)
}

// setFlags sets the flags and the project in f on o, and counts those that cannot be set.
// Flags that o already has stay, such as inherited ones.
func (s *setter) setFlags(o object, path func() string, f fileFlags) error {
	if f.none() {
		return nil
	}

	fd := o.fd
	if fd < 0 {
		var err error
		fd, err = kernel.OpenForFlags(o.at, o.name)
		if err == unix.EOPNOTSUPP {
			return s.setSpecialProject(o, path, f.project)
		}
		if err != nil {
			return dstErr(path(), "open", err)
		}
		defer unix.Close(fd)
	}

	o.fd = fd
	if err := s.setProject(o, path, f.project); err != nil {
		return err
	}

	return s.setBits(o, path, f.flags)
}

func (s *setter) setProject(o object, path func() string, project uint32) error {
	if project == 0 {
		return nil
	}

	x, err := kernel.GetFSXAttr(o.fd)
	if err == nil && x.Project != project {
		x.Project = project
		if err = kernel.SetFSXAttr(o.fd, x); err == nil {
			x, err = kernel.GetFSXAttr(o.fd)
		}
	}
	if fatal(err) {
		return dstErr(path(), "setting the project ID", err)
	}
	if err != nil || x.Project != project {
		s.n.countLoss(LostProject, o, path)
	}

	return nil
}

func (s *setter) setSpecialProject(o object, path func() string, project uint32) error {
	if project == 0 {
		return nil
	}
	err := kernel.SetSpecialProject(o.at, o.name, project)
	if fatal(err) {
		return dstErr(path(), "setting the project ID", err)
	}
	if now, e := kernel.SpecialProject(o.at, o.name); err != nil || e != nil || now != project {
		s.n.countLoss(LostProject, o, path)
	}
	return nil
}

func (s *setter) setBits(o object, path func() string, flags uint32) error {
	want := flags & (keepMask | storedFlags)
	if want == 0 {
		return nil
	}

	have, err := kernel.GetFlags(o.fd)
	if err == nil && have&want != want {
		if err = kernel.SetFlags(o.fd, have|want&keepMask); err != nil && !fatal(err) {
			// The filesystem rejects at least one of them, so set them one by one.
			for _, k := range keptFlags {
				if now, err := kernel.GetFlags(o.fd); err == nil && want&k.bit != 0 {
					_ = kernel.SetFlags(o.fd, now|k.bit)
				}
			}
		}
		if fatal(err) {
			return dstErr(path(), "setting flags", err)
		}
		have, err = kernel.GetFlags(o.fd)
	}
	if err != nil {
		have = 0
	}

	s.countFlags(o, path, want&^have)
	return nil
}

// countFlags counts flags that are not kept.
func (s *setter) countFlags(o object, path func() string, flags uint32) {
	for _, k := range keptFlags {
		if flags&k.bit != 0 {
			s.n.countLoss(k.what, o, path)
		}
	}

	for bit, what := range map[uint32]string{
		kernel.FlagEncrypted: LostEncrypted, kernel.FlagVerity: LostVerity, kernel.FlagCasefold: LostCasefold,
	} {
		if flags&bit != 0 {
			s.n.countLoss(what, o, path)
		}
	}
}

// clearFlags clears the flags that a copy sets, and the project.
func clearFlags(fd int) error {
	flags, err := kernel.GetFlags(fd)
	if err != nil {
		return nil // the filesystem supports no flags
	}

	if flags&keepMask != 0 {
		if err := kernel.SetFlags(fd, flags&^keepMask); err != nil {
			return err
		}
	}

	if x, err := kernel.GetFSXAttr(fd); err == nil && x.Project != 0 {
		x.Project = 0
		_ = kernel.SetFSXAttr(fd, x) // it gets one again
	}

	return nil
}

// lateFlags are flags that have to wait until all names are in their place: those of
// files with several names, and of what staging moves.
type lateFlags struct {
	items []lateItem // under a lock of the owner's
}

type lateItem struct {
	dir   interface{ rel() string } // path of the directory, from the root
	key   uint64
	name  string
	flags fileFlags
}

// applyLate sets them in the finished tree below dst.
func (l *lateFlags) applyLate(ctx context.Context, s *setter, dst *os.File, shown func(lateItem) string) error {
	for _, i := range l.items {
		if err := ctx.Err(); err != nil {
			return err
		}

		path := func() string { return shown(i) }
		dir, err := treewalk.OpenFlags(dst, i.dir.rel(), unix.O_PATH|unix.O_DIRECTORY)
		if err != nil {
			return dstErr(path(), "open", err)
		}

		o := namedObject(int(dir.Fd()), i.name)
		o.key = i.key
		err = s.setFlags(o, path, i.flags)
		dir.Close()
		if err != nil {
			return err
		}
	}

	return nil
}

// rel is the path of d from the root, which is "".
func (d *dir) rel() string {
	if d.parent == nil {
		return ""
	}
	return strings.TrimPrefix(d.parent.rel()+"/"+d.name, "/")
}

func (n *dirNode) rel() string { return n.path() }

// tarFlags are the names of flags in archives that bsdtar writes (SCHILY.fflags),
// as far as Linux has them.
var tarFlags = map[string]uint32{
	"schg": kernel.FlagImmutable, "schange": kernel.FlagImmutable, "simmutable": kernel.FlagImmutable,
	"sappnd": kernel.FlagAppend, "sappend": kernel.FlagAppend,
	"nodump": kernel.FlagNoDump, "noatime": kernel.FlagNoAtime, "sync": kernel.FlagSync, "dirsync": kernel.FlagDirSync,
	"projinherit": kernel.FlagProjectInherit, "nocow": kernel.FlagNoCow, "compress": kernel.FlagCompress,
}

// tarHints are names of flags that say how the source stored a file.
var tarHints = map[string]bool{
	"journal": true, "journal-data": true, "notail": true, "topdir": true, "undel": true,
	"securedeletion": true, "secdel": true, "dump": true,
}

// parseFlags reads SCHILY.fflags. other reports whether it names flags that Linux
// does not have.
func parseFlags(text string) (flags uint32, other bool) {
	for name := range strings.FieldsFuncSeq(text, func(r rune) bool { return r == ',' || r == ' ' }) {
		bit := tarFlags[name]
		flags |= bit
		other = other || bit == 0 && !tarHints[name]
	}
	return flags, other
}
