package web

import (
	"net/url"
	"time"

	"pando/client"
)

// remains is a destroyed object that still takes space.
type remains struct {
	Ref   string     `json:"ref"`
	Kind  string     `json:"kind"`
	Bytes int64      `json:"bytes"`
	At    *time.Time `json:"destroyed_at"`
	Why   []string   `json:"why"`
}

// mostRemains limits how many of them are shown.
const mostRemains = 12

// overview is the first page.
type overview struct {
	Pool    *client.Pool
	Chart   chart // of space
	Remains []remains
	Bytes   int64  // of all remains
	More    int    // remains that are not shown
	NotRoot string // why remains are not shown
	Running []client.Operation
	Mounted []mountedVolume
	MoreOf  bool // there are more mounted ones
	Areas   areas
	Totals  totals
}

// mountedOnOverview limits how many mounted volumes are on the first page.
const mountedOnOverview = 10

func (w *Web) overview(v *visit) (name, title string, view any, err error) {
	o := overview{NotRoot: v.rootOnly()}
	if o.Pool, err = v.c.Pool(v.Context()); err != nil {
		return "", "", nil, err
	}
	space, err := ask[items[spacePoint]](v, "/v1/pool/space", nil)
	if err != nil {
		return "", "", nil, err
	}
	o.Chart = chartOf(space.Items)

	// What descends from what.
	sums, err := v.lineageSums()
	if err != nil {
		return "", "", nil, err
	}
	o.Areas, o.Totals = areasOf(sums), totalsOf(sums)
	if v.who.AllRights {
		o.Areas.addOther(o.Pool.UsedBytes)
	}

	// What is mounted, and by whom.
	page, err := v.volumePage(url.Values{"state": {"mounted"}}, mountedOnOverview)
	if err != nil {
		return "", "", nil, err
	}
	o.Mounted, o.MoreOf = v.withMounts(page.Items), page.Next != ""

	// What runs, and what holds deleted bytes.
	all, err := v.c.Operations(v.Context())
	if err != nil {
		return "", "", nil, err
	}
	for _, op := range all {
		if op.Running() {
			o.Running = append(o.Running, op)
		}
	}
	if o.NotRoot == "" {
		err = o.addRemains(v)
	}
	return "overview", "Overview", o, err
}

func (o *overview) addRemains(v *visit) error {
	all, err := ask[items[remains]](v, "/v1/remains", nil)
	if err != nil {
		return err
	}
	for _, r := range all.Items {
		o.Bytes += r.Bytes
	}
	o.Remains = all.Items[:min(len(all.Items), mostRemains)]
	o.More = len(all.Items) - len(o.Remains)
	return nil
}

// totals are numbers of objects.
type totals struct {
	Volumes, Snapshots, Generations int
	Exclusive                       int64 // of volumes and snapshots
}

func totalsOf(sums []lineageSum) (t totals) {
	for _, s := range sums {
		switch s.Kind {
		case "volume":
			t.Volumes += s.Objects
			t.Exclusive += s.ExclusiveBytes
		case "snapshot":
			t.Snapshots += s.Objects
			t.Exclusive += s.ExclusiveBytes
		case "generation":
			t.Generations += s.Objects
		}
	}
	return t
}

// mountedVolume is a volume with who mounted it.
type mountedVolume struct {
	client.Object
	By string     // "": unknown
	At *time.Time // when it was mounted; nil: unknown
}

// eventsRead is how far back the history is read to find who mounted a volume.
const eventsRead = 5000

// withMounts adds who mounted volumes, as far as the history knows.
func (v *visit) withMounts(volumes []client.Object) []mountedVolume {
	out := make([]mountedVolume, len(volumes))
	byID := map[string]*mountedVolume{}
	for i, o := range volumes {
		out[i].Object = o
		if o.State == "mounted" {
			byID[o.ID] = &out[i]
		}
	}
	if len(byID) == 0 {
		return out
	}

	events, err := v.c.History(v.Context(), client.HistoryFilter{Limit: eventsRead})
	if err != nil {
		return out // who mounted them is then unknown, and all else is there
	}
	for _, e := range events {
		if m := byID[e.ObjectID]; m != nil && e.Verb == "mount" {
			m.By, m.At = byWhom(e), &e.Time
		}
	}
	return out
}
