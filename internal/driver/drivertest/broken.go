package drivertest

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/driver"
)

// spoiler breaks objects of the pool.
func (s *suite) spoiler() Spoiler {
	if s.target.Spoil != nil {
		return s.target.Spoil(s.t, s.dir)
	}
	return objdirSpoiler{s}
}

// objdirSpoiler is for drivers whose layout is that of package objdir.
type objdirSpoiler struct{ s *suite }

func (o objdirSpoiler) must(err error) {
	o.s.t.Helper()
	if err != nil {
		o.s.t.Fatal(err)
	}
}

// object is an object's data and its identity, by what all layouts with objdir have
// in common.
func (o objdirSpoiler) object(id driver.ObjectID) (data, meta string) {
	o.s.t.Helper()
	meta = MetaPath(o.s.dir, id)
	all, err := filepath.Glob(filepath.Join(o.s.dir, "objects", string(id)+".*"))
	o.must(err)
	for _, p := range all {
		if p != meta {
			data = p
		}
	}
	return data, meta
}

func (o objdirSpoiler) Identity(id driver.ObjectID) string {
	_, meta := o.object(id)
	return ReadMeta(meta)
}

func (o objdirSpoiler) Put(id driver.ObjectID, text string) {
	_, meta := o.object(id)
	o.must(WriteMeta(meta, text))
}

func (o objdirSpoiler) Remove(id driver.ObjectID) {
	_, meta := o.object(id)
	o.must(os.Remove(meta))
}

func (o objdirSpoiler) RemoveData(id driver.ObjectID) bool {
	data, _ := o.object(id)
	o.must(os.RemoveAll(data))
	return true
}

func (o objdirSpoiler) More() map[string]func(driver.ObjectID) bool {
	return map[string]func(driver.ObjectID) bool{
		"its identity is a link": func(id driver.ObjectID) bool {
			_, meta := o.object(id)
			o.must(firstOf(os.Remove(meta), os.Symlink("garbage", meta)))
			return false
		},
		"there is a leftover": func(id driver.ObjectID) bool {
			_, meta := o.object(id)
			o.must(os.Symlink("x", meta+".new"))
			return true
		},
	}
}

func (o objdirSpoiler) Foreign(vol driver.ObjectID) func() {
	t := o.s.t
	data, _ := o.object(vol)
	dir := filepath.Dir(data)
	foreign := []string{
		"README", string(vol) + ".bak", string(vol), string(driver.NewID()) + ".txt", "x" + string(vol) + filepath.Ext(data),
		"short.meta", strings.ToUpper(string(vol)) + ".meta", "lost+found/inside", string(driver.NewID()) + "/inside",
	}
	for _, name := range foreign {
		p := filepath.Join(dir, name)
		o.must(os.MkdirAll(filepath.Dir(p), 0o755))
		o.must(os.WriteFile(p, []byte(name), 0o600))
	}

	return func() {
		for _, name := range foreign {
			if b, err := os.ReadFile(filepath.Join(dir, name)); err != nil || string(b) != name {
				t.Errorf("somebody else's file %q was touched: %q, %v", name, b, err)
			}
			o.must(os.RemoveAll(filepath.Join(dir, strings.Split(name, "/")[0])))
		}
	}
}

// testForeign puts other people's things beside the objects.
func testForeign(t *testing.T, s *suite) {
	vol := s.create(s.fast)
	check := s.spoiler().Foreign(vol)
	s.wantExactly(vol)
	snap := s.snapshot(vol)
	s.wantExactly(vol, snap)
	s.reopen()
	s.wantExactly(vol, snap)
	s.destroy(vol)
	s.destroy(snap)
	s.wantExactly()
	check()
}

// testIncomplete leaves halves of objects, as a process that is killed does.
func testIncomplete(t *testing.T, s *suite) {
	ctx := s.ctx()
	vol, m := s.create(s.fast), model{}
	s.put(vol, m, "a", file{1, 5_000})

	sp := s.spoiler()
	noIdentity, noData, empty := s.clone(vol), s.clone(vol), s.create(s.fast)
	sp.Remove(noIdentity)
	incomplete := []driver.ObjectID{noIdentity}
	for _, id := range []driver.ObjectID{noData, empty} {
		if sp.RemoveData(id) {
			incomplete = append(incomplete, id)
		} else {
			s.destroy(id)
		}
	}

	s.reopen() // as whoever comes after the dead
	got := s.list()
	for _, id := range incomplete {
		o, ok := got[id]
		if !ok || o.Whole || o.Err != nil || o.Identity.ID != "" {
			t.Errorf("List yields %+v (%v) for an incomplete object; want it there, not whole, without an error", o, ok)
		}

		s.unchanged(errs.NotFound, "attachment of an incomplete object", func() error {
			_, err := s.d.Attachment(ctx, id)
			return err
		})
		s.unchanged(errs.NotFound, "clone of an incomplete object", func() error {
			return s.d.Clone(ctx, id, s.identity(driver.Volume, s.fast))
		})
		taken := s.identity(driver.Volume, s.fast)
		taken.ID = id
		s.unchanged(errs.Exists, "create over an incomplete object", func() error { return s.d.Create(ctx, taken) })
		s.unchanged(errs.Exists, "clone over an incomplete object", func() error { return s.d.Clone(ctx, vol, taken) })
	}

	for _, id := range incomplete {
		for range 2 {
			s.destroy(id)
		}
	}

	s.wantExactly(vol)
	s.check("after others were cleaned up", vol, m)
}

// testDamaged writes nonsense over identities.
func testDamaged(t *testing.T, s *suite) {
	vol, m := s.create(s.fast), model{}
	s.put(vol, m, "a", file{1, 5_000})
	sp := s.spoiler()
	valid := sp.Identity(vol)
	for _, c := range []struct {
		name, target string
		kind         errs.Kind
	}{
		{"not JSON", "nonsense", errs.Damaged},
		{"cut off", valid[:len(valid)/2], errs.Damaged},
		{"of another object", valid, errs.Damaged},
		{"newer", `{"v":99,"new":true}`, errs.TooNew},
	} {
		id := s.clone(vol)
		sp.Put(id, c.target)
		s.reopen()
		o := s.list()[id]
		if o.ID != id || o.Whole || !errs.Is(o.Err, c.kind) {
			t.Errorf("identity %s: List yields %+v, want an error of kind %q", c.name, o, c.kind)
		}
		if _, err := s.d.Attachment(s.ctx(), id); !errs.Is(err, c.kind) {
			t.Errorf("identity %s: Attachment gives %v, want kind %q", c.name, err, c.kind)
		}
		s.destroy(id)
	}

	s.wantExactly(vol)
	s.check("after others were damaged", vol, m)
}

// testCanceled cancels before and during each operation: either it was done
// whole, or nothing remains.
func testCanceled(t *testing.T, s *suite) {
	vol, m := s.create(s.fast), model{}
	s.edit(vol, func(c content) error {
		if r, ok := c.(tree); ok {
			for i := range 1500 {
				p := filepath.Join(string(r), "many", string(rune('a'+i%20)))
				if err := os.MkdirAll(p, 0o755); err != nil {
					return err
				}
				if err := os.WriteFile(filepath.Join(p, fileNameOf(i)), []byte("content"), 0o644); err != nil {
					return err
				}
			}
		}

		return nil
	})

	s.put(vol, m, "a", file{1, 1 << 20})
	want := s.fingerprint(vol)

	ops := map[string]func(ctx context.Context, id driver.Identity) error{
		"create":   s.d.Create,
		"clone":    func(ctx context.Context, id driver.Identity) error { return s.d.Clone(ctx, vol, id) },
		"snapshot": func(ctx context.Context, id driver.Identity) error { return s.d.Snapshot(ctx, vol, id) },
	}

	for name, op := range ops {
		var took time.Duration
		for _, part := range []int{-1, 0, 1, 2, 3, 5, 8} { // of the time it takes, in tenths; -1 measures it
			ctx, cancel := context.WithCancel(s.ctx())
			switch part {
			case -1:
			case 0:
				cancel()
			default:
				time.AfterFunc(took*time.Duration(part)/10, cancel)
			}

			id := s.identity(driver.Volume, s.fast)
			id.Ephemeral = part != 8 // what syncing costs is up to the neighbours
			before := s.names()
			start := time.Now()
			err := op(ctx, id)
			if part < 0 {
				took = time.Since(start)
			}

			cancel()
			switch {
			case err == nil && part == 0 && s.caps.CloneCost == driver.CostData:
				t.Errorf("%s with a cancelled context did all the work", name)
			case err == nil:
				if o := s.list()[id.ID]; !o.Whole {
					t.Errorf("%s succeeded, but List yields %+v", name, o)
				}
				if name != "create" && s.fingerprint(id.ID) != want {
					t.Errorf("%s succeeded, but its content is not the origin's", name)
				}
				s.destroy(id.ID)
			case !errs.Is(err, errs.Canceled) || !errors.Is(err, context.Canceled):
				t.Errorf("%s, cancelled after %d/10 of its time: %v of kind %q", name, part, err, errs.KindOf(err))
			}

			if after := s.names(); !slices.Equal(before, after) {
				t.Fatalf("after %s, cancelled after %d/10 of its time, %s", name, part, difference(before, after))
			}
		}
	}

	// Destroying with a context that has ended may refuse, but must not lie.
	ctx, cancel := context.WithCancel(s.ctx())
	cancel()
	id := s.clone(vol)
	err := s.d.Destroy(ctx, id)
	data := s.list()
	if _, there := data[id]; err == nil && there {
		t.Error("Destroy with a cancelled context says that it succeeded, but the object is there")
	}

	s.destroy(id)
	s.wantExactly(vol)
}

func fileNameOf(i int) string { return "file" + string(rune('a'+i/20%26)) + string(rune('a'+i/520)) }
