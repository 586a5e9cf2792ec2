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

	"pando/internal/driver"
	"pando/internal/errs"
)

// files returns where an object's data and its identity lie, for drivers whose
// layout is that of package objdir. Tests that break objects skip others.
func (s *suite) files(id driver.ObjectID) (data, meta string) {
	s.t.Helper()
	a, err := s.d.Attachment(s.ctx(), id)
	if err != nil {
		s.t.Fatal(err)
	}
	data = a.Image + a.Tree
	meta = strings.TrimSuffix(data, filepath.Ext(data)) + ".meta"
	if _, err := os.Lstat(meta); err != nil {
		s.t.Skip("the driver keeps identities elsewhere, this test cannot break them")
	}
	return data, meta
}

// testForeign puts other people's files beside the objects.
func testForeign(t *testing.T, s *suite) {
	vol := s.create(s.fast)
	data, _ := s.files(vol)
	dir := filepath.Dir(data)
	foreign := []string{
		"README", string(vol) + ".bak", string(vol), string(driver.NewID()) + ".txt", "x" + string(vol) + filepath.Ext(data),
		"short.meta", strings.ToUpper(string(vol)) + ".meta", "lost+found/inside", string(driver.NewID()) + "/inside",
	}
	for _, name := range foreign {
		p := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p, []byte(name), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	s.wantExactly(vol)
	snap := s.snapshot(vol)
	s.wantExactly(vol, snap)
	s.reopen()
	s.wantExactly(vol, snap)
	s.destroy(vol)
	s.destroy(snap)
	s.wantExactly()
	for _, name := range foreign {
		if b, err := os.ReadFile(filepath.Join(dir, name)); err != nil || string(b) != name {
			t.Errorf("somebody else's file %q was touched: %q, %v", name, b, err)
		}
		if err := os.RemoveAll(filepath.Join(dir, strings.Split(name, "/")[0])); err != nil {
			t.Fatal(err)
		}
	}
}

// testIncomplete leaves halves of objects, as a process that is killed does.
func testIncomplete(t *testing.T, s *suite) {
	ctx := s.ctx()
	vol, m := s.create(s.fast), model{}
	s.put(vol, m, "a", file{1, 5_000})

	noIdentity, noData, empty := s.clone(vol), s.clone(vol), s.create(s.fast)
	_, meta := s.files(noIdentity)
	if err := os.Remove(meta); err != nil {
		t.Fatal(err)
	}
	for _, id := range []driver.ObjectID{noData, empty} {
		data, _ := s.files(id)
		if err := os.RemoveAll(data); err != nil {
			t.Fatal(err)
		}
	}
	incomplete := []driver.ObjectID{noIdentity, noData, empty}
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
	_, good := s.files(vol)
	valid, err := os.Readlink(good)
	if err != nil {
		t.Fatal(err)
	}
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
		_, meta := s.files(id)
		if err := os.Remove(meta); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(c.target, meta); err != nil {
			t.Fatal(err)
		}
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
