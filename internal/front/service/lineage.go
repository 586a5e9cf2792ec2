package service

import (
	"context"

	"pando/internal/engine"
)

// Lineage adds up objects by the generation that they descend from.
type Lineage struct {
	Items []engine.LineageSum `json:"items" nullable:"false"`
}

// RemainsList lists what still takes space although it was destroyed.
type RemainsList struct {
	Items []engine.Remains `json:"items" nullable:"false"`
}

func (s *Service) addLineageRoutes() {
	add(s, route{id: "show-lineage", access: reads, method: "GET", path: "/v1/lineage", tag: "pool",
		summary: "Add up volumes and snapshots by the generation that they descend from",
		about:   "Bytes are those that were last measured."},
		func(ctx context.Context, _ *struct{}) (*struct{ Body Lineage }, error) {
			sums, err := s.e.Lineage(ctx)
			return &struct{ Body Lineage }{Lineage{append([]engine.LineageSum{}, sums...)}}, err
		})

	add(s, route{id: "list-remains", access: rootOnly, method: "GET", path: "/v1/remains", tag: "pool",
		summary: "List what still takes space although it was destroyed, and why, the largest first"},
		func(ctx context.Context, _ *struct{}) (*struct{ Body RemainsList }, error) {
			all, err := s.e.Remains(ctx)
			return &struct{ Body RemainsList }{RemainsList{append([]engine.Remains{}, all...)}}, err
		})
}
