package web

import (
	"net/url"
	"slices"
	"strconv"
	"strings"

	"pando/client"
)

// Lengths of pages of the list of volumes.
const (
	usualPage = 100
	mostPage  = 500
)

// volumeList is the list of volumes. All of it is in its address: filter, page and selection.
type volumeList struct {
	Filter  volumeFilter
	Rows    []volumeRow
	Most    int64  // bytes of the largest on this page, for bars
	Next    string // address of the next page; "": this is the last one
	First   string // address of the first page; "": this is it
	Total   int    // volumes in all, without the filter; -1: unknown
	Actions []action
	Goldens []string // to choose from
	Owners  bool     // some belong to somebody other than root
}

// volumeFilter is what the address says.
type volumeFilter struct {
	Name, Golden, State, After string
	Labels                     []string
	Limit                      int
	selected                   map[string]struct{}
}

// volumeRow is a row of the list.
type volumeRow struct {
	mountedVolume
	Selected bool
	Foreign  bool // the user may not change it
}

func filterIn(q url.Values) volumeFilter {
	f := volumeFilter{Name: q.Get("name"), Golden: q.Get("golden"), State: q.Get("state"), After: q.Get("after"),
		selected: map[string]struct{}{}}
	for _, l := range q["label"] {
		f.Labels = append(f.Labels, strings.Fields(l)...)
	}
	for _, list := range q["select"] {
		for _, name := range strings.Split(list, ",") {
			f.selected[name] = struct{}{}
		}
	}
	f.Limit, _ = strconv.Atoi(q.Get("limit"))
	if f.Limit < 1 || f.Limit > mostPage {
		f.Limit = usualPage
	}
	return f
}

// Label returns the labels as they are written in the form.
func (f volumeFilter) Label() string { return strings.Join(f.Labels, " ") }

// Set reports whether the filter leaves volumes out.
func (f volumeFilter) Set() bool { return f.Name+f.Golden+f.State+f.Label() != "" }

// query returns the query of the API.
func (f volumeFilter) query() url.Values {
	q := url.Values{}
	for key, value := range map[string]string{"name": f.glob(), "golden": f.Golden, "state": f.State, "after": f.After} {
		if value != "" {
			q.Set(key, value)
		}
	}
	if len(f.Labels) > 0 {
		q["label"] = f.Labels
	}
	return q
}

// glob returns the name as a glob: without wildcards, a part of names.
func (f volumeFilter) glob() string {
	if f.Name == "" || strings.ContainsAny(f.Name, "*?[") {
		return f.Name
	}
	return "*" + f.Name + "*"
}

// address returns the address of the page of the list after a name.
func (f volumeFilter) address(after string) string {
	f.After = after
	q := f.query()
	if f.Name != "" {
		q.Set("name", f.Name)
	}
	if f.Limit != usualPage {
		q.Set("limit", strconv.Itoa(f.Limit))
	}
	if len(q) == 0 {
		return "/volumes"
	}
	return "/volumes?" + q.Encode()
}

func (w *Web) volumes(v *visit) (name, title string, view any, err error) {
	l := volumeList{Filter: filterIn(v.URL.Query()), Total: -1, Actions: bulkActions()}
	page, err := v.volumePage(l.Filter.query(), l.Filter.Limit)
	if err != nil {
		return "", "", nil, err
	}
	for _, m := range v.withMounts(page.Items) {
		_, selected := l.Filter.selected[m.Name]
		l.Rows = append(l.Rows, volumeRow{m, selected, v.mayChange(m.Object) != ""})
		l.Most = max(l.Most, m.ExclusiveBytes+m.SharedBytes)
		l.Owners = l.Owners || m.Owner != nil
	}
	if page.Next != "" {
		l.Next = l.Filter.address(page.Next)
	}
	if l.Filter.After != "" {
		l.First = l.Filter.address("")
	}

	// What there is in all, and to choose from.
	sums, err := v.lineageSums()
	if err != nil {
		return "", "", nil, err
	}
	l.Total = totalsOf(sums).Volumes
	for _, s := range sums {
		if s.Golden != "" && !slices.Contains(l.Goldens, s.Golden) {
			l.Goldens = append(l.Goldens, s.Golden)
		}
	}
	title = "Volumes"
	if l.Filter.State == "mounted" {
		title = "Mounted volumes"
	}
	return "volumes", title, l, nil
}

// volumeView is one volume.
type volumeView struct {
	*client.Details
	By        mountedVolume
	Actions   []offer
	Snapshots []snapshotRow
	Most      int64 // bytes of the largest of the volume and its snapshots
	Events    []client.Event
}

// snapshotRow is a snapshot with what may be done with it.
type snapshotRow struct {
	client.Object
	Actions []offer
}

// eventsOfObject is how many events are shown with an object.
const eventsOfObject = 25

func (w *Web) volume(v *visit) (name, title string, view any, err error) {
	d, err := v.c.Volume(v.Context(), v.PathValue("name"))
	if err != nil {
		return "", "", nil, err
	}
	o := volumeView{Details: d, By: v.withMounts([]client.Object{d.Object})[0], Most: d.ExclusiveBytes + d.SharedBytes}
	o.Actions = v.offers(volumeActions, subject{Object: d.Object, details: d})
	for _, s := range d.Snapshots {
		s.Owner = d.Owner
		o.Snapshots = append(o.Snapshots, snapshotRow{s, v.offers(snapshotActions, subject{Object: s, details: d})})
		o.Most = max(o.Most, s.ExclusiveBytes+s.SharedBytes)
	}
	o.Events = v.eventsOf(d.Name)
	return "volume", d.Name, o, nil
}

// eventsOf returns what was done to an object, the newest first. Without a history there is none.
func (v *visit) eventsOf(ref string) []client.Event {
	all, err := v.c.History(v.Context(), client.HistoryFilter{Ref: ref, Limit: eventsOfObject})
	if err != nil {
		return nil
	}
	slices.Reverse(all)
	return all
}

// goldenView is one golden.
type goldenView struct {
	*client.Details
	Actions     []offer
	Generations []generationRow
	Most        int64
	Events      []client.Event
}

// generationRow is a generation with what descends from it.
type generationRow struct {
	client.Object
	Volumes int
	Clones  int64 // bytes that only these volumes have
	Actions []offer
}

func (w *Web) golden(v *visit) (name, title string, view any, err error) {
	d, err := v.c.Golden(v.Context(), v.PathValue("name"))
	if err != nil {
		return "", "", nil, err
	}
	sums, err := v.lineageSums()
	if err != nil {
		return "", "", nil, err
	}
	o := goldenView{Details: d, Actions: v.offers(goldenActions, subject{Object: d.Object, details: d, golden: d.Golden})}
	for _, g := range slices.Backward(d.Generations) {
		row := generationRow{Object: g, Actions: v.offers(generationActions, subject{Object: g, details: d})}
		for _, s := range sums {
			if s.Golden == g.Golden && s.Generation == g.Generation && s.Kind == "volume" {
				row.Volumes, row.Clones = s.Objects, s.ExclusiveBytes
			}
		}
		o.Generations = append(o.Generations, row)
		o.Most = max(o.Most, g.ExclusiveBytes+g.SharedBytes)
	}
	o.Events = v.eventsOf(d.Golden)
	return "golden", d.Golden, o, nil
}
