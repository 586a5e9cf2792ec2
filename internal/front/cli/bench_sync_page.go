package cli

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"pando/internal/base/errs"
	"pando/internal/observe/syncbench"
)

// pagePath checks that a page can be written to a file, without touching what is there,
// and returns the path behind symbolic links. Invalid, NotFound, Permission.
func pagePath(op, path string) (string, error) {
	if path == "-" {
		return "", errs.New(errs.Invalid, op, path, "cannot write a page to standard output").WithHint("use --html FILE")
	}

	// What a link points at is replaced, not the link.
	if to, err := filepath.EvalSymlinks(path); err == nil {
		path = to
	}

	dir := filepath.Dir(path)
	if st, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
		return "", errs.New(errs.NotFound, op, path, "directory %s does not exist",
			dir).WithHint("create it first: mkdir -p %s",
			shellWord(dir))
	} else if err != nil {
		return "", errs.Wrap(op, path, err)
	} else if !st.IsDir() {
		return "", errs.New(errs.Invalid, op, path, "%s is not a directory", dir)
	}

	switch st, err := os.Lstat(path); {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return "", errs.Wrap(op, path, err)
	case st.IsDir():
		return "", errs.New(errs.Invalid, op, path, "is a directory").WithHint("name a file in it: --html %s",
			shellWord(filepath.Join(path, "report.html")))
	case !st.Mode().IsRegular():
		return "", errs.New(errs.Invalid, op, path, "not a regular file, so a page cannot replace it")
	}

	f, err := os.CreateTemp(dir, ".pando-*.html")
	if err != nil {
		return "", errs.Wrap(op, path, err)
	}

	err = f.Close()
	if e := os.Remove(f.Name()); err == nil {
		err = e
	}

	return path, errs.Wrap(op, path, err)
}

// writePage writes a report as a page. The file is the old one or the new one, whole; for
// others it can be read as the old one could.
func (a *App) writePage(op, path string, r *syncbench.Report) error {
	b, err := syncbench.HTML(r)
	if err != nil {
		return err
	}

	mode := fs.FileMode(0o644)
	if st, err := os.Stat(path); err == nil {
		mode = st.Mode().Perm()
	}

	f, err := os.CreateTemp(filepath.Dir(path), ".pando-*.html")
	if err != nil {
		return errs.Wrap(op, path, err)
	}

	defer os.Remove(f.Name()) // once it has its name this finds nothing

	_, err = f.Write(b)
	if err == nil {
		err = f.Chmod(mode)
	}
	if err == nil {
		err = f.Sync()
	}

	if e := f.Close(); err == nil {
		err = e
	}
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return errs.Wrap(op, path, err)
	}

	a.printNote("wrote %s", path)
	return nil
}
