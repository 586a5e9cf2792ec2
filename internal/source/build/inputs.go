package build

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"pando/internal/base/errs"

	"golang.org/x/sys/unix"
)

// input is a file, directory or link that a step copies.
type input struct {
	path    string // relative to the directory of the build file, with slashes
	kind    string // file, dir, link
	mode    fs.FileMode
	content string // of a file: its SHA-256, in hexadecimal; of a link: its target
}

// inputs lists what a step copies, sorted by path. Links are not followed. NotFound, Invalid (a device or socket).
func (f *File) inputs(ctx context.Context, s *Step) ([]input, error) {
	if len(s.Copy) == 0 {
		return nil, nil
	}

	root, err := os.OpenRoot(f.dir)
	if err != nil {
		return nil, errs.Wrap(op, f.dir, err)
	}
	defer root.Close()

	seen := map[string]bool{}
	var out []input
	for _, named := range s.Copy {
		named = path.Clean(filepath.ToSlash(named))

		// The walk would follow a link that is named.
		if st, err := root.Lstat(named); err == nil && st.Mode().Type() == fs.ModeSymlink {
			in, err := readInput(root, named)
			if err != nil {
				return nil, errs.Wrap(op, filepath.Join(f.dir, named), err)
			}
			if !seen[named] {
				seen[named] = true
				out = append(out, in)
			}
			continue
		}

		err := fs.WalkDir(root.FS(), named, func(p string, d fs.DirEntry, err error) error {
			switch {
			case err != nil:
				return err
			case ctx.Err() != nil:
				return ctx.Err()
			case p != named && s.excludes(p):
				if d.IsDir() {
					return fs.SkipDir
				}
				return nil
			case p == "." || seen[p]:
				return nil
			}

			seen[p] = true
			in, err := readInput(root, p)
			out = append(out, in)
			return err
		})
		if err != nil {
			return nil, errs.Wrap(op, filepath.Join(f.dir, named), err)
		}
	}

	slices.SortFunc(out, func(a, b input) int { return strings.Compare(a.path, b.path) })
	return out, nil
}

// excludes reports whether a pattern matches a path or its last element.
func (s *Step) excludes(p string) bool {
	return slices.ContainsFunc(s.Exclude, func(pattern string) bool {
		whole, _ := path.Match(pattern, p)
		last, _ := path.Match(pattern, path.Base(p))
		return whole || last
	})
}

// readInput reads all of an input on which the key depends.
func readInput(root *os.Root, p string) (input, error) {
	st, err := root.Lstat(p)
	if err != nil {
		return input{}, err
	}

	in := input{path: p, mode: st.Mode().Perm()}
	switch st.Mode().Type() {
	case fs.ModeDir:
		in.kind = "dir"
	case fs.ModeSymlink:
		in.kind, in.mode = "link", 0
		in.content, err = root.Readlink(p)
	case 0:
		in.kind = "file"
		var file *os.File
		if file, err = openInput(root, p); err != nil {
			return in, err
		}
		defer file.Close()
		in.content, err = copyHashed(io.Discard, file)
	default:
		return in, errs.New(errs.Invalid, op, p, "neither a file, a directory nor a symbolic link").
			WithHint("exclude it")
	}
	return in, err
}

// openInput opens a file, and never waits: a pipe may have taken its place.
func openInput(root *os.Root, p string) (*os.File, error) {
	return root.OpenFile(p, os.O_RDONLY|unix.O_NONBLOCK, 0)
}

// copyHashed copies a file, and returns the SHA-256 of what it has copied.
func copyHashed(to io.Writer, from io.Reader) (string, error) {
	h := sha256.New()
	_, err := io.CopyBuffer(io.MultiWriter(to, h), struct{ io.Reader }{from}, make([]byte, 256<<10))
	return hex.EncodeToString(h.Sum(nil)), err
}

// copyInputs copies inputs into the clone mounted at mountpoint, without following links out of it. What is copied has
// the modification time of the original, and belongs to the user of this process. Conflict: a file has changed since it
// was listed.
func (f *File) copyInputs(ctx context.Context, s *Step, all []input, mountpoint string) error {
	if len(s.Copy) == 0 {
		return nil
	}

	from, err := os.OpenRoot(f.dir)
	if err != nil {
		return errs.Wrap(op, f.dir, err)
	}
	defer from.Close()
	to, err := os.OpenRoot(mountpoint)
	if err != nil {
		return errs.Wrap(op, mountpoint, err)
	}
	defer to.Close()

	base := path.Clean(filepath.ToSlash(s.To))
	for _, in := range all {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := copyInput(from, to, in, path.Join(base, in.path)); err != nil {
			return errs.Wrap(op, in.path, err)
		}
	}

	// Set the times of directories last: copying into them changes them.
	for _, in := range slices.Backward(all) {
		if st, err := from.Lstat(in.path); err == nil && in.kind == "dir" {
			_ = to.Chtimes(path.Join(base, in.path), st.ModTime(), st.ModTime())
		}
	}
	return nil
}

// copyInput copies one input to the path at in the clone.
func copyInput(from, to *os.Root, in input, at string) error {
	if err := to.MkdirAll(path.Dir(at), 0o755); err != nil {
		return err
	}

	if in.kind == "dir" {
		if st, err := to.Lstat(at); err == nil && !st.IsDir() {
			if err := to.Remove(at); err != nil {
				return err
			}
		}
		if err := to.Mkdir(at, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
		return to.Chmod(at, in.mode)
	}

	if err := to.Remove(at); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if in.kind == "link" {
		return to.Symlink(in.content, at)
	}

	source, err := openInput(from, in.path)
	if err != nil {
		return err
	}
	defer source.Close()
	st, err := source.Stat()
	if err != nil {
		return err
	}

	target, err := to.OpenFile(at, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	sum, err := copyHashed(target, source)
	if err == nil {
		err = target.Chmod(in.mode)
	}
	if cerr := target.Close(); err == nil {
		err = cerr
	}
	if err == nil && sum != in.content {
		return errs.New(errs.Conflict, op, in.path, "it has changed while the build ran").
			WithHint("run the build again")
	}
	if err == nil {
		err = to.Chtimes(at, st.ModTime(), st.ModTime())
	}
	return err
}

// fields returns what the key of a step has of an input.
func (in input) fields() []string {
	return []string{in.path, in.kind, fmt.Sprintf("%04o", in.mode), in.content}
}
