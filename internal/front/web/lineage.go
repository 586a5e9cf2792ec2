package web

import (
	"cmp"
	"fmt"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"pando/client"
	"pando/internal/base/quantity"
)

// volumesOfGeneration limits how many volumes of a generation are shown in the tree. A link leads to the others.
const volumesOfGeneration = 200

// lineageView is the tree of goldens, generations, volumes and snapshots, and their bytes as areas.
type lineageView struct {
	Golden string // only this one; "": all
	Areas  areas
	Nodes  []node
	Most   int64 // bytes of the largest node
}

// node is a row of the tree.
type node struct {
	Ref, Link, Kind, Note string
	Depth                 int
	Toggle                string // address of the tree with this node opened or closed; "": it has nothing below
	Open                  bool
	Exclusive, Shared     int64
	Mounted               bool
}

// opened are the nodes that are open, by reference.
type opened map[string]struct{}

func openedIn(q url.Values) opened {
	o := opened{}
	for _, list := range q["open"] {
		for _, ref := range strings.Split(list, ",") {
			if ref != "" {
				o[ref] = struct{}{}
			}
		}
	}
	return o
}

// toggle returns the address of the tree with a node opened, or closed if it is open.
func (o opened) toggle(golden, ref string) string {
	var refs []string
	for r := range o {
		if r != ref {
			refs = append(refs, r)
		}
	}
	if _, is := o[ref]; !is {
		refs = append(refs, ref)
	}
	slices.Sort(refs)

	q := url.Values{}
	if golden != "" {
		q.Set("golden", golden)
	}
	if len(refs) > 0 {
		q.Set("open", strings.Join(refs, ","))
	}
	if len(q) == 0 {
		return "/lineage"
	}
	return "/lineage?" + q.Encode()
}

func (w *Web) lineage(v *visit) (name, title string, view any, err error) {
	sums, err := v.lineageSums()
	if err != nil {
		return "", "", nil, err
	}
	l := lineageView{Golden: v.URL.Query().Get("golden")}
	if l.Golden != "" {
		sums = slices.DeleteFunc(sums, func(s lineageSum) bool { return s.Golden != l.Golden })
	}
	l.Areas = areasOf(sums)
	if l.Golden != "" {
		page, err := v.volumePage(url.Values{"golden": {l.Golden}}, mostPage)
		if err != nil {
			return "", "", nil, err
		}
		if page.Next == "" { // else the box of the golden has them all as one
			l.Areas.addVolumes(page.Items)
		}
	}

	t := tree{v: v, view: &l, open: openedIn(v.URL.Query()), sums: sums}
	if l.Golden != "" && len(t.open) == 0 {
		t.open[l.Golden] = struct{}{}
	}
	for _, golden := range t.goldens() {
		if err := t.addGolden(golden); err != nil {
			return "", "", nil, err
		}
	}
	for _, n := range l.Nodes {
		l.Most = max(l.Most, n.Exclusive+n.Shared)
	}
	return "lineage", "Lineage", l, nil
}

// tree builds the rows of the tree: what is closed is not asked for.
type tree struct {
	v    *visit
	view *lineageView
	open opened
	sums []lineageSum
}

// goldens returns the names of goldens, "" for what descends from none at the end.
func (t *tree) goldens() (out []string) {
	for _, s := range t.sums {
		if !slices.Contains(out, s.Golden) {
			out = append(out, s.Golden)
		}
	}
	slices.SortFunc(out, func(a, b string) int {
		if a == "" || b == "" {
			return cmp.Compare(b, a)
		}
		return cmp.Compare(a, b)
	})
	return out
}

// add adds a row, and reports whether it is open.
func (t *tree) add(n node, below bool) bool {
	_, n.Open = t.open[n.Ref]
	if below {
		n.Toggle = t.open.toggle(t.view.Golden, n.Ref)
	}
	t.view.Nodes = append(t.view.Nodes, n)
	return n.Open && below
}

// sum adds up what descends from a golden, or from one generation of it if that is not 0.
func (t *tree) sum(golden string, generation int, kind string) (out lineageSum) {
	for _, s := range t.sums {
		if s.Golden == golden && s.Kind == kind && (generation == 0 || s.Generation == generation) {
			out.Objects += s.Objects
			out.ExclusiveBytes += s.ExclusiveBytes
			out.SharedBytes = max(out.SharedBytes, s.SharedBytes)
		}
	}
	return out
}

func (t *tree) addGolden(golden string) error {
	volumes, snapshots := t.sum(golden, 0, "volume"), t.sum(golden, 0, "snapshot")
	if golden == "" {
		n := node{Ref: "-", Kind: "none", Link: "/volumes", Exclusive: volumes.ExclusiveBytes,
			Note: "without a golden: " + plural(volumes.Objects, "volume")}
		if t.add(n, volumes.Objects > 0) {
			return t.addVolumes("", 0)
		}
		return nil
	}

	generations := t.sum(golden, 0, "generation")
	layers := t.sum(golden, 0, "layer")
	n := node{Ref: golden, Kind: "golden", Link: "/goldens/" + url.PathEscape(golden),
		Exclusive: generations.ExclusiveBytes + layers.ExclusiveBytes + volumes.ExclusiveBytes + snapshots.ExclusiveBytes,
		Shared:    max(generations.SharedBytes, layers.SharedBytes),
		Note: plural(generations.Objects, "generation") + ", " + plural(volumes.Objects, "volume") + ", " +
			plural(snapshots.Objects, "snapshot")}
	if generations.Objects == 0 {
		n.Kind, n.Link, n.Note = "gone", "/volumes?golden="+url.QueryEscape(golden), "removed; "+n.Note
	}
	if !t.add(n, true) {
		return nil
	}

	var numbers []int
	for _, s := range t.sums {
		if s.Golden == golden && !slices.Contains(numbers, s.Generation) {
			numbers = append(numbers, s.Generation)
		}
	}
	slices.Sort(numbers)
	for _, number := range slices.Backward(numbers) {
		if err := t.addGeneration(golden, number); err != nil {
			return err
		}
	}
	return nil
}

func (t *tree) addGeneration(golden string, number int) error {
	own, volumes := t.sum(golden, number, "generation"), t.sum(golden, number, "volume")
	ref := golden + "@" + strconv.Itoa(number)
	n := node{Ref: ref, Kind: "generation", Depth: 1, Link: linkOf(ref), Exclusive: own.ExclusiveBytes,
		Shared: own.SharedBytes, Note: plural(volumes.Objects, "volume") + ", " + quantity.FormatBytes(volumes.ExclusiveBytes) +
			" only in them"}
	if own.Objects == 0 {
		n.Kind, n.Note = "gone", "removed; "+n.Note
	}
	if !t.add(n, volumes.Objects > 0) {
		return nil
	}
	return t.addVolumes(golden, number)
}

// addVolumes adds the volumes of a generation, each below the volume that it was forked from.
func (t *tree) addVolumes(golden string, number int) error {
	q, depth := url.Values{}, 1
	if golden != "" {
		q.Set("golden", golden+"@"+strconv.Itoa(number))
		depth = 2
	}
	page, err := t.v.volumePage(q, mostPage)
	if err != nil {
		return err
	}
	if golden == "" {
		page.Items = slices.DeleteFunc(page.Items, func(o client.Object) bool { return o.Golden != "" })
	}

	// Find the volumes that others were forked from.
	below, known := map[string][]client.Object{}, map[string]struct{}{}
	for _, o := range page.Items {
		known[o.Name] = struct{}{}
	}
	var top []client.Object
	for _, o := range page.Items {
		from, _, _ := strings.Cut(o.Origin, "@")
		if _, ok := known[from]; ok && from != o.Name && from != golden {
			below[from] = append(below[from], o)
			continue
		}
		top = append(top, o)
	}

	// Show the largest if there are too many.
	more := 0
	if len(top) > volumesOfGeneration {
		slices.SortStableFunc(top, func(a, b client.Object) int { return cmp.Compare(b.ExclusiveBytes, a.ExclusiveBytes) })
		more, top = len(top)-volumesOfGeneration, top[:volumesOfGeneration]
	}
	for _, o := range top {
		if err := t.addVolume(o, below, depth); err != nil {
			return err
		}
	}
	if more > 0 || page.Next != "" {
		t.add(node{Ref: fmt.Sprintf("all of %s", q.Get("golden")), Kind: "more", Depth: depth, Link: "/volumes?" +
			url.Values{"golden": q["golden"]}.Encode(), Note: "there are more than fit here"}, false)
	}
	return nil
}

// deepest limits how far forks of forks are indented.
const deepest = 9

func (t *tree) addVolume(o client.Object, below map[string][]client.Object, depth int) error {
	forks := below[o.Name]
	delete(below, o.Name) // origins that lead in a circle, after names were reused, end here
	n := node{Ref: o.Name, Kind: "volume", Depth: min(depth, deepest), Link: linkOf(o.Name), Exclusive: o.ExclusiveBytes,
		Shared: o.SharedBytes, Mounted: o.State == "mounted"}
	if o.Mountpoint != "" {
		n.Note = o.Mountpoint
	}
	if len(forks) > 0 {
		n.Note = strings.TrimPrefix(n.Note+", "+plural(len(forks), "fork"), ", ")
	}

	if t.add(n, true) {
		snapshots, err := t.v.c.Snapshots(t.v.Context(), o.Name)
		if err != nil && !client.IsKind(err, client.NotFound) { // it was just destroyed
			return err
		}
		for _, s := range snapshots {
			t.add(node{Ref: s.Name, Kind: "snapshot", Depth: min(depth+1, deepest), Link: linkOf(o.Name),
				Exclusive: s.ExclusiveBytes, Shared: s.SharedBytes, Note: formatTime(s.CreatedAt)}, false)
		}
	}
	for _, f := range forks {
		if err := t.addVolume(f, below, depth+1); err != nil {
			return err
		}
	}
	return nil
}
