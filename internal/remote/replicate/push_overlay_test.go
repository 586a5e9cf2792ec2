package replicate

import (
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver/btrfs"
	"pando/internal/driver/plain"
	"pando/internal/driver/reflink"
	"pando/internal/engine"
	"pando/internal/testing/faulttest"
	"pando/internal/testing/testfs"
	"pando/internal/testing/treetest"

	"golang.org/x/sys/unix"
)

// overlayPools are pools that have overlays, by driver.
var overlayPools = map[string]func(t *testing.T) string{
	reflink.Name: func(t *testing.T) string { return testfs.XFS(t, 800<<20) },
	btrfs.Name:   func(t *testing.T) string { return testfs.Btrfs(t, 800<<20) },
	plain.Name:   func(t *testing.T) string { return testfs.Ext4(t, 800<<20) },
}

// TestOverlaysTravel: overlays are pushed as what they change, with a reference to their golden, and pulled as overlays
// that show the same files, between pools of all kinds that can hold each other's files.
func TestOverlaysTravel(t *testing.T) {
	for _, c := range []struct {
		from, to string
		portable bool
	}{
		{from: reflink.Name, to: reflink.Name},
		{from: btrfs.Name, to: btrfs.Name},
		{from: btrfs.Name, to: reflink.Name, portable: true},
		{from: plain.Name, to: plain.Name},
		{from: plain.Name, to: reflink.Name},
		{from: plain.Name, to: btrfs.Name},
	} {
		t.Run(c.from+"-"+c.to, func(t *testing.T) {
			r := faulttest.Rand(t)
			w := worldOn(t, overlayPools[c.from](t), c.from, "file:"+filepath.Join(t.TempDir(), "remote"))
			o := w.otherIn(t, overlayPools[c.to](t), c.to)
			w.overlayGolden("g", r)
			w.overlay("g", "v")
			push := func(volume string) []Pushed {
				t.Helper()
				out, err := Push(t.Context(), w.e, w.r, PushRequest{Refs: []ref.Ref{{Name: volume}}, Portable: c.portable})
				if err != nil {
					t.Fatalf("%v (%s)", err, errs.HintOf(err))
				}
				return out
			}

			// The golden is pushed with the first overlay, and pulled with it.
			w.change("v", r)
			if out := push("v"); len(out) != 2 || out[0].Kind != api.KindGeneration || out[1].Origin != "g@1" {
				t.Errorf("pushed %+v", out)
			}
			if out := o.pull("v", PullRequest{}); !slices.Equal(out.Origins, []string{"g@1"}) {
				t.Errorf("pulled %+v", out)
			}
			sameOverlay(w, o, "v", "g@1")

			// Another overlay on it travels alone, and so do later changes.
			w.overlay("g", "u")
			w.change("u", r)
			for _, p := range push("u") {
				if p.Kind == api.KindGeneration {
					t.Errorf("pushed %+v", p)
				}
			}
			if out := o.pull("u", PullRequest{}); len(out.Origins) > 0 {
				t.Errorf("pulled %+v", out)
			}
			sameOverlay(w, o, "u", "g@1")
			for range 3 {
				w.change("v", r)
				push("v")
				if out := push("v"); len(out) != 1 || !out[0].Unchanged {
					t.Errorf("pushed what has not changed: %+v", out)
				}
				o.pull("v", PullRequest{Update: true})
				sameOverlay(w, o, "v", "g@1")
			}
			w.whole()
		})
	}
}

// TestOverlayOutlivesItsGoldenOnRemotes: the generation of an overlay may be removed from the pool, from the remote and
// from another pool, in any order: the overlay can still be pushed, pruned around, verified and pulled.
func TestOverlayOutlivesItsGoldenOnRemotes(t *testing.T) {
	for _, driver := range slices.Sorted(maps.Keys(overlayPools)) {
		t.Run(driver, func(t *testing.T) {
			r := faulttest.Rand(t)
			w := worldOn(t, overlayPools[driver](t), driver, "file:"+filepath.Join(t.TempDir(), "remote"))
			w.overlayGolden("g", r)
			w.overlay("g", "v")
			w.change("v", r)

			// Removed before the first push: another golden has its name by now.
			w.removeGolden("g")
			w.overlayGolden("g", r)
			out := w.push("v")
			alone := out[0].Volume
			if len(out) != 2 || !strings.HasPrefix(alone, "g.layer-") {
				t.Fatalf("pushed %+v", out)
			}
			w.push("g")

			// Removed from the remote.
			w.forget(alone)
			prune := func() {
				t.Helper()
				if _, err := w.tryPrune(PruneRequest{}); err != nil {
					t.Fatal(err)
				}
				w.whole()
			}
			prune()
			w.change("v", r)
			if out := w.push("v"); len(out) != 1 {
				t.Errorf("pushed %+v", out)
			}
			prune()

			// Pulled, removed there, and updated.
			o := w.otherIn(t, overlayPools[driver](t), driver)
			o.pull("v", PullRequest{})
			sameOverlay(w, o, "v", alone+"@1")
			o.removeGolden(alone)
			w.change("v", r)
			w.push("v")
			o.pull("v", PullRequest{Update: true})
			sameOverlay(w, o, "v", alone+"@1")
			o.pull("v", PullRequest{As: ref.MustName("w")})
			prune()

			// The last point that needs it is removed, and its data with it.
			w.forget("v")
			w.forget("g")
			prune()
			if n := w.stored(); n > mib {
				t.Errorf("%d bytes are left on the remote", n)
			}
		})
	}
}

// TestPullOverlayBesideItsGoldensName: a golden with the longest name, or with a point at its end, is restored beside
// another that has its name.
func TestPullOverlayBesideItsGoldensName(t *testing.T) {
	long := strings.Repeat("g", ref.MaxNameBytes)
	for name, golden := range map[string]string{"short": "g", "point": "g.", "long": long} {
		t.Run(name, func(t *testing.T) {
			r := faulttest.Rand(t)
			w := worldOn(t, overlayPools[plain.Name](t), plain.Name, "file:"+filepath.Join(t.TempDir(), "remote"))
			o := w.otherIn(t, overlayPools[plain.Name](t), plain.Name)
			o.importDir(golden, smallFile)

			w.overlayGolden(golden, r)
			w.overlay(golden, "v")
			w.change("v", r)
			w.push("v")
			out, err := o.tryPull("v", PullRequest{})
			if err != nil {
				t.Fatal(err)
			}
			if len(out.Origins) != 1 || !strings.HasSuffix(out.Origins[0], "."+o.r.Name+"@1") {
				t.Fatalf("restored %q", out.Origins)
			}
			sameOverlay(w, o, "v", out.Origins[0])
		})
	}
}

// TestPushRebasedOverlay: a rebase changes the golden of an overlay, and maybe nothing else: that travels, too.
func TestPushRebasedOverlay(t *testing.T) {
	for _, driver := range slices.Sorted(maps.Keys(overlayPools)) {
		t.Run(driver, func(t *testing.T) {
			r := faulttest.Rand(t)
			w := worldOn(t, overlayPools[driver](t), driver, "file:"+filepath.Join(t.TempDir(), "remote"))
			o := w.otherIn(t, overlayPools[driver](t), driver)
			w.overlayGolden("g", r)
			w.overlay("g", "v")
			w.push("v")
			o.pull("v", PullRequest{})

			w.clone("g", "better")
			w.edits("better", func(dir string) { must(t, os.WriteFile(dir+"/better", []byte("better"), 0o644)) })
			w.publish("g", "better")
			if _, err := w.e.Rebase(t.Context(), engine.RebaseRequest{Volume: ref.MustName("v"),
				Onto: refs(t, "g")}); err != nil {
				t.Fatal(err)
			}
			if out := w.push("v"); out[len(out)-1].Unchanged || out[len(out)-1].Origin != "g@2" {
				t.Errorf("pushed %+v", out)
			}
			o.pull("v", PullRequest{Update: true})
			sameOverlay(w, o, "v", "g@2")

			// What the volume was before is an overlay on the first generation.
			i, err := o.e.Show(t.Context(), refs(t, "v"))
			if err != nil || len(i.Snapshots) < 2 {
				t.Fatalf("%+v, %v", i, err)
			}
			w.whole()
		})
	}
}

// TestPushFork: the clone of an overlay's snapshot is pushed as what it changes to that.
func TestPushFork(t *testing.T) {
	for _, driver := range slices.Sorted(maps.Keys(overlayPools)) {
		t.Run(driver, func(t *testing.T) {
			r := faulttest.Rand(t)
			w := worldOn(t, overlayPools[driver](t), driver, "file:"+filepath.Join(t.TempDir(), "remote"))
			w.overlayGolden("g", r)
			w.overlay("g", "v")
			w.edits("v", func(dir string) {
				f, err := os.Create(dir + "/much")
				must(t, err)
				noise(t, f, 4, 0, 20*mib)
				must(t, f.Close())
			})
			w.snapshot("v", "s")
			w.push("v@s")
			w.clone("v@s", "fork")
			w.edits("fork", func(dir string) { must(t, os.WriteFile(dir+"/own", []byte("own"), 0o644)) })
			if out := w.push("fork"); len(out) != 1 || out[0].UploadedBytes > 2*mib || out[0].Origin != "g@1" {
				t.Errorf("pushed %+v", out)
			}
			o := w.otherIn(t, overlayPools[driver](t), driver)
			o.pull("fork", PullRequest{})
			sameOverlay(w, o, "fork", "g@1")
		})
	}
}

// TestPushRelatedOverlay: what an overlay shares with another one on the remote is not sent again: with itself under
// another name, and, of an image, with the volume that it was forked from, and with what was pulled under another name.
func TestPushRelatedOverlay(t *testing.T) {
	for _, driver := range slices.Sorted(maps.Keys(overlayPools)) {
		t.Run(driver, func(t *testing.T) {
			r := faulttest.Rand(t)
			w := worldOn(t, overlayPools[driver](t), driver, "file:"+filepath.Join(t.TempDir(), "remote"))
			w.overlayGolden("g", r)
			w.overlay("g", "v")
			w.edits("v", func(dir string) {
				f, err := os.Create(dir + "/much")
				must(t, err)
				noise(t, f, 5, 0, 20*mib)
				must(t, f.Close())
			})
			w.push("v")
			push := func(w *world, volume, as string) {
				t.Helper()
				out, err := Push(t.Context(), w.e, w.r, PushRequest{Refs: []ref.Ref{refs(t, volume)},
					As: ref.MustName(as)})
				if err != nil || len(out) != 1 || out[0].UploadedBytes > 2*mib || out[0].Origin != "g@1" {
					t.Errorf("pushed %s as %s: %+v, %v", volume, as, out, err)
				}
			}

			// A snapshot that is there already under the volume's own name, too.
			w.snapshot("v", "s")
			for _, as := range []string{"v", "again"} {
				_, err := Push(t.Context(), w.e, w.r, PushRequest{Refs: []ref.Ref{refs(t, "v@s")}, As: ref.MustName(as)})
				must(t, err)
			}

			push(w, "v", "other-name")
			o := w.otherIn(t, overlayPools[driver](t), driver)
			o.pull("other-name", PullRequest{As: ref.MustName("v")})
			sameOverlay(w, o, "v", "g@1")
			if driver != reflink.Name {
				return // trees are differences only from what they descend from
			}

			push(o, "v", "pulled")
			w.clone("v", "fork")
			push(w, "fork", "fork")
			o.pull("fork", PullRequest{})
			sameOverlay(w, o, "fork", "g@1")
			w.whole()
		})
	}
}

// TestPushRepairsLowerLayers: a push sends a lower layer again that the remote has lost, and then the overlay, which
// names the lost one. A verify names both.
func TestPushRepairsLowerLayers(t *testing.T) {
	r := faulttest.Rand(t)
	w := newWorld(t)
	w.overlayGolden("g", r)
	w.overlay("g", "v")
	w.change("v", r)
	w.push("v")
	key, _ := w.largestOf(w.open(), "g")
	must(t, w.store.Delete(t.Context(), key))

	v, err := Verify(t.Context(), nil, w.r, VerifyRequest{})
	if err != nil || v.Err() == nil {
		t.Fatalf("%v, %+v", err, v)
	}
	var affected []string
	for _, p := range v.Problems {
		affected = append(affected, p.Affected...)
	}
	if !slices.Contains(affected, "g@1") || !slices.ContainsFunc(affected, func(s string) bool {
		return strings.HasPrefix(s, "v@")
	}) {
		t.Errorf("affected: %v", affected)
	}

	w.change("v", r)
	w.push("v")
	o := w.another(t)
	o.pull("v", PullRequest{})
	sameOverlay(w, o, "v", "g@1")
}

// TestPushWithLostLowerLayer: after the loss of a lower layer, the next push makes a point that can be pulled, whether
// the overlay has changed or not, and so does a verify with repair, in place of the damaged point.
func TestPushWithLostLowerLayer(t *testing.T) {
	for _, driver := range slices.Sorted(maps.Keys(overlayPools)) {
		for _, how := range []string{"same", "changed", "repair"} {
			t.Run(driver+"-"+how, func(t *testing.T) {
				r := faulttest.Rand(t)
				w := worldOn(t, overlayPools[driver](t), driver, "file:"+filepath.Join(t.TempDir(), "remote"))
				w.overlayGolden("g", r)
				w.overlay("g", "v")
				w.change("v", r)
				golden := w.push("v")[0]
				must(t, w.store.Delete(t.Context(), "manifests/"+golden.Manifest))

				switch how {
				case "same":
					w.push("v")
				case "changed":
					w.change("v", r)
					w.push("v")
				case "repair":
					v, err := VerifyRepair(t.Context(), w.e, w.r, VerifyRequest{})
					must(t, err)
					must(t, v.Err())
				}
				o := w.otherIn(t, overlayPools[driver](t), driver)
				o.pull("v", PullRequest{})
				sameOverlay(w, o, "v", "g@1")
			})
		}
	}
}

// TestPushFlattened: a volume that was an overlay is pushed and pulled as others, although it keeps snapshots from
// before.
func TestPushFlattened(t *testing.T) {
	w := newWorld(t)
	w.importDir("g", smallFile)
	w.overlay("g", "o")
	w.push("o")
	w.snapshot("o", "before")
	if _, err := w.e.Flatten(t.Context(), engine.FlattenRequest{Volume: ref.MustName("o")}); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		w.push("o")
	}
	w.push("o@before")
	o := w.another(t)
	o.pull("o", PullRequest{})
	if i, err := o.e.Show(t.Context(), refs(t, "o")); err != nil || i.Layers != nil {
		t.Errorf("%+v, %v", i, err)
	}
	o.pull("o@before", PullRequest{As: ref.MustName("before")})
	if i, err := o.e.Show(t.Context(), refs(t, "before")); err != nil || i.Layers == nil {
		t.Errorf("%+v, %v", i, err)
	}
}

func smallFile(dir string) {
	if err := os.WriteFile(filepath.Join(dir, "a"), []byte("content of a"), 0o600); err != nil {
		panic(err)
	}
}

// overlay clones a golden as an overlay.
func (w *world) overlay(golden, name string) {
	w.t.Helper()
	if os.Geteuid() != 0 {
		w.t.Skip("SKIPPED: overlays need root: run the tests as root")
	}
	if _, err := w.e.Clone(w.t.Context(), engine.CloneRequest{From: ref.Ref{Name: golden}, Name: ref.MustName(name),
		Overlay: true}); err != nil {
		w.t.Fatal(err)
	}
}

// overlayGolden makes a golden of random files, of which one is large.
func (w *world) overlayGolden(name string, r *rand.Rand) {
	w.t.Helper()
	w.importDir(name, func(dir string) {
		e := &treetest.Editor{T: w.t, R: r, Dir: dir}
		e.Fill()
		f, err := os.Create(dir + "/large")
		must(w.t, err)
		noise(w.t, f, 1, 0, 16*mib)
		must(w.t, f.Close())
	})
}

// change makes random changes in a volume.
func (w *world) change(volume string, r *rand.Rand) {
	w.t.Helper()
	w.edits(volume, func(dir string) {
		e := &treetest.Editor{T: w.t, R: r, Dir: dir}
		for range 5 + r.IntN(20) {
			e.Edit()
		}
	})
}

// removeGolden removes a golden, whose generations may stay as layers.
func (w *world) removeGolden(name string) {
	w.t.Helper()
	if _, err := w.e.RemoveGolden(w.t.Context(), refs(w.t, name)); err != nil {
		w.t.Fatal(err)
	}
}

// forget removes a volume or golden from the remote.
func (w *world) forget(name string) {
	w.t.Helper()
	if _, err := RemoveVolume(w.t.Context(), w.r, refs(w.t, name)); err != nil {
		w.t.Fatal(err)
	}
}

// sameOverlay wants a volume to be an overlay in two pools, in the second one on lower, and to show the same files.
func sameOverlay(a, b *world, volume, lower string) {
	a.t.Helper()
	i, err := b.e.Show(b.t.Context(), refs(b.t, volume))
	if err != nil || i.Layers == nil || i.Layers.Lower != lower {
		b.t.Fatalf("%s is not an overlay on %s: %+v, %v", volume, lower, i, err)
	}
	x, y, ignore := a.mounted(volume), b.mounted(volume), treetest.Atime|treetest.Holes
	if a.e.Caps().Name == btrfs.Name || b.e.Caps().Name == btrfs.Name {
		// Streams have no flags, and overlays show files of both layers under one inode number.
		ignore |= treetest.Flags
		for _, files := range []map[string]treetest.Entry{x, y} {
			for name, f := range files {
				f.Link = ""
				files[name] = f
			}
		}
	}
	for _, diff := range treetest.Diff(x, y, ignore) {
		b.t.Error(diff)
	}
	if b.t.Failed() {
		b.t.FailNow()
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// TestHostileUpperLayers: an upper layer that somebody made by hand cannot lead to files outside of its volume, neither
// to read nor to change them.
func TestHostileUpperLayers(t *testing.T) {
	for what, make := range map[string]func(t *testing.T, tree, outside string){
		"link for upper": func(t *testing.T, tree, outside string) {
			must(t, os.RemoveAll(tree+"/upper"))
			must(t, os.Symlink(outside, tree+"/upper"))
		},
		"link for work": func(t *testing.T, tree, outside string) {
			must(t, os.RemoveAll(tree+"/work"))
			must(t, os.Symlink(outside, tree+"/work"))
		},
		"link in work": func(t *testing.T, tree, outside string) {
			must(t, os.RemoveAll(filepath.Join(tree, "work", "work")))
			must(t, os.Symlink(filepath.Join(outside, "work"), filepath.Join(tree, "work", "work")))
		},
		"file for upper": func(t *testing.T, tree, _ string) {
			must(t, os.RemoveAll(tree+"/upper"))
			must(t, os.WriteFile(tree+"/upper", nil, 0o600))
		},
		"redirect upwards": func(t *testing.T, tree, outside string) {
			must(t, os.MkdirAll(tree+"/upper/d", 0o755))
			for i := range 9 {
				must(t, unix.Setxattr(tree+"/upper/d", "trusted.overlay.redirect",
					[]byte(strings.Repeat("/..", i+1)+outside), 0))
			}
		},
		"nothing": func(t *testing.T, tree, _ string) {
			must(t, os.RemoveAll(tree+"/upper"))
			must(t, os.RemoveAll(tree+"/work"))
		},
	} {
		for _, to := range []string{plain.Name, reflink.Name} {
			t.Run(what+"/"+to, func(t *testing.T) {
				outside := t.TempDir()
				must(t, os.MkdirAll(filepath.Join(outside, "work/incompat/volatile"), 0o755))
				must(t, os.WriteFile(outside+"/secret", []byte("secret"), 0o600))
				before, err := treetest.Fingerprint(outside)
				must(t, err)

				w := worldOn(t, overlayPools[plain.Name](t), plain.Name, "file:"+filepath.Join(t.TempDir(), "remote"))
				w.importDir("g", smallFile)
				w.overlay("g", "v")
				w.edits("v", func(dir string) { must(t, os.WriteFile(dir+"/new", nil, 0o600)) })
				make(t, w.image("v"), outside)
				w.push("v")
				o := w.otherIn(t, overlayPools[to](t), to)
				o.pull("v", PullRequest{})
				i, err := o.e.Mount(t.Context(), engine.MountRequest{Volume: ref.MustName("v")})
				if err == nil {
					seen := found(i.Mountpoint, "secret")
					if _, err := o.e.Umount(t.Context(), engine.UmountRequest{Volume: ref.MustName("v")}); err != nil {
						t.Fatal(err)
					}
					if seen != "" {
						t.Errorf("the volume shows %s", seen)
					}
				} else {
					wantKind(t, err, errs.Damaged, "older")
				}
				if _, err := o.e.Flatten(t.Context(), engine.FlattenRequest{Volume: ref.MustName("v")}); err == nil {
					o.edits("v", func(dir string) {
						if seen := found(dir, "secret"); seen != "" {
							t.Errorf("the flattened volume shows %s", seen)
						}
					})
				}
				after, err := treetest.Fingerprint(outside)
				must(t, err)
				for _, d := range treetest.Diff(before, after, treetest.Atime) {
					t.Errorf("outside: %s", d)
				}
			})
		}
	}
}

// found returns the path of a file of a name somewhere below dir, "" if there is none.
func found(dir, name string) (path string) {
	_ = filepath.WalkDir(dir, func(p string, d os.DirEntry, err error) error {
		if err == nil && d.Name() == name {
			path = p
		}
		return nil
	})
	return path
}
