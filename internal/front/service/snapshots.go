package service

import (
	"context"
	"net/http"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine"
)

// SnapshotRequest says how to snapshot a volume.
type SnapshotRequest struct {
	Name   string            `json:"name,omitempty" doc:"Name of the snapshot (default: the time, in UTC)"`
	Labels map[string]string `json:"labels,omitempty"`
	Freeze string            `json:"freeze,omitempty" enum:"if_needed,always,never" doc:"Stop writes to a volume in use"`
}

// SnapshotGroupRequest says which volumes to snapshot at one point in time.
type SnapshotGroupRequest struct {
	SnapshotRequest
	Volumes []string `json:"volumes" minItems:"1" maxItems:"1000"`
}

// SnapshotGroup has snapshots of several volumes at one point in time.
type SnapshotGroup struct {
	engine.SnapshotGroup
	Warnings []errs.Message `json:"warnings,omitempty"`
}

// groupAnswer is the answer with a group. The status is 200 if the request repeats one.
type groupAnswer struct {
	Status int
	Body   SnapshotGroup
}

// SnapshotList lists snapshots.
type SnapshotList struct {
	Items []engine.Info `json:"items" nullable:"false"`
}

// InSnapshot names a snapshot in the path of a request.
type InSnapshot struct {
	InVolume
	Snapshot string `path:"snapshot" doc:"Name of a snapshot of the volume"`
}

func (i InSnapshot) ref(op string) (ref.Ref, error) {
	volume, err := i.name(op)
	if err != nil {
		return ref.Ref{}, err
	}
	snapshot, err := ref.ParseName(op, i.Snapshot)
	return volume.At(snapshot), err
}

func (s *Service) addSnapshotRoutes() {
	add(s, route{id: "list-snapshots", access: reads, method: "GET", path: "/v1/volumes/{volume}/snapshots",
		tag:     "snapshots",
		summary: "List the snapshots of a volume, the oldest first"},
		func(ctx context.Context, in *InVolume) (*struct{ Body SnapshotList }, error) {
			name, err := in.name("show")
			if err != nil {
				return nil, err
			}
			d, err := s.e.Show(ctx, name.Ref())
			if err == nil && d.Kind != string(driver.Volume) {
				err = notA(in.Volume, "volume", "golden show")
			}
			return &struct{ Body SnapshotList }{SnapshotList{append([]engine.Info{}, d.Snapshots...)}}, err
		})

	add(s, route{id: "create-snapshot", access: changes, method: "POST", path: "/v1/volumes/{volume}/snapshots",
		tag:    "snapshots",
		status: http.StatusCreated, summary: "Take a snapshot of a volume, which may be in use",
		about: "Answers 200 instead of 201 if the request repeats one with the same Idempotency-Key."}, s.snapshot)

	add(s, route{id: "show-snapshot", access: reads, method: "GET", path: "/v1/volumes/{volume}/snapshots/{snapshot}",
		tag:     "snapshots",
		summary: "Show a snapshot, measured now"},
		func(ctx context.Context, in *InSnapshot) (*detailsAnswer, error) {
			r, err := in.ref("show")
			if err != nil {
				return nil, err
			}
			return s.show(ctx, r)
		})

	add(s, route{id: "destroy-snapshot", access: changes, method: "DELETE",
		path: "/v1/volumes/{volume}/snapshots/{snapshot}",
		tag:  "snapshots", status: http.StatusNoContent, summary: "Destroy a snapshot"},
		func(ctx context.Context, in *struct {
			InSnapshot
			Condition
			Same
		}) (*noContent, error) {
			r, err := in.ref("destroy")
			if err != nil {
				return nil, err
			}
			return &noContent{}, only(s.e.Destroy(in.in(ctx), in.destroy(r)))
		})

	add(s, route{id: "create-snapshot-group", access: changes, method: "POST", path: "/v1/snapshot-groups",
		tag:    "snapshots",
		status: http.StatusCreated, summary: "Take snapshots of several volumes at one point in time"}, s.snapshotGroup)
}

func (s *Service) snapshot(ctx context.Context, in *struct {
	InVolume
	Repeatable
	Body *SnapshotRequest
}) (*createdAnswer, error) {
	const op = "snapshot"
	var body SnapshotRequest
	if in.Body != nil {
		body = *in.Body
	}

	q := engine.SnapshotRequest{Freeze: freezes[body.Freeze]}
	var err error
	if q.Volume, err = in.name(op); err != nil {
		return nil, err
	}
	if q.Name, err = optionalName(op, body.Name); err != nil {
		return nil, err
	}
	if q.Labels, err = driver.NewLabels(op, body.Labels); err != nil {
		return nil, err
	}
	return s.make(ctx, in.Repeatable, "snapshot "+in.Volume, body, func(ctx context.Context) ([]engine.Info, error) {
		i, err := s.e.Snapshot(ctx, q)
		return []engine.Info{i}, err
	})
}

func (s *Service) snapshotGroup(ctx context.Context, in *struct {
	Repeatable
	Body SnapshotGroupRequest
}) (*groupAnswer, error) {
	const op = "snapshot"
	q := engine.SnapshotGroupRequest{Freeze: freezes[in.Body.Freeze]}
	for _, v := range in.Body.Volumes {
		name, err := ref.ParseName(op, v)
		if err != nil {
			return nil, err
		}
		q.Volumes = append(q.Volumes, name)
	}
	var err error
	if q.Name, err = optionalName(op, in.Body.Name); err != nil {
		return nil, err
	}
	if q.Labels, err = driver.NewLabels(op, in.Body.Labels); err != nil {
		return nil, err
	}

	var out engine.SnapshotGroup
	made, repeated, err := s.makeOnce(ctx, in.Repeatable, "snapshot group", in.Body,
		func(ctx context.Context) (_ []engine.Info, err error) {
			out, err = s.e.SnapshotGroup(ctx, q)
			return out.Snapshots, err
		})
	if err != nil {
		return nil, err
	}
	answer := &groupAnswer{Status: http.StatusCreated}
	if repeated {
		answer.Status = http.StatusOK
		out = engine.SnapshotGroup{Snapshots: made}
		if r, err := ref.Parse(op, made[0].Name); err == nil {
			out.Name = r.At
		}
	}
	answer.Body = SnapshotGroup{out, warned(ctx)}
	return answer, nil
}
