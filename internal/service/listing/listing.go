// Package listing chooses volumes for a list: by filters, in an order, a page at a time.
package listing

import (
	"cmp"
	"context"
	"encoding/base64"
	"encoding/json"
	"slices"
	"strconv"
	"strings"
	"time"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/engine"
)

const op = "ls"

// Request says which volumes to list, and how.
type Request struct {
	Filters []string // KEY=VALUE, where KEY is a column or "label": one of each key, and of each key of a label, must hold
	Sort    string   // column, with :desc in descending order; "": name. Volumes that are equal are in order of name
	Limit   int      // most volumes in a page; 0: all
	After   string   // Next of the page before; "": the first page
	Exact   bool     // whether every volume is measured now: see engine.VolumesRequest

	Snapshots bool     // whether the snapshots of the volumes are listed, too
	Only      []string // references to the volumes and snapshots that may be listed; nil: all
}

// Page is a part of a list, or all of it.
type Page struct {
	Volumes []api.Object
	Next    string // After of the request for the next page; "": there is none
}

// List lists volumes. A page goes on behind the last volume of the page before, whatever was made, renamed or destroyed
// since. With many volumes, a page in order of name or creation costs what is read for it. Invalid.
func List(ctx context.Context, e *engine.Engine, q Request) (Page, error) {
	l, err := q.parse(time.Now())
	if err != nil {
		return Page{}, err
	}

	// Measured figures change the order, and some orders only lists of all volumes have.
	few, err := e.MeasuresVolumes(ctx)
	if err != nil {
		return Page{}, err
	}
	if few || q.Exact || q.Limit == 0 || l.by.order == "" || q.Snapshots || q.Only != nil {
		all, err := e.Volumes(ctx, engine.VolumesRequest{Exact: q.Exact, Snapshots: q.Snapshots})
		if err != nil {
			return Page{}, err
		}
		return l.choose(all), nil
	}

	var out []api.Object
	if err := e.ScanVolumes(ctx, l.scan(), func(v api.Object) bool {
		if l.filters.pass(&v) {
			out = append(out, v)
		}
		return len(out) <= q.Limit
	}); err != nil {
		return Page{}, err
	}
	return l.page(out), nil
}

// list is a request that was checked.
type list struct {
	filters filters
	by      Column
	desc    bool
	limit   int
	only    map[string]bool // nil: all
	mixed   bool            // snapshots are between the volumes
	after   *place          // nil: from the beginning
}

// place is a place in a list: that of a volume.
type place struct {
	Sort string `json:"s"` // order of the list, as in Request, where it is given to callers
	Key  key    `json:"k"`
	Name string `json:"v"`
}

// placeOf returns the place of a volume in the list.
func (l *list) placeOf(v *api.Object) place { return place{Key: l.by.keyOf(v), Name: v.Ref} }

// compare compares two places.
func (l *list) compare(a, b place) int {
	order := cmp.Or(cmp.Compare(a.Key.Number, b.Key.Number), compareRefs(a.Key.Text, b.Key.Text))
	if l.desc {
		order = -order
	}
	return cmp.Or(order, compareRefs(a.Name, b.Name))
}

// parse checks a request. Invalid.
// compareRefs orders texts so that the snapshots of a volume stand behind it and before all other volumes.
func compareRefs(a, b string) int {
	a, afterA, _ := strings.Cut(a, "@")
	b, afterB, _ := strings.Cut(b, "@")
	return cmp.Or(strings.Compare(a, b), strings.Compare(afterA, afterB))
}

func (q Request) parse(now time.Time) (l *list, err error) {
	l = &list{limit: q.Limit, mixed: q.Snapshots}
	if q.Only != nil {
		l.only = map[string]bool{}
		for _, r := range q.Only {
			l.only[r] = true
		}
	}
	if l.filters, err = parseFilters(q.Filters, now); err != nil {
		return nil, err
	}

	name, order, _ := strings.Cut(q.Sort, ":")
	if q.Sort == "" {
		name = "name"
	}
	if l.by, err = FindColumn(q.Sort, name); err != nil {
		return nil, err
	}
	if l.desc = order == "desc"; order != "" && order != "desc" && order != "asc" {
		return nil, errs.New(errs.Invalid, op, q.Sort, "unknown order %q", order).
			WithHint("use %s or %s", errs.Param("sort", l.by.Name), errs.Param("sort", l.by.Name+":desc"))
	}

	if q.Limit < 0 {
		return nil, errs.New(errs.Invalid, op, strconv.Itoa(q.Limit), "a list cannot have less than 0 volumes").
			WithHint("use a larger %s, or 0 for all", errs.Param("limit"))
	}
	if q.After == "" {
		return l, nil
	}

	l.after = &place{}
	text, err := base64.RawURLEncoding.DecodeString(q.After)
	if err == nil {
		err = json.Unmarshal(text, l.after)
	}
	if err != nil || l.after.Sort != l.sort() {
		return nil, errs.New(errs.Invalid, op, q.After, "this is no place in such a list").
			WithHint("use what the page before says, with the same order")
	}
	return l, nil
}

// Check checks a request before anything is done. Invalid.
func (q Request) Check() error {
	_, err := q.parse(time.Now())
	return err
}

// sort is the order, with one word for each.
func (l *list) sort() string {
	if l.desc {
		return l.by.Name + ":desc"
	}
	return l.by.Name
}

// scan is what the catalogue reads for the list.
func (l *list) scan() engine.VolumeScan {
	q := engine.VolumeScan{By: l.by.order, Desc: l.desc}
	if a := l.after; a != nil {
		q.After = &engine.VolumePlace{Key: a.Key.Number, Name: a.Name}
	}
	l.filters.narrow(&q)
	return q
}

// choose returns the page of a list of all volumes, which are in order of name.
func (l *list) choose(all []api.Object) Page {
	out := slices.DeleteFunc(all, func(v api.Object) bool {
		return l.only != nil && !l.only[v.Ref] || !l.filters.pass(&v)
	})
	if l.by.order != engine.ByName || l.desc || l.mixed {
		slices.SortFunc(out, func(a, b api.Object) int { return l.compare(l.placeOf(&a), l.placeOf(&b)) })
	}
	if l.after != nil {
		out = slices.DeleteFunc(out, func(v api.Object) bool { return l.compare(l.placeOf(&v), *l.after) <= 0 })
	}
	return l.page(out)
}

// page returns the first volumes of what is left of a list.
func (l *list) page(left []api.Object) Page {
	if l.limit == 0 || len(left) <= l.limit {
		return Page{Volumes: left}
	}
	left = left[:l.limit]
	last := l.placeOf(&left[l.limit-1])
	last.Sort = l.sort()
	text, _ := json.Marshal(last) // numbers and strings
	return Page{Volumes: left, Next: base64.RawURLEncoding.EncodeToString(text)}
}
