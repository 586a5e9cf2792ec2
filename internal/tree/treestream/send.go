package treestream

import (
	"context"
	"errors"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"pando/internal/base/errs"
	"pando/internal/linux/kernel"
	"pando/internal/linux/treewalk"
	"pando/internal/tree/treecopy"
)

const opSend = "send"

// SendOptions are the options of Send and SendDiff.
type SendOptions struct {
	// Unprivileged is for callers without root. It skips extended attributes that only root can read.
	Unprivileged bool
	// Progress, if set, is called with the numbers of files and bytes of content sent since its last call.
	Progress func(files, bytes int64)
}

// Send writes the stream of the tree below the open directory root, which nobody may change in the meantime. Its memory
// depends on the number of files with several names. Conflict: the tree changed. Unsupported: a path or attribute is
// beyond the limits of the format. IO, errors of w, and of ctx.
func Send(ctx context.Context, w io.Writer, root *os.File, o SendOptions) error {
	s, err := newSender(ctx, w, root, o, false)
	if err == nil {
		err = s.sendDir("")
	}
	for i := 0; err == nil && i < len(s.late); i++ {
		err = s.putRecord(s.late[i])
	}
	if err == nil {
		err = s.enc.end()
	}
	return sendErr(err)
}

// sender writes one stream.
type sender struct {
	ctx   context.Context
	root  *os.File
	enc   *encoder
	attrs *treecopy.AttributeReader
	o     SendOptions
	buf   []byte
	links map[[2]uint64]*firstLink
	late  []record // flags of files with several names, sent last because they forbid making other names
}

// firstLink is the first of several names of a file.
type firstLink struct {
	path string
	left uint64 // number of names not seen yet
}

func newSender(ctx context.Context, w io.Writer, root *os.File, o SendOptions, diff bool) (*sender, error) {
	enc, err := newEncoder(w, diff)
	return &sender{
		ctx: ctx, root: root, enc: enc, o: o, buf: make([]byte, maxData), links: map[[2]uint64]*firstLink{},
		attrs: treecopy.NewAttributeReader(treecopy.Options{Unprivileged: o.Unprivileged}),
	}, err
}

// sendErr replaces the operation of errors of treecopy and treediff.
func sendErr(err error) error {
	var e *errs.Error
	if errors.As(err, &e) && (e.Op == "import" || e.Op == "compare") {
		known := *e
		known.Op = opSend
		if known.Kind == errs.Conflict {
			known.Hint = errs.Messagef("stop the programs that write to it, then retry")
		}
		return &known
	}
	return err
}

// quote quotes and shortens a path for a message, if necessary.
func quote(path string) string {
	q := strconv.Quote(path)
	if len(q) > 4096 {
		q = q[:4096] + "..."
	}
	if q[1:len(q)-1] == path && path != "" {
		return path
	}
	return q
}

func join(dir, name string) string {
	if dir == "" {
		return name
	}
	return dir + "/" + name
}

// split cuts a path into its directory and its last component.
func split(path string) (dir, name string) {
	if i := strings.LastIndexByte(path, '/'); i >= 0 {
		return path[:i], path[i+1:]
	}
	return "", path
}

// readErr reports that a file of the tree could not be read. A file that no longer exists was changed concurrently.
func readErr(path, call string, err error) error {
	var known *errs.Error
	switch {
	case err == nil || errors.As(err, &known):
		return err
	case errs.IsAny(err, unix.ENOENT, unix.ELOOP, unix.ENOTDIR, unix.ESTALE):
		return treecopy.Changed(path)
	}
	return errs.New(errs.KindOf(err), opSend, quote(path), "%s: %w", call, err)
}

func (s *sender) putRecord(r record) error {
	if err := s.ctx.Err(); err != nil {
		return err
	}
	return s.enc.writeRecord(r)
}

func (s *sender) addProgress(files, bytes int64) {
	if s.o.Progress != nil {
		s.o.Progress(files, bytes)
	}
}

// sendDir sends the content of a directory, and then its attributes: nothing may change the directory after that.
func (s *sender) sendDir(path string) error {
	f, err := treewalk.Open(s.root, path)
	if err != nil {
		return readErr(path, "open", err)
	}

	a, subdirs, err := s.sendEntries(f, path)
	f.Close()
	if err != nil {
		return err
	}

	for _, name := range subdirs {
		p := join(path, name)
		if err := s.putRecord(record{kind: kindDir, path: p}); err != nil {
			return err
		}
		if err := s.sendDir(p); err != nil {
			return err
		}
	}

	s.addProgress(1, 0)
	return s.sendAttributes(path, a)
}

// sendEntries sends the files in an open directory, and returns the names of its subdirectories.
func (s *sender) sendEntries(f *os.File, path string) (a treecopy.Attributes, subdirs []string, err error) {
	if a, _, err = s.attrs.ReadFile(f, path); err != nil {
		return a, nil, err
	}

	all, err := treewalk.ReadDirents(f)
	if err != nil {
		return a, nil, readErr(path, "getdents", err)
	}

	slices.SortFunc(all, func(x, y treewalk.Dirent) int { return strings.Compare(x.Name, y.Name) })
	for _, e := range all {
		if e.Type == unix.DT_DIR {
			subdirs = append(subdirs, e.Name)
			continue
		}
		if err := s.sendEntry(f, e.Name, join(path, e.Name)); err != nil {
			return a, nil, err
		}
	}

	return a, subdirs, nil
}

// sendEntry sends a file that is not a directory: as another name of a file already sent, or completely.
func (s *sender) sendEntry(dir *os.File, name, path string) error {
	st, err := kernel.Lstat(int(dir.Fd()), name)
	if err != nil {
		return readErr(path, "stat", err)
	}

	if st.Nlink > 1 {
		id := [2]uint64{st.Dev, st.Ino}
		if l := s.links[id]; l != nil {
			if l.left--; l.left == 0 {
				delete(s.links, id)
			}
			s.addProgress(1, 0)
			return s.putRecord(record{kind: kindLink, path: path, typ: st.Mode & unix.S_IFMT, target: l.path})
		}
		s.links[id] = &firstLink{path: path, left: uint64(st.Nlink) - 1}
	}

	a, err := s.sendFile(dir, name, path)
	if err != nil {
		return err
	}

	if st.Nlink > 1 && a.HasFlags() {
		s.late = append(s.late, record{kind: kindFlags, path: path, attrs: a})
		a = a.WithoutFlags()
	}

	s.addProgress(1, 0)
	return s.sendAttributes(path, a)
}

// sendFile sends a file that is not a directory, with its content, and returns its attributes.
func (s *sender) sendFile(dir *os.File, name, path string) (treecopy.Attributes, error) {
	st, err := kernel.Lstat(int(dir.Fd()), name)
	if err != nil {
		return treecopy.Attributes{}, readErr(path, "stat", err)
	}

	typ := st.Mode & unix.S_IFMT
	if typ == unix.S_IFREG {
		return s.sendRegular(dir, name, path)
	}

	a, st, err := s.attrs.Read(dir, name)
	if err != nil {
		return a, err
	}

	switch typ {
	case st.Mode & unix.S_IFMT:
	default:
		return a, treecopy.Changed(path)
	}

	if typ != unix.S_IFLNK {
		return a, s.putRecord(record{kind: kindNode, path: path, typ: typ, rdev: st.Rdev})
	}

	buf := make([]byte, maxTarget+1)
	n, err := unix.Readlinkat(int(dir.Fd()), name, buf)
	if err != nil {
		return a, readErr(path, "readlink", err)
	}

	return a, s.putRecord(record{kind: kindSymlink, path: path, target: string(buf[:n])})
}

// sendRegular sends a regular file.
func (s *sender) sendRegular(dir *os.File, name, path string) (a treecopy.Attributes, err error) {
	f, err := treecopy.OpenFile(dir, name, path)
	if err != nil {
		return a, err
	}

	defer f.Close()
	a, st, err := s.attrs.ReadFile(f, path)
	if err != nil {
		return a, err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return a, treecopy.Changed(path)
	}

	if err := s.putRecord(record{kind: kindFile, path: path, size: st.Size, attrs: a}); err != nil {
		return a, err
	}

	if err := s.sendRanges(f, path, 0, st.Size, st.Size, false); err != nil {
		return a, err
	}

	return a, unchanged(f, path, &st)
}

// unchanged returns an error if a file has changed since was.
func unchanged(f *os.File, path string, was *unix.Stat_t) error {
	now, err := kernel.Stat(int(f.Fd()))
	if err != nil {
		return readErr(path, "stat", err)
	}
	if now.Size != was.Size || now.Mtim != was.Mtim || now.Ctim != was.Ctim {
		return treecopy.Changed(path)
	}
	return nil
}

// sendRanges sends the data in a range of a file, and if holes is set, its holes.
func (s *sender) sendRanges(f *os.File, path string, off, end, size int64, holes bool) error {
	for off < end {
		from, to, err := treecopy.NextData(f, off, size)
		if err != nil {
			return readErr(path, "seek", err)
		}

		from, to = min(from, end), min(to, end)
		if holes && from > off {
			if err := s.putRecord(record{kind: kindZero, off: off, size: from - off}); err != nil {
				return err
			}
		}

		if err := s.sendData(f, path, from, to); err != nil {
			return err
		}

		off = max(from, to)
	}

	return nil
}

// sendData sends a range of a file, which may contain zeros.
func (s *sender) sendData(f *os.File, path string, from, to int64) error {
	for from < to {
		p := s.buf[:min(int64(len(s.buf)), to-from)]
		if err := readFull(f, path, p, from); err != nil {
			return err
		}
		if err := s.putRecord(record{kind: kindData, off: from, data: p}); err != nil {
			return err
		}
		s.addProgress(0, int64(len(p)))
		from += int64(len(p))
	}

	return nil
}

func readFull(f *os.File, path string, p []byte, off int64) error {
	n, err := f.ReadAt(p, off)
	if n == len(p) {
		return nil
	}
	if errors.Is(err, io.EOF) {
		return treecopy.Changed(path) // it became shorter
	}
	return readErr(path, "read", err)
}

// sendAttributes sends the attributes of a file that was made or changed.
func (s *sender) sendAttributes(path string, a treecopy.Attributes) error {
	sum := 0
	for _, x := range a.Xattrs {
		if sum += len(x.Name) + len(x.Value); sum > maxXattrs || len(x.Value) > maxData {
			return errs.New(errs.Unsupported, opSend, quote(path), "its extended attributes are too large to be sent").
				WithHint("remove some of them")
		}
		if err := s.putRecord(record{kind: kindXattr, target: x.Name, data: x.Value}); err != nil {
			return err
		}
	}
	return s.putRecord(record{kind: kindAttrs, path: path, attrs: a})
}
