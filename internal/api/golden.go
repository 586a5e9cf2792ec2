package api

import (
	"encoding/json"

	"pando/internal/driver"
)

// Golden is a golden with its generations.
type Golden struct {
	Ref  string `json:"ref"`  // name of the golden
	Kind Kind   `json:"kind"` // golden
	Name string `json:"name"` // name of the golden
	// Current is the current generation, which clones are made of.
	Current         Detail `json:"current" is:"generation"`
	GenerationCount int    `json:"generation_count"` // number of generations that exist
	VolumeCount     int    `json:"volume_count"`     // number of volumes that were cloned from them
	Keep            int    `json:"keep,omitempty"`   // number of generations that stay; absent: all
	OverlayPolicy   string `json:"overlay_policy"`   // whether clones are overlays: never, allowed, default
	// Source is what a refresh makes new generations from.
	Source   json.RawMessage `json:"source,omitempty"`
	Labels   driver.Labels   `json:"labels"`    // labels of the golden
	OwnerUID uint32          `json:"owner_uid"` // user ID of the owner
	// Generations are the generations, the oldest first, if the golden is shown.
	Generations []Object `json:"generations,omitzero" is:"generation"`
}
