package engine

import (
	"cmp"
	"context"
	"slices"
	"time"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
)

// LineageSum adds up the objects of one kind that descend from one generation.
type LineageSum = catalog.LineageSum

// Lineage adds up what the scope admits by the generation that it descends from, as last measured. It reads every
// object once. Goldens that the scope does not admit are in it, if volumes that it admits descend from them.
func (e *Engine) Lineage(ctx context.Context) (out []LineageSum, err error) {
	err = e.cat.View(ctx, func(tx *catalog.Tx) error {
		out, err = tx.Lineage()
		return err
	})
	return out, err
}

// Remains is a destroyed object that still takes space.
type Remains struct {
	Ref   string         `json:"ref"`
	Kind  string         `json:"kind"`  // trash: to be removed; tie: others need its blocks
	Bytes int64          `json:"bytes"` // that will return; of trash: as last measured
	At    *time.Time     `json:"destroyed_at,omitempty"`
	Why   []errs.Message `json:"why"` // it still takes space
}

// holdersAsked limits for how many destroyed objects Remains looks for processes that use them.
const holdersAsked = 20

// Remains lists what still takes space although it was destroyed, and why, the largest first. It changes nothing. The
// cost depends on the number of all objects only if the driver has ties.
func (e *Engine) Remains(ctx context.Context) ([]Remains, error) {
	var tombstones []catalog.Tombstone
	var u *uses
	_, tied := e.drv.(driver.Tied)
	if err := e.cat.View(ctx, func(tx *catalog.Tx) (err error) {
		if tombstones, err = tx.Unreclaimed(0); err != nil || !tied {
			return err
		}
		u, err = e.readUses(tx)
		return err
	}); err != nil {
		return nil, err
	}

	// What is to be removed, with who prevents that.
	slices.SortStableFunc(tombstones, func(a, b catalog.Tombstone) int { return cmp.Compare(b.Bytes, a.Bytes) })
	out := []Remains{}
	for i, g := range tombstones {
		why := errs.Message("the driver could not remove it yet: the next command tries again")
		if i < holdersAsked {
			if who := e.content.MountHolders(ctx, g.ID); who != "" {
				why = errs.Messagef("%s", who)
			}
		}
		out = append(out, Remains{Ref: g.Ref, Kind: "trash", Bytes: g.Bytes, At: &g.At, Why: []errs.Message{why}})
	}
	if !tied {
		return out, nil
	}

	// What others need.
	ties, err := e.keptTies(ctx, u)
	for _, k := range ties {
		out = append(out, Remains{Ref: k.Ref, Kind: k.Kind, Bytes: k.Bytes, Why: k.Why})
	}
	slices.SortStableFunc(out, func(a, b Remains) int { return cmp.Compare(b.Bytes, a.Bytes) })
	return out, err
}
