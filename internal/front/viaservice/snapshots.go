package viaservice

import (
	"context"
	"net/http"

	"pando/client"
	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/engine"
)

// withoutHooks refuses commands around a snapshot: the service runs none. Unsupported.
func withoutHooks(volume string, h engine.SnapshotHooks) error {
	if h.Before == "" && h.After == "" {
		return nil
	}
	return errs.New(errs.Unsupported, "snapshot", volume, "the service runs no commands").
		WithHint("remove %s and %s, and run the commands around this one", errs.Param("before"), errs.Param("after"))
}

// Snapshot is as that of the engine, without hooks.
func (p *Pool) Snapshot(ctx context.Context, q engine.SnapshotRequest) (engine.Info, error) {
	if err := withoutHooks(q.Volume.String(), q.Hooks); err != nil {
		return engine.Info{}, err
	}
	return making[engine.Info](ctx, p, request{method: http.MethodPost,
		path: []string{"volumes", q.Volume.String(), "snapshots"},
		body: client.SnapshotRequest{Name: q.Name.String(), Labels: q.Labels.Map(), Freeze: freezes[q.Freeze]}})
}

// SnapshotGroup is as that of the engine, without hooks.
func (p *Pool) SnapshotGroup(ctx context.Context, q engine.SnapshotGroupRequest) (engine.SnapshotGroup, error) {
	body := struct {
		client.SnapshotRequest
		Volumes []string `json:"volumes"`
	}{client.SnapshotRequest{Name: q.Name.String(), Labels: q.Labels.Map(), Freeze: freezes[q.Freeze]}, nil}
	for _, v := range q.Volumes {
		if err := withoutHooks(v.String(), q.Hooks); err != nil {
			return engine.SnapshotGroup{}, err
		}
		body.Volumes = append(body.Volumes, v.String())
	}
	return making[engine.SnapshotGroup](ctx, p, request{method: http.MethodPost, path: []string{"snapshot-groups"},
		body: body})
}

// Rewind is as that of the engine.
func (p *Pool) Rewind(ctx context.Context, q engine.RewindRequest) (engine.Rewound, error) {
	return change[engine.Rewound](ctx, p, request{method: http.MethodPost,
		path: []string{"volumes", q.Volume.String(), "rewind"},
		body: map[string]any{"snapshot": q.Snapshot.String(), "detach": q.Detach}})
}

// SnapshotNames is as that of the engine.
func (p *Pool) SnapshotNames(ctx context.Context, volume ref.Name) ([]string, error) {
	all, err := list[engine.Info](ctx, p, "volumes", volume.String(), "snapshots")
	var names []string
	for _, s := range all {
		if r, err := ref.Parse("", s.Name); err == nil {
			names = append(names, r.At)
		}
	}
	return names, err
}
