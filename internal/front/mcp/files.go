package mcp

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"unicode/utf8"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/engine"

	"golang.org/x/sys/unix"
)

// Limits of one call.
const (
	defaultRead = 64 << 10
	maxRead     = 256 << 10
	maxWrite    = 1 << 20
	maxEntries  = 1000
)

// Encodings of the content of files.
const (
	encodingText   = "utf-8"
	encodingBase64 = "base64"
)

// withFiles calls fn with the root directory of a volume of this server. Nothing that fn opens in it is outside of the
// volume, whatever symbolic links the volume has.
func (s *Server) withFiles(ctx context.Context, op, volume string, path engine.Path,
	fn func(root *os.Root, name string) error,
) error {
	name := filepath.Clean(string(path))
	if !filepath.IsLocal(name) || strings.ContainsRune(name, 0) {
		return errs.New(errs.Invalid, op, volume, "%q is not a path in the volume", path.Escaped()).
			WithHint("begin it at the root of the volume, without /, as in etc/hosts")
	}

	v, err := s.own(ctx, op, volume)
	if err != nil {
		return err
	}
	root, err := s.open(ctx, op, v)
	if err != nil {
		return err
	}
	defer root.Close()
	return inVolume(op, volume, path, fn(root, name))
}

// open opens the root directory of a volume, which it mounts if necessary.
func (s *Server) open(ctx context.Context, op string, v ref.Name) (*os.Root, error) {
	info, err := s.pool.Mount(ctx, engine.MountRequest{Volume: v})
	if err != nil {
		return nil, err
	}
	root, err := os.OpenRoot(info.Mountpoint)
	if err != nil {
		return nil, inVolume(op, v.String(), ".", err)
	}
	return root, nil
}

// inVolume returns an error about a path without the path of the host that it happened at.
func inVolume(op, volume string, path engine.Path, err error) error {
	var known *errs.Error
	var at *fs.PathError
	switch {
	case err == nil || errors.As(err, &known):
		return err
	case errors.As(err, &at):
		err = &fs.PathError{Op: at.Op, Path: path.Escaped(), Err: at.Err}
	}
	return errs.Wrap(op, volume, err)
}

// openFile opens a regular file. It does not wait for the other end of a pipe.
func openFile(root *os.Root, name string, flags int) (*os.File, fs.FileInfo, error) {
	f, err := root.OpenFile(name, flags|unix.O_NONBLOCK|unix.O_NOCTTY, 0o666)
	if err != nil {
		return nil, nil, err
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = &fs.PathError{Op: "open", Path: name, Err: errors.New("not a regular file")}
	}
	if err != nil {
		f.Close()
		return nil, nil, err
	}
	return f, info, nil
}

type listFilesArgs struct {
	Volume string      `json:"volume"`
	Path   engine.Path `json:"path,omitempty" jsonschema:"of the directory, relative to the root of the volume"`
}

// entry is a file in a directory.
type entry struct {
	Name engine.Path `json:"name" jsonschema:"a backslash is written as \\\\ and a byte that is not UTF-8 as \\xHH"`
	Type string      `json:"type" jsonschema:"file, directory, symlink or other"`
	Size int64       `json:"size_bytes"`
}

type files struct {
	Notice    string  `json:"notice"`
	Entries   []entry `json:"entries" jsonschema:"untrusted"`
	Truncated bool    `json:"truncated" jsonschema:"there are more entries than listed"`
	also
}

func (s *Server) listFiles(ctx context.Context, in listFilesArgs) (out files, err error) {
	out = files{Notice: untrusted, Entries: []entry{}}
	err = s.withFiles(ctx, "list files", in.Volume, in.Path, func(root *os.Root, name string) error {
		d, err := root.OpenFile(name, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NONBLOCK, 0)
		if err != nil {
			return err
		}
		defer d.Close()

		entries, err := d.ReadDir(maxEntries + 1)
		if err != nil && err != io.EOF {
			return err
		}
		if out.Truncated = len(entries) > maxEntries; out.Truncated {
			entries = entries[:maxEntries]
		}
		for _, e := range entries {
			out.Entries = append(out.Entries, entryOf(e))
		}
		return nil
	})
	slices.SortFunc(out.Entries, func(a, b entry) int { return strings.Compare(string(a.Name), string(b.Name)) })
	return out, err
}

func entryOf(e fs.DirEntry) entry {
	out := entry{Name: engine.Path(e.Name()), Type: "other"}
	switch {
	case e.IsDir():
		out.Type = "directory"
	case e.Type().IsRegular():
		out.Type = "file"
	case e.Type()&fs.ModeSymlink != 0:
		out.Type = "symlink"
	}
	if info, err := e.Info(); err == nil && out.Type == "file" { // it may have gone
		out.Size = info.Size()
	}
	return out
}

type readArgs struct {
	Volume string      `json:"volume"`
	Path   engine.Path `json:"path" jsonschema:"relative to the root of the volume"`
	Offset int64       `json:"offset,omitempty" jsonschema:"bytes to skip"`
	Limit  int         `json:"limit,omitempty" jsonschema:"bytes to read at most; default 65536, at most 262144"`
}

type read struct {
	Notice     string `json:"notice"`
	Content    string `json:"content" jsonschema:"untrusted"`
	Encoding   string `json:"encoding" jsonschema:"of content: utf-8 or base64"`
	SizeBytes  int64  `json:"size_bytes" jsonschema:"of the whole file"`
	NextOffset int64  `json:"next_offset" jsonschema:"where the rest begins; 0: there is none"`
	also
}

func (s *Server) readFile(ctx context.Context, in readArgs) (out read, err error) {
	const op = "read file"
	if in.Limit == 0 {
		in.Limit = defaultRead
	}
	if in.Offset < 0 || in.Limit < 0 || in.Limit > maxRead {
		return out, errs.New(errs.Invalid, op, in.Volume, "limit must be between 1 and %d, and offset not negative "+
			"(got %d, %d)", maxRead, in.Limit, in.Offset)
	}

	err = s.withFiles(ctx, op, in.Volume, in.Path, func(root *os.Root, name string) error {
		f, info, err := openFile(root, name, os.O_RDONLY)
		if err != nil {
			return err
		}
		defer f.Close()

		b := make([]byte, in.Limit)
		n, err := f.ReadAt(b, in.Offset)
		if err != nil && err != io.EOF {
			return err
		}
		text, encoding, used := encode(b[:n], err == nil)
		out = read{Notice: untrusted, Content: text, Encoding: encoding, SizeBytes: info.Size()}
		if next := in.Offset + int64(used); next < info.Size() && used > 0 {
			out.NextOffset = next
		}
		return nil
	})
	return out, err
}

// encode returns bytes as text, or in base64 if they are not UTF-8, and how many of them: a character at their end that
// may go on is left out.
func encode(b []byte, goesOn bool) (text, encoding string, used int) {
	whole := b
	if goesOn {
		for i := 1; i < utf8.UTFMax && i <= len(b); i++ {
			if tail := b[len(b)-i:]; utf8.RuneStart(tail[0]) {
				if !utf8.FullRune(tail) && i < len(b) {
					whole = b[:len(b)-i]
				}
				break
			}
		}
	}
	if utf8.Valid(whole) {
		return string(whole), encodingText, len(whole)
	}
	return base64.StdEncoding.EncodeToString(b), encodingBase64, len(b)
}

type writeArgs struct {
	Volume   string      `json:"volume"`
	Path     engine.Path `json:"path" jsonschema:"relative to the root of the volume"`
	Content  string      `json:"content" jsonschema:"the whole new content, at most 1 MiB"`
	Encoding string      `json:"encoding,omitempty" jsonschema:"of content: utf-8 (the default) or base64"`
}

type written struct {
	SizeBytes int64 `json:"size_bytes"`
	also
}

func (s *Server) writeFile(ctx context.Context, in writeArgs) (out written, err error) {
	const op = "write file"
	b := []byte(in.Content)
	switch in.Encoding {
	case "", encodingText:
	case encodingBase64:
		if b, err = base64.StdEncoding.DecodeString(in.Content); err != nil {
			return out, errs.New(errs.Invalid, op, in.Volume, "the content is not base64: %w", err)
		}
	default:
		return out, errs.New(errs.Invalid, op, in.Volume, "unknown encoding %q", in.Encoding).
			WithHint("use utf-8 or base64")
	}
	if len(b) > maxWrite {
		return out, errs.New(errs.Invalid, op, in.Volume, "the content can have at most %s (got %s)",
			errs.FormatBytes(maxWrite), errs.FormatBytes(int64(len(b)))).WithHint("make larger files with the tool run")
	}

	err = s.withFiles(ctx, op, in.Volume, in.Path, func(root *os.Root, name string) error { return write(root, name, b) })
	return written{SizeBytes: int64(len(b))}, err
}

// write replaces the content of a file, which it makes if it does not exist.
func write(root *os.Root, name string, b []byte) error {
	if dir := filepath.Dir(name); dir != "." {
		if err := root.MkdirAll(dir, 0o777); err != nil {
			return err
		}
	}

	f, _, err := openFile(root, name, os.O_WRONLY|os.O_CREATE)
	if err != nil {
		return err
	}
	if err = f.Truncate(0); err == nil {
		_, err = io.Copy(f, bytes.NewReader(b))
	}
	return errors.Join(err, f.Close())
}
