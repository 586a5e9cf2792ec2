package engine_test

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"pando/internal/base/ref"
	"pando/internal/engine"
	"pando/internal/engine/check"
	"pando/internal/testing/testfs"
)

// sharingPool makes a pool of images on a filesystem, with a golden g and four clones.
func sharingPool(t *testing.T, kind string) *broken {
	t.Helper()
	e := newPool(t, testfs.New(t, kind, 2<<30).Dir(), engine.InitRequest{Driver: "reflink", MinFreePercent: 1})
	importTree(t, e, "g", source(t))
	b := &broken{t: t, e: e, dir: e.Dir(), ids: map[string]string{}}
	b.cloneMany("g", "v", 4)
	return b
}

// cloneMany makes clones called NAME-1 to NAME-n.
func (b *broken) cloneMany(from, name string, n int) {
	b.t.Helper()
	out, err := b.e.Clone(b.t.Context(), engine.CloneRequest{From: ref.Ref{Name: from}, Name: ref.MustName(name),
		Count: n})
	b.must(err)
	for _, v := range out {
		b.ids[v.Name] = v.ID
	}
}

// TestFsckChecksSharedBlocksOnce: untouched clones need no check of their own, and
// whatever was written to gets one.
func TestFsckChecksSharedBlocksOnce(t *testing.T) {
	for _, kind := range []string{"xfs", "btrfs"} {
		t.Run(kind, func(t *testing.T) {
			b := sharingPool(t, kind)
			check := func(what string, images, shared int) {
				t.Helper()
				r := fsck(t, b.dir, false)
				if !r.OK || r.Checked.Images != images || r.Checked.Shared != shared {
					t.Errorf("%s: %+v, wanted %d checked and %d that share\n%s", what, r.Checked, images, shared, findings(r))
				}
			}
			check("untouched", 1, 4)

			b.flip("v-2", 100<<20, []byte("one byte in free space is enough"))
			check("one extent differs", 2, 3)

			v, err := b.e.Mount(t.Context(), engine.MountRequest{Volume: ref.MustName("v-3")})
			b.must(err)
			check("one is mounted", 3, 2)
			b.must(os.WriteFile(filepath.Join(v.Mountpoint, "new"), []byte("x"), 0o600))
			_, err = b.e.Umount(t.Context(), engine.UmountRequest{Volume: ref.MustName("v-3")})
			b.must(err)
			check("one was written to", 3, 2)

			b.cloneMany("v-3", "c", 2)
			check("clones of a clone", 3, 4)
		})
	}
}

// TestFsckFindsDamageInSharedBlocks: damage that clones have taken over is found in each of
// them, and damage in one of them is found in that one.
func TestFsckFindsDamageInSharedBlocks(t *testing.T) {
	b := sharingPool(t, "xfs")
	b.debugfs("v-1", "freeb 1 400")
	b.cloneMany("v-1", "c", 2)
	damaged := func(r *check.Report) (out []string) {
		for _, f := range r.Findings {
			if f.Code == "filesystem" && strings.Contains(f.Detail, "Block bitmap") {
				out = append(out, f.Ref)
			}
		}
		slices.Sort(out)
		return out
	}
	want := []string{"c-1", "c-2", "v-1"}
	r := fsck(t, b.dir, false)
	if got := damaged(r); !slices.Equal(got, want) || r.Checked.Images != 2 || r.Checked.Shared != 5 {
		t.Errorf("found in %v, wanted %v; %+v\n%s", got, want, r.Checked, findings(r))
	}

	// Each is repaired by itself.
	if r = fsck(t, b.dir, true); !r.OK || len(r.Findings) != len(want) {
		t.Errorf("repair:\n%s", findings(r))
	}
	if r = fsck(t, b.dir, false, want...); !r.OK {
		t.Errorf("after the repair:\n%s", findings(r))
	}
}
