package treetest

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// Kept remembers what the generations and layers of a pool contain, which nothing may ever change. It works on
// pools that keep objects in files or directories: not on ZFS.
type Kept struct {
	pool string
	sums map[string]string // by the path of the object
}

// KeepImmutable checks at the end of the test that the generations and layers that the pool in a directory has now,
// and those that Check finds later, are as they were found.
func KeepImmutable(t testing.TB, pool string) *Kept {
	t.Helper()
	k := &Kept{pool, map[string]string{}}
	k.Check(t)
	t.Cleanup(func() { k.Check(t) })
	return k
}

// Check fails the test if a generation or layer has changed since it was first found. One that was removed is
// forgotten. Nothing may create objects in the meantime.
func (k *Kept) Check(t testing.TB) {
	t.Helper()
	metas, err := filepath.Glob(filepath.Join(k.pool, "data/objects/*.meta"))
	if err != nil {
		t.Fatal(err)
	}

	known := k.sums
	k.sums = map[string]string{}
	for _, meta := range metas {
		path, sum, err := immutableSum(meta)
		if err != nil {
			t.Errorf("%s: %v", meta, err)
		}
		if sum == "" {
			continue
		}
		if before, ok := known[path]; ok && before != sum {
			t.Errorf("CHANGED: %s, which is immutable", path)
		}
		k.sums[path] = sum
	}
}

// immutableSum returns the path of an object and a hash of its content: "" if it may change, or is incomplete.
func immutableSum(meta string) (path, sum string, err error) {
	text, err := os.ReadFile(meta)
	if err != nil {
		return "", "", err
	}

	var id struct{ Kind string }
	if json.Unmarshal(text, &id) != nil || id.Kind != "generation" && id.Kind != "layer" {
		return "", "", nil
	}

	// An image.
	name := strings.TrimSuffix(meta, ".meta")
	if st, err := os.Stat(name + ".img"); err == nil {
		var e Entry
		err = e.content(unix.AT_FDCWD, name+".img", st.Size())
		return name + ".img", fmt.Sprint(st.Size(), e.Sum), err
	}

	// A tree.
	for _, ext := range []string{".tree", ".subvol"} {
		if _, err := os.Stat(name + ext); err != nil {
			continue
		}
		files, err := Fingerprint(name + ext)
		h := sha256.New()
		for _, p := range slices.Sorted(maps.Keys(files)) {
			e := files[p]
			e.Atime = e.Mtime // the Fingerprint changes those of symbolic links
			fmt.Fprintf(h, "%q %+v\n", p, e)
		}
		return name + ext, fmt.Sprintf("%x", h.Sum(nil)), err
	}

	return "", "", nil
}
