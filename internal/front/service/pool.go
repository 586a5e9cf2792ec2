package service

import (
	"context"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine"
	"pando/internal/engine/check"
	"pando/internal/observe/doctor"
)

// Status is what the service says about itself.
type Status struct {
	Version   string    `json:"version"`
	Pool      string    `json:"pool" doc:"Directory of the pool"`
	PoolID    string    `json:"pool_id"`
	Driver    string    `json:"driver"`
	StartedAt time.Time `json:"started_at"`
	Caller    string    `json:"caller" doc:"Who sent this request"`
	AllRights bool      `json:"all_rights" doc:"The caller may do everything, as root may"`
	Running   int       `json:"running_operations"`
	Tasks     []Task    `json:"tasks" nullable:"false" doc:"What the service does by itself"`
}

// PruneRequest says what may be removed.
type PruneRequest struct {
	KeepFreePercent  float64  `json:"keep_free_percent,omitempty" minimum:"0" maximum:"100" doc:"Stop when this is free"`
	OlderThanSeconds float64  `json:"older_than_seconds,omitempty" minimum:"0" maximum:"3e9" doc:"Only what is older"`
	IdleSeconds      float64  `json:"idle_seconds,omitempty" minimum:"0" maximum:"3e9" doc:"Only what is idle longer"`
	Labels           []string `json:"labels,omitempty" doc:"Only what has these labels: KEY or KEY=VALUE"`
	DryRun           bool     `json:"dry_run,omitempty" doc:"Only report what would be removed"`
}

// GCRequest says how the pool is cleaned up.
type GCRequest struct {
	Explain bool `json:"explain,omitempty" doc:"Also report what is kept, and why"`
}

// FsckRequest says what is checked.
type FsckRequest struct {
	Refs   []string `json:"refs,omitempty" doc:"Objects to check (default: all)"`
	Repair bool     `json:"repair,omitempty" doc:"Repair what is found"`
}

// DoctorRequest says which checks of the host run.
type DoctorRequest struct {
	Only  []string `json:"only,omitempty" doc:"Names of checks (default: all)"`
	Limit float64  `json:"limit_seconds,omitempty" minimum:"0" maximum:"86400" doc:"Of each check (default: 20)"`
}

func (s *Service) addServiceRoutes() {
	add(s, route{id: "show-service", access: anyUser, method: "GET", path: "/v1/service", tag: "service",
		summary: "Show the service, its pool, and who asks"},
		func(ctx context.Context, _ *struct{}) (*struct{ Body Status }, error) {
			caller := callerOf(ctx)
			out := Status{Version: s.Version, Pool: s.e.Dir(), PoolID: s.e.PoolID(), Driver: s.e.Caps().Name,
				StartedAt: s.startedAt, Caller: caller.String(), AllRights: caller.trusted(), Tasks: []Task{}}
			if grantOf(ctx) == nil {
				out.Tasks = s.describeTasks()
			}
			s.operations.mu.Lock()
			out.Running = s.operations.countRunning(&caller)
			s.operations.mu.Unlock()
			return &struct{ Body Status }{out}, nil
		})
}

func (s *Service) addPoolRoutes() {
	add(s, route{id: "show-pool", access: anyUser, method: "GET", path: "/v1/pool",
		tag: "pool", summary: "Show the pool and its space"},
		func(ctx context.Context, in *struct {
			Exact bool `query:"exact" doc:"Measure every object now, which takes long"`
		}) (*struct{ Body engine.PoolInfo }, error) {
			if grantOf(ctx) != nil && in.Exact {
				return nil, permission("show pool", "", "only root may have everything measured").
					WithHint("remove %s", errs.Param("exact"))
			}
			p, err := s.e.Pool(ctx, in.Exact)
			if grantOf(ctx) != nil {
				p = spaceOf(p)
			}
			return &struct{ Body engine.PoolInfo }{p}, err
		})

	add(s, route{id: "prune", access: rootOnly, method: "POST", path: "/v1/prune", tag: "pool", status: accepted,
		summary: "Remove volumes and generations that are no longer needed"}, s.prune)

	add(s, route{id: "gc", access: rootOnly, method: "POST", path: "/v1/gc", tag: "pool", status: accepted,
		summary: "Remove what is left of destroyed objects and interrupted operations"},
		func(ctx context.Context, in *struct{ Body *GCRequest }) (*operationAnswer, error) {
			explain := in.Body != nil && in.Body.Explain
			return s.start(ctx, "gc", "", func(ctx context.Context, _ *progress.Tracker) (any, error) {
				return s.e.GC(ctx, explain)
			})
		})

	add(s, route{id: "fsck", access: rootOnly, method: "POST", path: "/v1/fsck", tag: "pool", status: accepted,
		summary: "Check the pool, its catalogue, and the filesystems in images",
		about:   "An operation that has found problems is done; ok in its result is then false."}, s.fsck)

	add(s, route{id: "doctor", access: rootOnly, method: "POST", path: "/v1/doctor", tag: "pool", status: accepted,
		summary: "Find causes of data loss, leaks and slow storage on the host"},
		func(ctx context.Context, in *struct{ Body *DoctorRequest }) (*operationAnswer, error) {
			q := doctor.HostRequest{}
			if in.Body != nil {
				q.Only, q.PatienceEach = in.Body.Only, seconds(in.Body.Limit)
			}
			return s.start(ctx, "doctor", "", func(ctx context.Context, t *progress.Tracker) (any, error) {
				q.Tracker = t
				return s.examine(ctx, q)
			})
		})
}

// spaceOf returns what users learn about the pool: how much space it has.
func spaceOf(p engine.PoolInfo) engine.PoolInfo {
	return engine.PoolInfo{Driver: p.Driver, CloneCost: p.CloneCost, TotalBytes: p.TotalBytes, UsedBytes: p.UsedBytes,
		FreeBytes: p.FreeBytes, MinFreePercent: p.MinFreePercent}
}

func (s *Service) prune(ctx context.Context, in *struct{ Body PruneRequest }) (*operationAnswer, error) {
	labels, err := driver.ParseLabelSelector("prune", in.Body.Labels...)
	if err != nil {
		return nil, err
	}
	q := engine.PruneRequest{KeepFreePercent: in.Body.KeepFreePercent, OlderThan: seconds(in.Body.OlderThanSeconds),
		Idle: seconds(in.Body.IdleSeconds), Labels: labels, DryRun: in.Body.DryRun}
	return s.start(ctx, "prune", "", func(ctx context.Context, t *progress.Tracker) (any, error) {
		q.Tracker = t
		return s.e.Prune(ctx, q)
	})
}

func (s *Service) fsck(ctx context.Context, in *struct{ Body *FsckRequest }) (*operationAnswer, error) {
	q := check.Request{}
	if in.Body != nil {
		q.Repair = in.Body.Repair
		for _, text := range in.Body.Refs {
			r, err := ref.Parse("fsck", text)
			if err != nil {
				return nil, err
			}
			q.Refs = append(q.Refs, r)
		}
	}
	return s.start(ctx, "fsck", "", func(ctx context.Context, t *progress.Tracker) (any, error) {
		q.Tracker = t
		return engine.Fsck(ctx, s.e.Dir(), q, s.Drivers)
	})
}
