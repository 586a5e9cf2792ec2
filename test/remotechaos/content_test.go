//go:build linux && (amd64 || arm64)

package remotechaos

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// tree is the content of a volume: for each file its mode, size and hash, for each directory its mode.
type tree map[string]string

// is reports whether two contents are the same.
func (t tree) is(other tree) bool { return maps.Equal(t, other) }

// differs says in what a tree is not what it should be.
func (t tree) differs(want tree) string {
	var b strings.Builder
	for _, path := range slices.Sorted(maps.Keys(want)) {
		if t[path] != want[path] {
			fmt.Fprintf(&b, "%s is %q, should be %q; ", path, t[path], want[path])
		}
	}
	for _, path := range slices.Sorted(maps.Keys(t)) {
		if _, ok := want[path]; !ok {
			fmt.Fprintf(&b, "%s should not be there; ", path)
		}
	}
	return b.String()
}

// files are the paths of the files of a tree.
func (t tree) files() []string {
	return slices.DeleteFunc(slices.Sorted(maps.Keys(t)), func(p string) bool { return strings.HasPrefix(t[p], "d") })
}

// read reads a tree.
func (h *host) read(dir string) tree {
	h.c.t.Helper()
	out := tree{}
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(dir, path)
		if err != nil || rel == "." {
			return err
		}
		if rel == "lost+found" {
			return filepath.SkipDir
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		if d.IsDir() {
			out[rel] = info.Mode().String()
			return nil
		}
		content, err := os.ReadFile(path)
		out[rel] = fmt.Sprintf("%v %d %x", info.Mode(), len(content), sha256.Sum256(content))[:48]
		return err
	})
	if err != nil {
		h.c.wrongf("%s: reading %s: %v", h.name, dir, err)
	}
	return out
}

// bytes draws content: half of it can be compressed.
func (h *host) bytes(n int) []byte {
	if h.r.IntN(2) == 0 {
		line := fmt.Sprintf("a line of text of host %s, number %d\n", h.name, h.r.Uint32())
		return bytes.Repeat([]byte(line), n/len(line)+1)[:n]
	}
	var seed [32]byte
	for i := range seed {
		seed[i] = byte(h.r.Uint32())
	}
	out := make([]byte, n)
	_, _ = rand.NewChaCha8(seed).Read(out) // never fails
	return out
}

func (h *host) writeFile(path string, n int) {
	h.c.t.Helper()
	if err := os.WriteFile(path, h.bytes(n), 0o640); err != nil {
		h.c.wrongf("%s: %v", h.name, err)
	}
}

// change changes some of a mounted volume. It stays small: a volume has at most maxFiles files.
func (h *host) change(v *volume) {
	dir := h.mountpoint(v.name)
	for range 1 + h.r.IntN(4) {
		files := v.content.files()
		path := filepath.Join(dir, pick(h.r, files))
		var err error
		switch n := h.r.IntN(10); {
		case len(files) == 0 || n < 3 && len(files) < maxFiles:
			path = filepath.Join(dir, h.fresh("f"))
			err = os.WriteFile(path, h.bytes(h.r.IntN(300_000)), 0o640)
		case n < 7:
			err = h.overwrite(path)
		case n == 7:
			err = os.Truncate(path, int64(h.r.IntN(200_000)))
		case n == 8:
			err = os.Remove(path)
		default:
			if err = os.MkdirAll(filepath.Join(dir, "sub"), 0o750); err == nil {
				err = os.Rename(path, filepath.Join(dir, "sub", h.fresh("r")))
			}
		}
		if err != nil {
			h.c.wrongf("%s: %v", h.name, err)
		}
		v.content = h.read(dir)
	}
	h.c.note("write", "%s: wrote into %s: %d files", h.name, v.name, len(v.content))
}

// grow mounts a volume and adds a file to it, so that its next point needs data that no other has.
func (h *host) grow(v *volume) {
	if !h.mount(v) {
		return
	}
	dir := h.mountpoint(v.name)
	if files := v.content.files(); len(files) >= maxFiles {
		if err := os.Remove(filepath.Join(dir, pick(h.r, files))); err != nil {
			h.c.wrongf("%s: %v", h.name, err)
		}
	}
	h.writeFile(filepath.Join(dir, h.fresh("f")), 20_000+h.r.IntN(100_000))
	v.content = h.read(dir)
	h.c.note("", "%s: a new file in %s", h.name, v.name)
}

const maxFiles = 12

// overwrite writes into a file, or makes a hole in it.
func (h *host) overwrite(path string) error {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	at, n := int64(h.r.IntN(40))*4096, 1+h.r.IntN(40_000)
	if h.r.IntN(5) == 0 {
		return unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, at, int64(n))
	}
	_, err = f.WriteAt(h.bytes(n), at)
	return err
}

func (h *host) mountpoint(volume string) string { return filepath.Join(h.pool, "mnt", volume) }
