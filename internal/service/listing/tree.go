package listing

import (
	"pando/internal/api"
	"pando/internal/base/ref"
)

// Node is a golden, a volume or a snapshot, with what was made from it.
type Node struct {
	Golden *api.Golden // nil: Object says what it is
	Object *api.Object // volume or snapshot
	Below  []*Node     // snapshots of a volume, and clones, in the order in which they were given
}

// Rewound returns the name of the snapshot that a volume was rewound to, or "".
func Rewound(v *api.Object) string {
	if r, err := ref.Parse("", v.Origin); err == nil && v.Kind == api.KindVolume && r.Name == v.Name {
		return r.At
	}
	return ""
}

// Tree arranges volumes and snapshots below what they were made from: a snapshot below its volume, a volume below the
// snapshot, volume or golden that it was cloned from. The goldens come first, then volumes whose origin is not among
// these.
func Tree(goldens []api.Golden, objects []api.Object) []*Node {
	var roots []*Node
	nodes := map[string]*Node{}
	for i := range goldens {
		n := &Node{Golden: &goldens[i]}
		nodes[goldens[i].Name] = n
		roots = append(roots, n)
	}
	for i := range objects {
		nodes[objects[i].Ref] = &Node{Object: &objects[i]}
	}

	for i := range objects {
		n := nodes[objects[i].Ref]
		if above := nodes[above(n.Object)]; above != nil {
			above.Below = append(above.Below, n)
		} else {
			roots = append(roots, n)
		}
	}
	return roots
}

// above is what an object stands below, as a reference to a volume or snapshot, or the name of a golden; "": nothing.
func above(o *api.Object) string {
	origin, err := ref.Parse("", o.Origin)
	_, numbered := origin.Generation()
	switch {
	case o.Kind == api.KindSnapshot:
		return o.Volume
	case err != nil:
		return ""
	case Rewound(o) != "":
		return o.Golden
	case numbered && origin.Name == o.Golden:
		return o.Golden // the generation itself may have been removed
	case o.OriginRemoved:
		return "" // the name may be that of another volume by now
	}
	return origin.String()
}
