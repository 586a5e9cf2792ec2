package drivertest

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"pando/internal/driver"
	"pando/internal/linux/loopdev"
	"pando/internal/linux/mount"

	"golang.org/x/sys/unix"
)

// file is the content of a file in a model: n bytes made from a seed.
type file struct {
	seed uint64
	n    int
}

func (f file) bytes() []byte {
	b := make([]byte, f.n)
	var key [32]byte
	binary.LittleEndian.PutUint64(key[:], f.seed)
	_, _ = rand.NewChaCha8(key).Read(b) // never fails
	return b
}

// model is what a volume should hold.
type model map[string]file

// fileNames are the names that tests use; a raw image has a slot for each.
var fileNames = []string{"a", "b", "c", "d", "e", "f", "g", "h", "big0", "big1"}

const (
	slotBytes    = 4 << 20 // of a raw image
	slotHeader   = 4096
	maxFileBytes = slotBytes - slotHeader
)

// content is the inside of an attached volume.
type content interface {
	put(name string, data []byte) error
	get(name string) ([]byte, error) // fs.ErrNotExist
	remove(name string) error
	// fingerprint is equal for equal content.
	fingerprint() (string, error)
}

// tree is content in a directory.
type tree string

func (r tree) put(name string, data []byte) error {
	return os.WriteFile(filepath.Join(string(r), name), data, 0o644)
}
func (r tree) get(name string) ([]byte, error) { return os.ReadFile(filepath.Join(string(r), name)) }
func (r tree) remove(name string) error        { return os.Remove(filepath.Join(string(r), name)) }

func (r tree) fingerprint() (string, error) {
	var out strings.Builder
	links := map[uint64]string{} // first name of an inode
	err := filepath.WalkDir(string(r), func(p string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}

		rel, err := filepath.Rel(string(r), p)
		if err != nil {
			return err
		}
		if rel == "lost+found" {
			return fs.SkipDir
		}

		var st unix.Stat_t
		if err := unix.Lstat(p, &st); err != nil {
			return err
		}

		fmt.Fprintf(&out, "%q %o %d:%d", rel, st.Mode, st.Uid, st.Gid)

		switch e.Type() {
		case fs.ModeDir:
			fmt.Fprintf(&out, " %d", st.Mtim.Nano())
		case fs.ModeSymlink:
			t, err := os.Readlink(p)
			if err != nil {
				return err
			}
			fmt.Fprintf(&out, " -> %q", t)
		case 0:
			b, err := os.ReadFile(p)
			if err != nil {
				return err
			}

			fmt.Fprintf(&out, " %d %d %x", st.Mtim.Nano(), st.Nlink, sha256.Sum256(b))
			if first, ok := links[st.Ino]; ok {
				fmt.Fprintf(&out, " same as %q", first)
			} else {
				links[st.Ino] = rel
			}

			var value [256]byte
			if n, err := unix.Lgetxattr(p, testXattr, value[:]); err == nil {
				fmt.Fprintf(&out, " xattr %q", value[:n])
			}
		}

		out.WriteByte('\n')
		return nil
	})

	return out.String(), err
}

const testXattr = "user.pando-test"

// fillTree makes one of each thing that a tree can hold.
func (r tree) fillTree() error {
	p := func(name string) string { return filepath.Join(string(r), name) }
	for _, d := range []string{"dir", "dir/sub", "empty"} {
		if err := os.Mkdir(p(d), 0o755); err != nil {
			return err
		}
	}

	for i := range 40 {
		if err := os.WriteFile(p(fmt.Sprintf("dir/sub/file%d", i)), file{uint64(i), i * 997}.bytes(), 0o640); err != nil {
			return err
		}
	}

	past := time.Unix(1_000_000_000, 123_456_789)
	if err := errors.Join(
		os.Symlink("dir/nowhere", p("dangling")),
		os.Symlink("/", p("outside")),
		os.Link(p("dir/sub/file7"), p("dir/hardlink")),
		unix.Mkfifo(p("fifo"), 0o600),
		os.WriteFile(p("ünïcode and spaces\n"), []byte("x"), 0o600),
		os.WriteFile(p("private"), []byte("y"), 0o400),
		os.WriteFile(p("script"), []byte("#!/bin/sh\n"), 0o755),
		os.Mkdir(p("closed"), 0o755),
		os.WriteFile(p("closed/inside"), []byte("z"), 0o644),
		os.Chmod(p("closed"), 0o555),
		os.Chmod(string(r), 0o751), // the root's own mode belongs to the volume as well
		os.Chtimes(p("dir/sub/file3"), past, past),
	); err != nil {
		return err
	}

	if err := unix.Setxattr(p("script"), testXattr, []byte("value"), 0); err != nil && !errors.Is(err, unix.EOPNOTSUPP) {
		return err
	}

	// A file with a hole.
	f, err := os.Create(p("sparse"))
	if err != nil {
		return err
	}

	defer f.Close()

	if _, err := f.WriteAt([]byte("end"), 8<<20); err != nil {
		return err
	}

	return f.Close()
}

// raw is content in a block image: a slot with a header for each file.
type raw struct{ f *os.File }

func slot(name string) (int64, error) {
	i := slices.Index(fileNames, name)
	if i < 0 {
		return 0, fmt.Errorf("no slot for %q", name)
	}
	return int64(i) * slotBytes, nil
}

var slotMagic = []byte("FILE")

func (r raw) put(name string, data []byte) error {
	off, err := slot(name)
	if err != nil {
		return err
	}
	if len(data) > maxFileBytes {
		return fmt.Errorf("%d bytes do not fit a slot", len(data))
	}

	h := make([]byte, slotHeader)
	copy(h, slotMagic)
	binary.LittleEndian.PutUint64(h[8:], uint64(len(data)))
	if _, err := r.f.WriteAt(data, off+slotHeader); err != nil {
		return err
	}

	_, err = r.f.WriteAt(h, off)
	return err
}

func (r raw) get(name string) ([]byte, error) {
	off, err := slot(name)
	if err != nil {
		return nil, err
	}

	h := make([]byte, slotHeader)
	if _, err := r.f.ReadAt(h, off); err != nil {
		return nil, err
	}

	if !bytes.HasPrefix(h, slotMagic) {
		return nil, fs.ErrNotExist
	}

	b := make([]byte, binary.LittleEndian.Uint64(h[8:]))
	_, err = r.f.ReadAt(b, off+slotHeader)
	return b, err
}

func (r raw) remove(name string) error {
	off, err := slot(name)
	if err != nil {
		return err
	}
	_, err = r.f.WriteAt(make([]byte, slotHeader), off)
	return err
}

func (r raw) fingerprint() (string, error) {
	h := sha256.New()
	b := make([]byte, 64<<10)
	zeros := make([]byte, len(b))
	for off := int64(0); ; off += int64(len(b)) {
		n, err := r.f.ReadAt(b, off)
		if !bytes.Equal(b[:n], zeros[:n]) { // hashing is slow on an emulated processor
			fmt.Fprintln(h, off, n)
			h.Write(b[:n])
		}
		if err == io.EOF {
			fmt.Fprintln(h, off+int64(n))
			return hex.EncodeToString(h.Sum(nil)), nil
		}
		if err != nil {
			return "", err
		}
	}
}

// attached makes the object usable while fn runs. Objects that are read-only
// are attached so.
func (s *suite) attached(id driver.ObjectID, fn func(c content) error) error {
	a, err := s.d.Attachment(s.ctx(), id)
	if err != nil {
		return err
	}

	if len(a.Image)+len(a.Tree)+len(a.Source) != max(len(a.Image), len(a.Tree), len(a.Source)) ||
		a.Image+a.Tree+a.Source == "" {
		return fmt.Errorf("attachment %+v: exactly one of Image, Tree and Source must be set", a)
	}

	switch {
	case a.Tree != "":
		return fn(tree(a.Tree))
	case a.Source != "":
		return s.mounted(a, a.Type, a.Source, fn)
	case a.Block:
		return s.active(id, a, fn)
	}

	f, err := os.OpenFile(a.Image, openMode(a), 0)
	if err != nil {
		return err
	}

	defer f.Close()

	if a.FS == driver.None {
		return fn(raw{f})
	}

	dev, err := loopdev.Attach(s.ctx(), f, loopdev.Options{ReadOnly: a.ReadOnly, DirectIO: true,
		SectorBytes: a.SectorBytes})
	if err != nil {
		return err
	}

	f.Close() // it is locked for as long as anyone but the device has it
	defer func() { _, _ = loopdev.WaitDetached(s.ctx(), a.Image, 5*time.Second) }()
	defer dev.Close()

	return s.mounted(a, string(a.FS), dev.Path, fn)
}

func openMode(a driver.Attachment) int {
	if a.ReadOnly {
		return os.O_RDONLY
	}
	return os.O_RDWR
}

// mounted mounts what an attachment describes while fn runs.
func (s *suite) mounted(a driver.Attachment, kind, source string, fn func(c content) error) error {
	dir := filepath.Join(s.mounts, fmt.Sprint(s.nmount.Add(1)))
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}

	m, err := mount.Device(kind, source, a.Options, a.ReadOnly)
	if err != nil {
		return err
	}

	defer m.Close()
	if _, err := m.MoveTo(dir); err != nil {
		return err
	}

	return errors.Join(fn(tree(dir)), m.Close(), mount.Unmount(dir))
}

// active makes the block device of an object appear while fn runs. It stays until
// the object is destroyed.
func (s *suite) active(id driver.ObjectID, a driver.Attachment, fn func(c content) error) error {
	act, ok := s.d.(driver.Activator)
	if !ok {
		return fmt.Errorf("attachment %+v is a block device, but the driver is no Activator", a)
	}

	dev, err := act.Activate(s.ctx(), id)
	if err != nil {
		return err
	}

	defer dev.Close()

	s.activated.Store(id, true)
	if a.FS != driver.None {
		return s.mounted(a, string(a.FS), dev.Name(), fn)
	}

	f, err := os.OpenFile(dev.Name(), openMode(a), 0)
	if err != nil {
		return err
	}

	defer f.Close()

	if err := fn(raw{f}); err != nil || a.ReadOnly {
		return err
	}

	return f.Sync()
}

// edit applies fn to the volume's content.
func (s *suite) edit(id driver.ObjectID, fn func(c content) error) {
	s.t.Helper()
	if err := s.attached(id, fn); err != nil {
		s.t.Fatalf("use %s: %v", id, err)
	}
}

// put writes a file into a volume and its model.
func (s *suite) put(id driver.ObjectID, m model, name string, f file) {
	s.t.Helper()
	s.edit(id, func(c content) error { return c.put(name, f.bytes()) })
	m[name] = f
}

// check compares an object with its model.
func (s *suite) check(what string, id driver.ObjectID, m model) {
	s.t.Helper()
	if err := s.compare(id, m); err != nil {
		s.t.Fatalf("%s: %v", what, err)
	}
}

func (s *suite) compare(id driver.ObjectID, m model) error {
	return s.attached(id, func(c content) error {
		for _, name := range fileNames {
			got, err := c.get(name)
			want, ok := m[name]
			switch {
			case !ok && err == nil:
				return fmt.Errorf("file %q is there, which should not be", name)
			case !ok && errors.Is(err, fs.ErrNotExist):
			case err != nil:
				return fmt.Errorf("file %q: %w", name, err)
			case !bytes.Equal(got, want.bytes()):
				return fmt.Errorf("file %q has other content than was written", name)
			}
		}

		return nil
	})
}

// fingerprint of an object's content.
func (s *suite) fingerprint(id driver.ObjectID) string {
	s.t.Helper()
	var out string
	s.edit(id, func(c content) (err error) {
		out, err = c.fingerprint()
		return err
	})
	return out
}

func (m model) copy() model { return maps.Clone(m) }
