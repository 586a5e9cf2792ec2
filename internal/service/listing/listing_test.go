package listing

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/principal"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/driver/plain"
	"pando/internal/driver/reflink"
	"pando/internal/engine"
	"pando/internal/testing/pooltest"
	"pando/internal/testing/testfs"
)

// someVolumes are volumes to select from.
func someVolumes(now time.Time) []api.Object {
	soon, late := now.Add(30*time.Minute), now.Add(48*time.Hour)
	return []api.Object{
		{Ref: "a-1", Name: "a-1", State: "idle", Origin: "web@1", Golden: "web", Generation: 1,
			CreatedAt: now.Add(-3 * time.Hour), ExclusiveBytes: 10, ExpiresAt: &soon},
		{Ref: "a-2", Name: "a-2", State: "mounted", Origin: "web@2", Golden: "web", Generation: 2,
			CreatedAt: now.Add(-time.Hour), ExclusiveBytes: 3 << 30, Mountpoint: "/mnt/a-2", Ephemeral: true},
		{Ref: "b", Name: "b", State: "mounted", CreatedAt: now.Add(-50 * time.Hour), ExclusiveBytes: 1 << 30, Pinned: true,
			Mountpoint: "/srv/b"},
		{Ref: "c", Name: "c", State: "idle", Origin: "db@1", Golden: "db", Generation: 1,
			CreatedAt: now.Add(-2 * time.Minute), ExpiresAt: &late, Overlay: true},
	}
}

// TestFiltersAndOrders: filters and orders mean the same in lists of all volumes as they say.
func TestFiltersAndOrders(t *testing.T) {
	now := time.Now()
	for _, c := range []struct {
		filters string // separated by blanks
		sort    string
		want    string
	}{
		{"", "", "a-1 a-2 b c"},
		{"name=a-*", "", "a-1 a-2"},
		{"NAME=a-* name=c", "", "a-1 a-2 c"},
		{"name=a-* state=mounted", "", "a-2"},
		{"state=mounted state=idle golden=web", "", "a-1 a-2"},
		{"origin=", "", "b"},
		{"origin=*@1", "", "a-1 c"},
		{"mountpoint=/mnt/*", "", "a-2"},
		{"exclusive=>1G", "", "a-2"},
		{"exclusive=1G", "", "b"},
		{"exclusive=<1K", "", "a-1 c"},
		{"exclusive=0", "", "c"},
		{"generation=>1", "", "a-2"},
		{"generation=<2 golden=?*", "", "a-1 c"},
		{"created=>2h", "", "a-1 b"},
		{"created=<1d", "", "a-1 a-2 c"},
		{"expires=<1h", "", "a-1"},
		{"expires=>1h", "", "c"},
		{"expires=false", "", "a-2 b"},
		{"pinned=true", "", "b"},
		{"ephemeral=true", "", "a-2"},
		{"overlay=false", "", "a-1 a-2 b"},
		{"name=none", "", ""},
		{"", "exclusive", "c a-1 b a-2"},
		{"", "exclusive:desc", "a-2 b a-1 c"},
		{"", "name:desc", "c b a-2 a-1"},
		{"", "created:asc", "b a-1 a-2 c"},
		{"", "expires", "a-1 c a-2 b"},
		{"", "generation", "b a-1 c a-2"},
		{"name=?-*", "ephemeral:desc", "a-2 a-1"},
	} {
		l, err := Request{Filters: strings.Fields(c.filters), Sort: c.sort}.parse(now)
		if err != nil {
			t.Errorf("%q %q: %v", c.filters, c.sort, err)
			continue
		}
		if got := names(l.choose(someVolumes(now)).Volumes); got != c.want {
			t.Errorf("%q %q: %v, wanted %s", c.filters, c.sort, got, c.want)
		}
	}
}

// names are the names of volumes, separated by blanks.
func names(vols []api.Object) string {
	var out []string
	for _, v := range vols {
		out = append(out, v.Name)
	}
	return strings.Join(out, " ")
}

// TestRefuses: what means nothing is refused, with a hint.
func TestRefuses(t *testing.T) {
	for _, q := range []Request{
		{Filters: []string{"name"}}, {Filters: []string{"colour=red"}}, {Filters: []string{"name=[a"}},
		{Filters: []string{"exclusive=many"}}, {Filters: []string{"exclusive=>>1"}}, {Filters: []string{"exclusive="}},
		{Filters: []string{"generation=1.5"}}, {Filters: []string{"created=2h"}}, {Filters: []string{"created=>old"}},
		{Filters: []string{"ephemeral=maybe"}}, {Filters: []string{"label=?"}},
		{Sort: "colour"}, {Sort: "name:up"}, {Sort: ":desc"}, {Limit: -1},
		{After: "?"}, {After: "e30"}, {After: after(t, "name"), Sort: "name:desc"},
	} {
		if err := q.Check(); !errs.Is(err, errs.Invalid) || errs.HintOf(err) == "" {
			t.Errorf("%+v: %v (hint %q)", q, err, errs.HintOf(err))
		}
	}
}

// after is a place in a list of that order.
func after(t *testing.T, sort string) string {
	t.Helper()
	l, err := Request{Sort: sort, Limit: 1}.parse(time.Now())
	if err != nil {
		t.Fatal(err)
	}
	return l.choose(someVolumes(time.Now())).Next
}

// newPool makes a pool below a directory, which is removed at the end.
func newPool(t testing.TB, driver, below string) *engine.Engine {
	t.Helper()
	return pooltest.New(t, engine.Drivers{plain.Name: plain.Open, reflink.Name: reflink.Open}, driver, below)
}

// bigPool has so many volumes that lists do not measure them, with all that they can be sorted and filtered by.
func bigPool(t *testing.T) *engine.Engine {
	t.Helper()
	e := newPool(t, plain.Name, t.TempDir())
	src := t.TempDir()
	must(t, os.WriteFile(filepath.Join(src, "file"), []byte("content"), 0o600))
	for i := range 3 {
		ctx := principal.With(t.Context(), principal.Principal{UID: uint32(i)})
		_, err := e.Import(ctx, engine.ImportRequest{Name: ref.MustName(fmt.Sprint("g", i)), Source: src})
		must(t, err)
		labels, err := driver.NewLabels("", map[string]string{"of": fmt.Sprint("<", i, ">"), fmt.Sprint("k", i): ""})
		must(t, err)
		q := engine.CloneRequest{From: ref.Ref{Name: fmt.Sprint("g", i)}, Name: ref.MustName(fmt.Sprint("v", 2-i)), Count: 30,
			TTL: time.Duration(i) * time.Hour, Ephemeral: i == 1}
		if i > 0 {
			q.Labels = labels
		}
		_, err = e.Clone(ctx, q)
		must(t, err)
	}

	// Sizes, times and places differ, but not all.
	for i := range 12 {
		v := ref.MustName(fmt.Sprintf("v%d-%d", i%3, 1+i))
		m, err := e.Mount(t.Context(), engine.MountRequest{Volume: v})
		must(t, err)
		must(t, os.WriteFile(filepath.Join(m.Mountpoint, "more"), make([]byte, i/2<<14), 0o600))
		if i%2 == 0 {
			_, err = e.Umount(t.Context(), engine.UmountRequest{Volume: v})
			must(t, err)
		}
		_, err = e.Show(t.Context(), v.Ref())
		must(t, err)
	}
	_, err := e.Rename(t.Context(), engine.RenameRequest{Ref: ref.Ref{Name: "g0"}, Name: ref.MustName("zero")})
	must(t, err)
	_, err = e.Pin(t.Context(), engine.PinRequest{Ref: ref.Ref{Name: "v1-1"}})
	must(t, err)
	return e
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// TestPages: page for page, a list has the same volumes in the same order as in one piece, by every column and with
// every kind of filter, whether the catalogue sorts or this package.
func TestPages(t *testing.T) {
	e := bigPool(t)
	filters := []string{"", "name=v1-*", "name=v2-1?", "name=*-3", "name=v0-7", "golden=zero", "golden=g*", "golden=none",
		"owner=root", "owner=2", "owner=0", "owner=nobody", "label=of=<1>", "label=of=<*", "label=k2", "label=k1=",
		"label=of=<1> label=of=<2>", "label=of label=k1", "state=mounted", "mountpoint=", "expires=true", "expires=<90m",
		"ephemeral=true", "pinned=true", "exclusive=>10K", "created=<1h", "name=v0-* name=v1-2", "fs=native state=idle"}
	orders := []string{""}
	for _, c := range ColumnNames() {
		orders = append(orders, c, c+":desc")
	}
	if few, err := e.MeasuresVolumes(t.Context()); err != nil || few {
		t.Fatalf("the volumes are measured: %v", err)
	}

	passed := map[string]int{}
	for i, order := range orders {
		for j, words := range filters {
			q := Request{Filters: strings.Fields(words), Sort: order}
			whole, err := List(t.Context(), e, q)
			must(t, err)
			q.Limit = 1 + (i+j)%40
			var got []api.Object
			for {
				p, err := List(t.Context(), e, q)
				must(t, err)
				if got = append(got, p.Volumes...); len(p.Volumes) > q.Limit || len(got) > len(whole.Volumes) {
					t.Fatalf("%q %q: %d volumes in a page of %d", order, words, len(p.Volumes), q.Limit)
				}
				if q.After = p.Next; p.Next == "" {
					break
				}
			}
			if names(got) != names(whole.Volumes) {
				t.Errorf("%q %q, %d in a page:\n%s, not\n%s", order, words, q.Limit, names(got), names(whole.Volumes))
			}
			if !reflect.DeepEqual(got, whole.Volumes) && len(got) > 0 {
				t.Errorf("%q %q: %+v, not %+v", order, words, got, whole.Volumes)
			}
			passed[words] = len(got)
		}
	}
	for words, n := range passed {
		if none := words == "golden=none" || words == "owner=nobody"; (n == 0) != none {
			t.Errorf("%d volumes pass %q: that shows nothing", n, words)
		}
	}
}

// TestPagesGoOn: the next page follows the volume that was last, even if it and others are gone by then.
func TestPagesGoOn(t *testing.T) {
	e := bigPool(t)
	for _, order := range []string{"name", "name:desc", "created", "created:desc", "exclusive:desc", "state"} {
		whole, err := List(t.Context(), e, Request{Sort: order})
		must(t, err)
		page, err := List(t.Context(), e, Request{Sort: order, Limit: 20})
		must(t, err)
		var gone []ref.Pattern
		for _, v := range []int{18, 19, 20} {
			gone = append(gone, ref.Pattern{Ref: ref.Ref{Name: whole.Volumes[v].Name}})
			_, err := e.Unpin(t.Context(), gone[len(gone)-1].Ref)
			must(t, err)
		}
		r, err := e.Destroy(t.Context(), engine.DestroyRequest{What: gone})
		must(t, err)
		must(t, errors.Join(r.Failed...))
		next, err := List(t.Context(), e, Request{Sort: order, Limit: 5, After: page.Next})
		must(t, err)
		if names(next.Volumes) != names(whole.Volumes[21:26]) {
			t.Errorf("%s: after %s: %s, not %s", order, names(page.Volumes), names(next.Volumes), names(whole.Volumes[21:26]))
		}
	}
}

// TestFewAreMeasured: in a small pool, the volume that has grown the most is the first of them, though nobody has
// measured it since.
func TestFewAreMeasured(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: mounting needs root: run the tests as root")
	}
	e := newPool(t, reflink.Name, testfs.XFS(t, 512<<20))
	src := t.TempDir()
	must(t, os.WriteFile(filepath.Join(src, "file"), nil, 0o600))
	_, err := e.Import(t.Context(), engine.ImportRequest{Name: ref.MustName("g"), Source: src, SizeBytes: 64 << 20})
	must(t, err)
	vols, err := e.Clone(t.Context(), engine.CloneRequest{From: ref.Ref{Name: "g"}, Name: ref.MustName("v"), Count: 3,
		Mount: true})
	must(t, err)
	f, err := os.Create(filepath.Join(vols[1].Mountpoint, "more"))
	must(t, err)
	defer f.Close()
	_, err = f.Write(make([]byte, 16<<20))
	must(t, errors.Join(err, f.Sync()))

	page, err := List(t.Context(), e, Request{Sort: "exclusive:desc", Limit: 1})
	must(t, err)
	if v := page.Volumes[0]; v.Name != "v-2" || v.ExclusiveBytes < 16<<20 || page.Next == "" {
		t.Errorf("%+v, next %q", v, page.Next)
	}
}
