package service

import (
	"context"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/base/ref"
	"pando/internal/engine"
	"pando/internal/observe/doctor"
	"pando/internal/remote/replicate"
)

// InRemote names a remote in the path of a request.
type InRemote struct {
	Remote string `path:"remote" doc:"Name of a remote of the pool"`
}

// RemoteInfo describes a remote.
type RemoteInfo struct {
	Name    string    `json:"name"`
	AddedAt time.Time `json:"added_at"`
}

// RemoteList lists remotes.
type RemoteList struct {
	Items []RemoteInfo `json:"items" nullable:"false"`
}

// PushRequest says what is pushed.
type PushRequest struct {
	Refs           []string `json:"refs,omitempty" doc:"Volumes, snapshots, generations and goldens"`
	All            bool     `json:"all,omitempty" doc:"Push every golden, and every volume that is not ephemeral"`
	As             string   `json:"as,omitempty" doc:"Name on the remote, of a single ref"`
	LimitRate      int64    `json:"limit_rate,omitempty" minimum:"0" doc:"Bytes a second; 0: no limit"`
	Freeze         string   `json:"freeze,omitempty" enum:"if_needed,always,never" doc:"Stop writes to volumes in use"`
	Full           bool     `json:"full,omitempty" doc:"Send all data again"`
	NoOrigin       bool     `json:"no_origin,omitempty" doc:"Do not push the origin of a clone first"`
	Portable       bool     `json:"portable,omitempty" doc:"Send trees in the form that all drivers can read"`
	AcceptRollback bool     `json:"accept_rollback,omitempty" doc:"Continue if the remote was restored to an older state"`
}

// PushFailure is the result of a push that failed.
type PushFailure struct {
	Pushed []replicate.Pushed `json:"pushed" nullable:"false" doc:"What was pushed nevertheless"`
	Failed []*Problem         `json:"failed" nullable:"false" doc:"One for each object that was not"`
}

// PullRequest says what is pulled.
type PullRequest struct {
	Ref       string `json:"ref" minLength:"1" doc:"NAME, VOLUME@SNAPSHOT or GOLDEN@N on the remote"`
	As        string `json:"as,omitempty" doc:"Name in this pool (default: that on the remote)"`
	Update    bool   `json:"update,omitempty" doc:"Bring a volume that was pulled before to its newest point"`
	TakeOver  bool   `json:"take_over,omitempty" doc:"Make this pool the writer of the volume on the remote"`
	NoOrigin  bool   `json:"no_origin,omitempty" doc:"Do not restore a missing origin"`
	LimitRate int64  `json:"limit_rate,omitempty" minimum:"0" doc:"Bytes a second; 0: no limit"`
}

// VerifyRequest says what is checked of a remote.
type VerifyRequest struct {
	Names       []string `json:"names,omitempty" doc:"Volumes and goldens (default: all)"`
	ReadPercent float64  `json:"read_percent,omitempty" minimum:"0" maximum:"100" doc:"Also read this part of the data"`
	Repair      bool     `json:"repair,omitempty" doc:"Send missing and damaged data again, if this pool has it"`
}

func (s *Service) addRemoteRoutes() {
	add(s, route{id: "list-remotes", access: rootOnly, method: "GET", path: "/v1/remotes", tag: "remotes",
		summary: "List the remotes of the pool", about: "They are added on the host, with pando remote add."}, s.listRemotes)

	add(s, route{id: "push", access: rootOnly, method: "POST", path: "/v1/remotes/{remote}/push",
		tag: "remotes", status: accepted,
		summary: "Push volumes and goldens to a remote",
		about:   "The result of one that failed has what was pushed nevertheless, and why the rest was not."}, s.push)

	add(s, route{id: "pull", access: rootOnly, method: "POST", path: "/v1/remotes/{remote}/pull",
		tag: "remotes", status: accepted,
		summary: "Restore a volume or golden from a remote"}, s.pull)

	add(s, route{id: "verify", access: rootOnly, method: "POST", path: "/v1/remotes/{remote}/verify",
		tag: "remotes", status: accepted,
		summary: "Check the data on a remote",
		about:   "An operation that has found problems is done; total_problems in its result says how many."}, s.verify)
}

func (s *Service) listRemotes(context.Context, *struct{}) (*struct{ Body RemoteList }, error) {
	names, err := replicate.List(s.e.Dir())
	if err != nil {
		return nil, err
	}
	out := &struct{ Body RemoteList }{RemoteList{[]RemoteInfo{}}}
	for _, n := range names {
		r, err := replicate.Load(s.e.Dir(), n, replicate.Access{})
		if err != nil {
			return nil, err
		}
		out.Body.Items = append(out.Body.Items, RemoteInfo{r.Name, r.AddedAt})
	}
	return out, nil
}

// remote reads what the pool has of a remote. Retries show in the progress of the operation.
func (s *Service) remote(op, name string, t *progress.Tracker) (*replicate.Remote, error) {
	if err := ref.CheckName(op, name); err != nil {
		return nil, err
	}
	access, err := s.Access()
	if err != nil {
		return nil, err
	}
	access.OnRetry = func(w replicate.Waiting) {
		t.Stall(&progress.Stall{Answer: w.Answer.Words, Attempt: w.Attempt, Of: w.Of, Next: time.Now().Add(w.Pause)})
	}
	access.OnAnswer = func() { t.Stall(nil) }

	r, err := replicate.Load(s.e.Dir(), name, access)
	if err != nil {
		return nil, err
	}
	r.KnowNames(func(ctx context.Context) ([]string, error) { return replicate.NamesOf(ctx, s.e, r) })
	return r, nil
}

// known returns an error if a remote does not exist, before an operation begins.
func (s *Service) known(op, name string) error {
	_, err := s.remote(op, name, nil)
	return err
}

func (s *Service) push(ctx context.Context, in *struct {
	InRemote
	Body PushRequest
}) (*operationAnswer, error) {
	b := in.Body
	q := replicate.PushRequest{All: b.All, LimitBytes: b.LimitRate, Freeze: freezes[b.Freeze], Full: b.Full,
		NoOrigin: b.NoOrigin, Portable: b.Portable, AcceptRollback: b.AcceptRollback}
	for _, text := range b.Refs {
		r, err := ref.Parse("push", text)
		if err != nil {
			return nil, err
		}
		q.Refs = append(q.Refs, r)
	}
	var err error
	if q.As, err = optionalName("push", b.As); err != nil {
		return nil, err
	}
	if err := s.known("push", in.Remote); err != nil {
		return nil, err
	}

	return s.start(ctx, "push", in.Remote, func(ctx context.Context, t *progress.Tracker) (any, error) {
		r, err := s.remote("push", in.Remote, t)
		if err != nil {
			return nil, err
		}
		q.Tracker = t
		out, err := replicate.Push(ctx, s.e, r, q)
		out = append([]replicate.Pushed{}, out...)
		if err != nil {
			return nil, partial{err, pushFailure(out, err)}
		}
		return out, nil
	})
}

// pushFailure returns the result of a push that failed.
func pushFailure(pushed []replicate.Pushed, err error) PushFailure {
	out := PushFailure{Pushed: pushed}
	all := []error{err}
	if many, ok := err.(interface{ Unwrap() []error }); ok { // at the top only: further down they are one error's causes
		all = many.Unwrap()
	}
	for _, e := range all {
		out.Failed = append(out.Failed, problemOf(e))
	}
	return out
}

func (s *Service) pull(ctx context.Context, in *struct {
	InRemote
	Body PullRequest
}) (*operationAnswer, error) {
	b := in.Body
	q := replicate.PullRequest{Update: b.Update, TakeOver: b.TakeOver, NoOrigin: b.NoOrigin, LimitBytes: b.LimitRate}
	var err error
	if q.Ref, err = ref.Parse("pull", b.Ref); err != nil {
		return nil, err
	}
	if q.As, err = optionalName("pull", b.As); err != nil {
		return nil, err
	}
	if err := s.known("pull", in.Remote); err != nil {
		return nil, err
	}

	return s.start(ctx, "pull", in.Remote+" "+b.Ref, func(ctx context.Context, t *progress.Tracker) (any, error) {
		r, err := s.remote("pull", in.Remote, t)
		if err != nil {
			return nil, err
		}
		q.Tracker = t
		return replicate.Pull(ctx, s.e, r, q)
	})
}

func (s *Service) verify(ctx context.Context, in *struct {
	InRemote
	Body *VerifyRequest
}) (*operationAnswer, error) {
	var b VerifyRequest
	if in.Body != nil {
		b = *in.Body
	}
	for _, n := range b.Names {
		if err := ref.CheckName("verify", n); err != nil {
			return nil, err
		}
	}
	if err := s.known("verify", in.Remote); err != nil {
		return nil, err
	}

	return s.start(ctx, "verify", in.Remote, func(ctx context.Context, t *progress.Tracker) (any, error) {
		r, err := s.remote("verify", in.Remote, t)
		if err != nil {
			return nil, err
		}
		q := replicate.VerifyRequest{Names: b.Names, ReadPercent: b.ReadPercent, Pool: s.e, Tracker: t}
		if b.Repair {
			return replicate.VerifyRepair(ctx, s.e, r, q)
		}
		return replicate.Verify(ctx, r, q)
	})
}

// examine runs the checks of doctor, on the host and on the pool.
func (s *Service) examine(ctx context.Context, q doctor.HostRequest) (any, error) {
	v, err := engine.Look(ctx, s.e.Dir(), s.Drivers)
	if err != nil {
		return nil, errs.Wrap("doctor", "", err)
	}
	q.Pool = &doctor.PoolFacts{Dir: v.Dir, Driver: v.Driver, Loop: v.Loop, Data: v.Data, Attached: v.Attached,
		Mounts: v.Mounts, Ephemeral: v.Ephemeral, Working: v.Working, Trouble: v.Trouble}
	for _, g := range v.Goldens {
		image := g.Image
		if g.Tree {
			image = "" // not one file
		}
		q.Pool.Goldens = append(q.Pool.Goldens, doctor.GoldenFacts{Ref: g.Ref, Image: image})
	}
	q.Words = wordsOf(ctx)
	return doctor.Examine(ctx, q)
}
