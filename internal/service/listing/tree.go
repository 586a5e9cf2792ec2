package listing

import (
	"pando/internal/api"
	"pando/internal/base/ref"
)

// ByOrigin groups volumes by the name of their origin, without @: "" for those whose origin no longer exists.
func ByOrigin(goldens []api.Golden, vols []api.Object) map[string][]api.Object {
	below := map[string][]api.Object{}
	known := map[string]bool{}
	for _, g := range goldens {
		known[g.Name] = true
	}

	for _, v := range vols {
		known[v.Name] = true
	}

	for _, v := range vols {
		name := ""
		if r, err := ref.Parse("", v.Origin); err == nil {
			name = r.Name
		}
		if !known[name] || name == v.Name {
			name = ""
		}
		below[name] = append(below[name], v)
	}

	return below
}
