package service

import (
	"context"

	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/base/ref"
	"pando/internal/remote/replicate"
)

// RemotePruneRequest says which points of a remote stay. Without a rule, all of them do, and only what no point needs
// is removed.
type RemotePruneRequest struct {
	Names          []string `json:"names,omitempty" doc:"Volumes that the rules apply to (default: all)"`
	KeepLast       int      `json:"keep_last,omitempty" minimum:"1" doc:"Keep this many of the newest points"`
	KeepHourly     int      `json:"keep_hourly,omitempty" minimum:"1" doc:"And the newest of this many hours with points"`
	KeepDaily      int      `json:"keep_daily,omitempty" minimum:"1"`
	KeepWeekly     int      `json:"keep_weekly,omitempty" minimum:"1"`
	KeepMonthly    int      `json:"keep_monthly,omitempty" minimum:"1"`
	KeepYearly     int      `json:"keep_yearly,omitempty" minimum:"1"`
	KeepWithin     float64  `json:"keep_within_seconds,omitempty" minimum:"0" maximum:"3e9" doc:"And all newer than this"`
	DryRun         bool     `json:"dry_run,omitempty" doc:"Only report what would be removed"`
	MaxRepack      *int64   `json:"max_repack,omitempty" minimum:"0" doc:"Bytes to rewrite at most (default: no limit)"`
	AcceptRollback bool     `json:"accept_rollback,omitempty" doc:"Continue if the remote was restored to an older state"`
}

// RemoteVolumes lists what is on a remote.
type RemoteVolumes struct {
	Items []RemoteVolume `json:"items" nullable:"false"`
}

// RemoteVolume is a volume or golden on a remote.
type RemoteVolume struct {
	Name        string                 `json:"name"`
	Points      int                    `json:"points" doc:"How many snapshots or generations of it there are"`
	NewestPoint *replicate.ListedPoint `json:"newest_point,omitempty" doc:"Missing if it has no points"`
	Problem     string                 `json:"problem,omitempty" doc:"Why the list of its points cannot be read"`
}

func (s *Service) addRemotePruneRoutes() {
	add(s, route{id: "list-remote", access: rootOnly, method: "GET", path: "/v1/remotes/{remote}/volumes",
		tag:     "remotes",
		summary: "List the volumes and goldens on a remote, each with its newest point"}, s.listRemote)

	add(s, route{id: "prune-remote", access: rootOnly, method: "POST", path: "/v1/remotes/{remote}/prune",
		tag: "remotes", status: accepted,
		summary: "Remove old points from a remote, and return their space"}, s.pruneRemote)
}

func (s *Service) listRemote(ctx context.Context, in *InRemote) (*struct{ Body RemoteVolumes }, error) {
	r, err := s.remote("remote ls", in.Remote, nil)
	if err != nil {
		return nil, err
	}
	l, err := replicate.Volumes(ctx, r)
	if err != nil {
		return nil, err
	}
	defer l.Close()

	out := &struct{ Body RemoteVolumes }{RemoteVolumes{[]RemoteVolume{}}}
	for _, v := range l.Volumes {
		row := RemoteVolume{Name: v.Name, Points: v.Count, Problem: v.Problem}
		if v.Count > 0 {
			row.NewestPoint = &v.NewestPoint
		}
		out.Body.Items = append(out.Body.Items, row)
	}
	return out, nil
}

func (s *Service) pruneRemote(ctx context.Context, in *struct {
	InRemote
	Body *RemotePruneRequest
}) (*operationAnswer, error) {
	const op = "remote prune"
	b := orZero(in.Body)
	q := replicate.PruneRequest{Pool: s.e, Names: b.Names, DryRun: b.DryRun, MaxRepack: -1,
		AcceptRollback: b.AcceptRollback, Policy: replicate.Policy{Last: b.KeepLast, Hourly: b.KeepHourly,
			Daily: b.KeepDaily, Weekly: b.KeepWeekly, Monthly: b.KeepMonthly, Yearly: b.KeepYearly,
			Within: seconds(b.KeepWithin)}}
	if b.MaxRepack != nil {
		q.MaxRepack = *b.MaxRepack
	}
	for _, n := range b.Names {
		if err := ref.CheckName(op, n); err != nil {
			return nil, err
		}
	}
	if len(b.Names) > 0 && q.Policy.IsZero() {
		return nil, errs.New(errs.Invalid, op, b.Names[0], "no rule says what stays").
			WithHint("set a field such as keep_last, or leave names out")
	}
	if err := s.known(op, in.Remote); err != nil {
		return nil, err
	}

	return s.start(ctx, op, in.Remote, func(ctx context.Context, t *progress.Tracker) (any, error) {
		r, err := s.remote(op, in.Remote, t)
		if err != nil {
			return nil, err
		}
		q.Tracker = t
		return replicate.Prune(ctx, r, q)
	})
}
