package cli

import (
	"strings"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/engine"
)

// lsVolumes are volumes to select from.
func lsVolumes(now time.Time) []engine.Info {
	soon, late := now.Add(30*time.Minute), now.Add(48*time.Hour)
	return []engine.Info{
		{Name: "a-1", State: "idle", Origin: "web@1", Golden: "web", Generation: 1, CreatedAt: now.Add(-3 * time.Hour),
			ExclusiveBytes: 10, ExpiresAt: &soon},
		{Name: "a-2", State: "mounted", Origin: "web@2", Golden: "web", Generation: 2, CreatedAt: now.Add(-time.Hour),
			ExclusiveBytes: 3 << 30, Mountpoint: "/mnt/a-2", Ephemeral: true},
		{Name: "b", State: "mounted", CreatedAt: now.Add(-50 * time.Hour), ExclusiveBytes: 1 << 30, PinnedUntil: &late,
			Mountpoint: "/srv/b"},
		{Name: "c", State: "idle", Origin: "db@1", Golden: "db", Generation: 1, CreatedAt: now.Add(-2 * time.Minute),
			ExpiresAt: &late, Overlay: true},
	}
}

// TestLsSelection: filters, orders and columns.
func TestLsSelection(t *testing.T) {
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
		s := lsSelection{filters: strings.Fields(c.filters), sort: c.sort}
		view, err := s.parse(now)
		if err != nil {
			t.Errorf("%q %q: %v", c.filters, c.sort, err)
			continue
		}
		var got []string
		for _, v := range view.apply(lsVolumes(now)) {
			got = append(got, v.Name)
		}
		if strings.Join(got, " ") != c.want {
			t.Errorf("%q %q: %v, wanted %s", c.filters, c.sort, got, c.want)
		}
	}
}

// TestLsSelectionRefuses: what means nothing is refused, with a hint.
func TestLsSelectionRefuses(t *testing.T) {
	for _, s := range []lsSelection{
		{filters: []string{"name"}}, {filters: []string{"colour=red"}}, {filters: []string{"name=[a"}},
		{filters: []string{"exclusive=many"}}, {filters: []string{"exclusive=>>1"}}, {filters: []string{"exclusive="}},
		{filters: []string{"generation=1.5"}}, {filters: []string{"created=2h"}}, {filters: []string{"created=>old"}},
		{filters: []string{"ephemeral=maybe"}}, {sort: "colour"}, {sort: "name:up"}, {sort: ":desc"},
		{columns: []string{}}, {columns: []string{"name", ""}}, {columns: []string{"colour"}},
	} {
		if _, err := s.parse(time.Now()); !errs.Is(err, errs.Invalid) || hintOf(err) == "" {
			t.Errorf("%+v: %v (hint %q)", s, err, hintOf(err))
		}
	}
}

// TestLsColumns: the default columns come first, and all columns have cells.
func TestLsColumns(t *testing.T) {
	if got := strings.Join(columnNames()[:defaultColumns], " "); got !=
		"name origin fs state logical exclusive shared created mountpoint" {
		t.Errorf("default columns: %s", got)
	}
	v := lsVolumes(time.Now())[1]
	for _, c := range lsColumns() {
		if c.cell(&v) == "" {
			t.Errorf("%s is empty", c.name)
		}
	}
}
