package engine

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"

	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/driver"
	"pando/internal/engine/check"
	"pando/internal/linux/fsprobe"
	"pando/internal/linux/qcow2"
	"pando/internal/tree/treecopy"

	"golang.org/x/sys/unix"
)

// openFile opens a source that is a regular file or a block device, and finds out whether it is an archive or an image.
// It returns Invalid, Damaged, InUse, Unsupported or IO.
//
// A block device is opened exclusively, unless q.Force is set.
func (q *importing) openFile(path string, st fs.FileInfo) (_ *source, err error) {
	device := !st.Mode().IsRegular()
	flags := os.O_RDONLY
	if device && !q.Force {
		flags |= os.O_EXCL // fails if it is mounted, and keeps others from mounting it
	}

	f, err := os.OpenFile(path, flags, 0)
	if device && errors.Is(err, unix.EBUSY) {
		return nil, errs.New(errs.InUse, opImport, q.Source,
			"the block device is mounted or part of another device, so its content may change").
			WithHint("unmount it, or import the directory it is mounted on with %s; to copy the device as is, add %s",
				errs.Param("adopt"), errs.Param("force"))
	}

	if err != nil {
		return nil, err
	}

	defer func() {
		if err != nil {
			f.Close()
		}
	}()

	// Find its size.
	s := &source{path: path, f: f, close: func() { f.Close() }}
	if s.bytes, err = f.Seek(0, io.SeekEnd); err != nil { // of a block device too
		return nil, err
	}

	if _, err = f.Seek(0, io.SeekStart); err != nil {
		return nil, err
	}

	if s.bytes == 0 {
		return nil, errs.New(errs.Invalid, opImport, q.Source, "the file is empty")
	}

	// Recognize archives by their first bytes; everything else is an image.
	format := treecopy.Unknown
	if !device {
		if format, err = treecopy.SniffFile(f); err != nil {
			return nil, err
		}
	}

	switch {
	case format == treecopy.Compressed:
		return nil, refuseCompressed(f, q.Source)
	case format == treecopy.EmptyTar && q.FS == driver.None: // more likely a blank disk
	case format.IsTar():
		s.kind, s.r = SourceTar, bufio.NewReaderSize(f, 1<<20)
		return s, nil
	}

	s.kind = SourceImage
	if !device {
		if err := s.openDisk(q.FS); err != nil {
			return nil, errs.Wrap(opImport, q.Source, err)
		}
	}

	return s, damagedDisk(q.checkImage(s))
}

// openDisk opens the disk in a qcow2 image. Other files are disks themselves, and so are qcow2 images that Pando cannot
// read: checkImage refuses them, with a hint, or imports the file as it is. Damaged.
func (s *source) openDisk(fs driver.FS) error {
	disk, err := qcow2.Open(s.f, s.bytes)
	switch {
	case errors.Is(err, qcow2.ErrNotQcow2), errors.Is(err, qcow2.ErrUnsupported), err != nil && fs == driver.None:
		return nil
	case err != nil:
		return damagedDisk(err)
	}

	data, err := disk.DataBytes()
	if err != nil {
		return damagedDisk(err)
	}

	s.disk, s.bytes, s.alloc = disk, disk.Size(), max(data, 1)
	return nil
}

// damagedDisk gives an error of package qcow2 a kind.
func damagedDisk(err error) error {
	if !errors.Is(err, qcow2.ErrDamaged) {
		return err
	}
	return (&errs.Error{Kind: errs.Damaged, Err: err}).WithHint("check a copy with `qemu-img check`, or download it again")
}

// content reads the image, which s.bytes is the size of.
func (s *source) content() io.ReaderAt {
	if s.disk != nil {
		return s.disk
	}
	return s.f
}

// decompressors are the commands that undo each compression.
var decompressors = map[string]string{"gzip": "gunzip", "zstd": "unzstd", "xz": "unxz", "lzip": "lzip -d",
	"lz4": "unlz4", "bzip2": "bunzip2"}

// refuseCompressed returns the error for a compressed file, with a hint for how to decompress it.
func refuseCompressed(f *os.File, name string) error {
	head := make([]byte, 16)
	n, err := f.ReadAt(head, 0)
	if err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	kind := treecopy.Compression(head[:n])
	return errs.New(errs.Invalid, opImport, name, "it is compressed with %s but is not a tar archive in gzip or zstd",
		kind).
		WithHint("decompress a copy with `%s -k %s`, and import the result", decompressors[kind], errs.ShellWord(name))
}

// checkImage finds out what an image contains, and refuses it unless it is a complete
// filesystem of a type that volumes can have. With --fs none it accepts any content, and
// with --force even an incomplete or damaged filesystem; s.warnings say so.
func (q *importing) checkImage(s *source) (err error) {
	if s.probed, err = fsprobe.Probe(s.content(), s.bytes); err != nil {
		return err
	}

	var wrong error
	switch {
	case s.probed.Type != "":
		wrong = q.checkSuperblock(s)
	case q.FS != driver.None:
		return q.refuseUnknown(s)
	default:
		if wrong, err = q.checkRaw(s); err != nil {
			return err
		}
	}

	// Raw volumes can contain any bytes, so a warning is enough.
	if wrong != nil && (q.Force || q.FS == driver.None && s.probed.Type != "") {
		s.warnings = append(s.warnings, errs.Messagef("imported as is: %s", errs.Reason(wrong)))
		return nil
	}

	return wrong
}

// checkSuperblock checks the superblock of an ext4 or XFS filesystem, and whether the image is large enough for it. It
// returns Damaged or Unsupported.
func (q *importing) checkSuperblock(s *source) error {
	p := s.probed
	switch {
	case p.Backup > 0:
		return errs.New(errs.Damaged, opImport, q.Source, "the %s superblock is missing, but there is a backup at byte %d",
			p.Type, p.Backup).
			WithHint("%s", hintRepair(p.Type))
	case p.Damage != "":
		return errs.New(errs.Damaged, opImport, q.Source, "the image holds %s, but %s", p.Type, p.Damage).
			WithHint("%s", hintRepair(p.Type))
	case p.Bytes > s.bytes:
		return errs.New(errs.Damaged, opImport, q.Source, "the image ends after %d bytes, but its %s has %d: %s",
			s.bytes, p.Type, p.Bytes, missingBytes(p.Bytes-s.bytes)).
			WithHint("copy or download it again, or import it with %s, which fills the missing part with zeros",
				errs.Param("force"))
	case p.Elsewhere != "":
		return errs.New(errs.Unsupported, opImport, q.Source, "the %s of its %s is on another device", p.Elsewhere, p.Type).
			WithHint("mount it together with that device and import the directory, or import the image alone with %s",
				errs.Param("force"))
	}

	return nil
}

// missingBytes says that n bytes are missing.
func missingBytes(n int64) string {
	switch {
	case n == 1:
		return "1 byte is missing"
	case n < 10<<20:
		return fmt.Sprintf("%d bytes are missing", n)
	}
	return errs.FormatBytes(n) + " is missing"
}

// hintRepair returns the hint for how to import a damaged filesystem.
func hintRepair(fs string) errs.Message {
	command := map[string]string{"ext4": "e2fsck -f -y COPY", "xfs": "xfs_repair COPY"}[fs]
	return errs.Messagef("repair a copy with `%s` and import that, or import it as is with %s", command,
		errs.Param("force"))
}

// checkRaw checks an image imported with --fs none in which Probe found no filesystem.
func (q *importing) checkRaw(s *source) (wrong, err error) {
	if s.bytes%512 != 0 {
		return errs.New(errs.Invalid, opImport, q.Source,
			"its size of %d bytes is not a multiple of 512: the disk image is incomplete", s.bytes).
			WithHint("copy or download it again, or import it with %s, which pads it with zeros to a multiple of 4 KiB",
				errs.Param("force")), nil
	}
	c, err := fsprobe.Identify(s.content(), s.bytes)
	if err == nil && (c.Class == fsprobe.VirtualDisk || c.Class == fsprobe.SparseImage) {
		s.warnings = append(s.warnings, errs.Messagef("it is %s: the volume holds this file, not the disk in it", c.Phrase))
	}
	return nil, err
}

// refuseUnknown refuses an image that contains neither ext4 nor XFS, with a hint about
// how to import its content.
func (q *importing) refuseUnknown(s *source) error {
	e := q.e
	c, err := fsprobe.Identify(s.content(), s.bytes)
	if err != nil {
		return err
	}

	what, hint := "it contains no archive or filesystem that Pando recognizes", acceptedSources
	if c.Phrase != "" {
		what = "it is " + c.Phrase
	}

	// Find a hint for this kind of content.
	file := errs.ShellWord(q.Source)
	raw := slices.Contains(e.caps.FS, driver.None)
	switch c.Class {
	case fsprobe.VirtualDisk:
		raw = false
		hint = "ask its maker for a raw image (`qemu-img convert -O raw`): it can name files of this host, which a " +
			"conversion here would copy into the result"
	case fsprobe.SparseImage:
		raw = false
		hint = fmt.Sprintf("convert it with `simg2img %s %s`, and import the result", file, errs.ShellWord(q.Source+".raw"))
	case fsprobe.Filesystem:
		hint = fmt.Sprintf("mount it with `mount -o ro %s /mnt`, and import /mnt", file)
	case fsprobe.Partitions:
		hint = fmt.Sprintf("attach its partitions with `losetup -r -P -f --show %s`, and import one of them, for example "+
			"/dev/loop0p1", file)
		if s.isDevice() {
			hint = fmt.Sprintf("list its partitions with `lsblk %s`, and import one of them", file)
		}
	case fsprobe.Container:
		hint = "open it with the program that made it, and import the block device or the directory with its content"
	case fsprobe.Swap:
		hint = "it holds no files: import the image of a filesystem instead"
	case fsprobe.Archive:
		hint = "unpack it, and import the directory"
	}

	// Other programs need the disk as a file of its own. The image was opened, so it names no other file.
	if s.disk != nil {
		what = "the disk in it: " + what
		hint = fmt.Sprintf("convert it with `qemu-img convert -f qcow2 -O raw %s %s`, attach the result with "+
			"`losetup -r -P -f`, and mount and import what is on it", file, errs.ShellWord(q.Source+".raw"))
	}

	refused := errs.New(errs.Invalid, opImport, q.Source, "%s", what)
	if raw {
		return refused.WithHint("%s; to import any content as a raw block volume, use %s", hint, errs.Param("fs", "none"))
	}

	return refused.WithHint("%s", hint)
}

// acceptedSources is the hint that lists what can be imported.
const acceptedSources = "give a directory, a tar archive (plain, gzip or zstd), or an image of ext4 or XFS (raw or " +
	"qcow2)"

// checkCopied checks the filesystem in the copy of an image; the source is never
// written to. A log that was not replayed is left by a crash, and is not damage: the
// copy is mounted once, so that no clone has to replay it. An image without such a log
// stays identical, bit by bit. warnings say what could not be checked. It returns Damaged, or other
// kinds if the host cannot replay the log.
func (q *importing) checkCopied(ctx context.Context, id driver.ObjectID) (warnings []errs.Message, err error) {
	e, s := q.e, q.src
	kind := driver.FS(s.probed.Type)
	progress.From(ctx).Start(progress.CheckingFilesystem, 0, 0)
	_, missing := lookProgram(check.Checker(kind))

	// Replay the log if it is dirty. Only xfs_repair can tell whether the log of an XFS is clean.
	replayed := kind == driver.Ext4 && s.probed.Dirty || kind == driver.XFS && missing != nil
	wrong := ""
	if replayed {
		if wrong, err = check.Replay(ctx, e.content, id, kind); err != nil {
			return nil, err
		}
	}

	if missing != nil {
		if wrong != "" {
			return nil, q.refuseDamaged(s.probed.Type, wrong, "")
		}
		return []errs.Message{notChecked(missing)}, nil
	}

	// Check the filesystem. On an XFS with a dirty log, replay it and check again.
	found, err := check.RunChecker(ctx, e.content, id, kind)
	if err == nil && kind == driver.XFS && (found.DirtyLog || found.Damaged) {
		if wrong, err = check.Replay(ctx, e.content, id, kind); err == nil {
			found, err = check.RunChecker(ctx, e.content, id, kind)
		}
	}

	switch {
	case errs.Is(err, errs.Unsupported) && wrong == "" && ctx.Err() == nil:
		return []errs.Message{notChecked(err)}, nil
	case err != nil:
		return nil, err
	case found.Damaged:
		wrong = "its filesystem is damaged"
	}

	if wrong != "" {
		return nil, q.refuseDamaged(s.probed.Type, wrong, found.Detail)
	}

	return nil, nil
}

// notChecked returns the warning that the filesystem in an image was not checked.
func notChecked(err error) errs.Message {
	w := errs.Messagef("the filesystem in the image was not checked: %v", err)
	if hint := errs.HintIn(err); hint != "" {
		w += "; " + hint
	}
	return w
}

// shownFaults limits how many lines of e2fsck or xfs_repair an error quotes.
const shownFaults = 3

// refuseDamaged returns the error for a damaged filesystem, with the first lines of detail.
func (q *importing) refuseDamaged(fs, wrong, detail string) error {
	if detail != "" {
		lines := strings.Split(detail, "\n")
		if len(lines) > shownFaults {
			lines = append(lines[:shownFaults], "...")
		}
		wrong += ": " + strings.ReplaceAll(strings.Join(lines, "; "), ".;", ";")
	}
	return errs.New(errs.Damaged, opImport, q.Source, "%s", wrong).WithHint("%s", hintRepair(fs))
}

// copyImage copies the data of a disk image without its holes, and returns the number
// of bytes copied. Conflict if the image changed in the meantime.
func copyImage(ctx context.Context, s *source, path string) (int64, error) {
	src := s.f
	dst, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return 0, errs.Wrap(opImport, path, err)
	}

	defer dst.Close()

	before, err := src.Stat()
	if err != nil {
		return 0, errs.Wrap(opImport, src.Name(), err)
	}

	var copied int64
	if s.disk != nil {
		copied, err = copyDisk(ctx, dst, s)
	} else {
		copied, err = copyData(ctx, dst, src, s.bytes)
	}
	if err != nil {
		return copied, err
	}

	// Flush the cache of a driver's block device, which the driver cannot see.
	if st, err := dst.Stat(); err == nil && st.Mode()&os.ModeDevice != 0 {
		if err := dst.Sync(); err != nil {
			return copied, errs.Wrap(opImport, path, err)
		}
	}

	// Check that the image did not change.
	after, err := src.Stat()
	if err == nil && before.Mode().IsRegular() &&
		(!after.ModTime().Equal(before.ModTime()) || after.Size() != before.Size()) {
		return copied, errs.New(errs.Conflict, opImport, src.Name(), "it changed while it was read").
			WithHint("stop the programs that write to it, then retry")
	}

	return copied, errs.Wrap(opImport, src.Name(), err)
}

// copyDisk copies the disk in a qcow2 image without its holes and zeros, and returns the number of bytes that it read.
func copyDisk(ctx context.Context, dst *os.File, s *source) (copied int64, err error) {
	err = s.disk.Each(func(off int64, data []byte) error {
		if err := ctx.Err(); err != nil {
			return err
		}

		copied += int64(len(data))
		progress.From(ctx).Add(0, int64(len(data)))
		if allZero(data) {
			return nil
		}

		_, err := dst.WriteAt(data, off)
		return errs.Wrap(opImport, dst.Name(), err)
	})
	return copied, errs.Wrap(opImport, s.f.Name(), damagedDisk(err))
}

// copyData copies the data of an image without its holes and zeros, and returns the number of bytes that it read.
func copyData(ctx context.Context, dst, src *os.File, size int64) (copied int64, err error) {
	buf := make([]byte, 4<<20)
	for off := int64(0); off < size; {
		// Find the next hole, up to which there is data.
		end := size
		if start, err := unix.Seek(int(src.Fd()), off, unix.SEEK_DATA); errors.Is(err, unix.ENXIO) {
			break
		} else if err == nil { // block devices do not report holes: copy everything
			off = start
			if end, err = unix.Seek(int(src.Fd()), off, unix.SEEK_HOLE); err != nil {
				return copied, errs.Wrap(opImport, src.Name(), err)
			}
		}

		for off < end {
			if err := ctx.Err(); err != nil {
				return copied, err
			}

			b := buf[:min(int64(len(buf)), end-off)]
			n, err := src.ReadAt(b, off)
			if n == 0 && err != nil {
				return copied, errs.Wrap(opImport, src.Name(), fmt.Errorf("at byte %d: %w", off, err))
			}

			if !allZero(b[:n]) {
				if _, err := dst.WriteAt(b[:n], off); err != nil {
					return copied, errs.Wrap(opImport, dst.Name(), err)
				}
			}

			off += int64(n)
			copied += int64(n)
			progress.From(ctx).Add(0, int64(n))
		}
	}

	return copied, nil
}

func allZero(b []byte) bool {
	for _, c := range b {
		if c != 0 {
			return false
		}
	}
	return true
}

// sectorFor returns the sector size that the block device of an imported image needs:
// that of its filesystem, or 512 for content that Pando cannot read, such as a partition
// table.
func sectorFor(s *source) uint32 {
	if s.probed.SectorBytes > 0 {
		return s.probed.SectorBytes
	}
	return 512
}

// allocatedBytes returns the bytes that a file uses on disk, or the size of a device.
func allocatedBytes(f *os.File) int64 {
	var st unix.Stat_t
	if unix.Fstat(int(f.Fd()), &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFREG {
		n, _ := f.Seek(0, io.SeekEnd)
		return n
	}
	return st.Blocks * 512
}

// isDevice reports whether the source is a block device.
func (s *source) isDevice() bool {
	st, err := s.f.Stat()
	return err == nil && st.Mode()&os.ModeDevice != 0
}
