package service

import (
	"context"
	"net/http"
	"strings"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine"
)

// MakeRequest is what clones and forks have in common.
type MakeRequest struct {
	Name      string            `json:"name" minLength:"1" doc:"Name of the new volume"`
	Mount     bool              `json:"mount,omitempty" doc:"Mount it, too"`
	MountDir  string            `json:"mount_dir,omitempty" doc:"Where, an absolute path (default: below the pool)"`
	Dev       bool              `json:"dev,omitempty" doc:"Devices in it work"`
	SUID      bool              `json:"suid,omitempty" doc:"Set-user-ID programs in it work"`
	SizeBytes int64             `json:"size_bytes,omitempty" minimum:"0" doc:"Size to grow it to (default: as the origin)"`
	TTL       float64           `json:"ttl_seconds,omitempty" minimum:"0" maximum:"3e9" doc:"Destroy it after this time"`
	Ephemeral bool              `json:"ephemeral,omitempty" doc:"Do not wait for the disk: it does not survive a reboot"`
	Labels    map[string]string `json:"labels,omitempty"`
	Owner     *driver.Owner     `json:"owner,omitempty" doc:"Gets the volume; its mount shows root's files as this user's"`
	Freeze    string            `json:"freeze,omitempty" enum:"if_needed,always,never" doc:"Stop writes to the origin"`
}

// CloneRequest is the body of a clone.
type CloneRequest struct {
	MakeRequest
	From    string `json:"from" minLength:"1" doc:"What to clone: GOLDEN, GOLDEN@N, VOLUME@SNAPSHOT or VOLUME"`
	Overlay *bool  `json:"overlay,omitempty" doc:"Hold only what differs from the golden (default: as the golden says)"`
}

// request returns the request of the engine.
func (b MakeRequest) request(op string, from ref.Ref) (q engine.CloneRequest, err error) {
	if q.Name, err = ref.ParseName(op, b.Name); err != nil {
		return q, err
	}
	if q.Labels, err = driver.NewLabels(op, b.Labels); err != nil {
		return q, err
	}
	if b.Owner != nil {
		q.Owner = *b.Owner
	}
	if err := checkMount(op, b.Name, b.MountDir, b.Mount, b.Dev || b.SUID); err != nil {
		return q, err
	}
	q.From, q.Mount, q.MountDir, q.May = from, b.Mount, b.MountDir, engine.Rights{Dev: b.Dev, SUID: b.SUID}
	q.SizeBytes, q.TTL, q.Ephemeral, q.Freeze = b.SizeBytes, seconds(b.TTL), b.Ephemeral, freezes[b.Freeze]
	return q, nil
}

// checkMount refuses fields that have no meaning without mount, and paths that depend on where the service runs.
func checkMount(op, name, dir string, mount, rights bool) error {
	switch {
	case !mount && (dir != "" || rights):
		return errs.New(errs.Invalid, op, name, "mount_dir, dev and suid need mount").
			WithHint("set the field mount to true")
	case dir != "" && dir[0] != '/':
		return errs.New(errs.Invalid, op, dir, "the directory must be an absolute path")
	}
	return nil
}

type listVolumesInput struct {
	After  string   `query:"after" doc:"List the volumes after this name: the field next of the page before"`
	Limit  int      `query:"limit" minimum:"1" maximum:"1000" default:"100" doc:"Length of the page"`
	Label  []string `query:"label,explode" doc:"Only volumes with the label KEY or KEY=VALUE, a glob (Repeatable)"`
	Golden string   `query:"golden" doc:"Only volumes that descend from this golden, or from GOLDEN@N"`
	Name   string   `query:"name" doc:"Only volumes with a name that matches this glob"`
	State  string   `query:"state" enum:"idle,mounted" doc:"Only volumes in this state"`

	Measure string `query:"measure" enum:"some,all" doc:"Measure now: if volumes are few (some), or in any case (all)"`
}

// VolumePage is a page of volumes.
type VolumePage struct {
	Items []engine.Info `json:"items" nullable:"false"`
	Next  string        `json:"next" doc:"Value of after for the next page; empty: this is the last one"`
}

type volumePageAnswer struct{ Body VolumePage }

type cloneInput struct {
	Repeatable
	Body CloneRequest
}

type createdAnswer struct {
	Status   int
	Location string `header:"Location"`
	ETag     string `header:"ETag"`
	Body     Volume
}

func (s *Service) addVolumeRoutes() {
	add(s, route{id: "list-volumes", access: reads, method: "GET", path: "/v1/volumes",
		tag: "volumes", summary: "List volumes",
		about: "In the order of their names. Sizes are those that were last measured, unless measure is set; a volume by " +
			"itself is measured now."},
		s.listVolumes)

	add(s, route{id: "clone-volume", access: makes, method: "POST", path: "/v1/volumes",
		tag: "volumes", status: http.StatusCreated,
		summary: "Create a volume from a golden, a snapshot or a volume",
		about:   "Answers 200 instead of 201 if the request repeats one with the same Idempotency-Key."}, s.clone)

	add(s, route{id: "show-volume", access: reads, method: "GET", path: "/v1/volumes/{volume}", tag: "volumes",
		summary: "Show a volume with its snapshots, measured now"},
		func(ctx context.Context, in *InVolume) (*detailsAnswer, error) {
			name, err := in.name("show")
			if err != nil {
				return nil, err
			}
			out, err := s.show(ctx, name.Ref())
			if err == nil && out.Body.Kind != string(driver.Volume) {
				err = notA(in.Volume, "volume", "golden show")
			}
			return out, err
		})

	add(s, route{id: "destroy-volume", access: changes, method: "DELETE", path: "/v1/volumes/{volume}", tag: "volumes",
		status: http.StatusNoContent, summary: "Destroy a volume with its snapshots"},
		func(ctx context.Context, in *struct {
			InVolume
			Condition
			Same
		}) (*noContent, error) {
			name, err := in.name("destroy")
			if err != nil {
				return nil, err
			}
			return &noContent{}, only(s.e.Destroy(in.in(ctx), in.destroy(name.Ref())))
		})

	add(s, route{id: "fork-volume", access: makes, method: "POST", path: "/v1/volumes/{volume}/fork", tag: "volumes",
		status: http.StatusCreated, summary: "Create a volume from another one, which may be in use"}, s.fork)

	add(s, route{id: "destroy", access: changes, method: "POST", path: "/v1/destroy", tag: "volumes",
		summary: "Destroy several volumes and snapshots",
		about: "An unknown name destroys nothing. After that, an object that is in use does not keep the others from being " +
			"destroyed: failed lists it. To be able to repeat the request, find the IDs first with dry_run, and send them " +
			"with the names."}, s.destroyMany)
}

// notA returns the error of a reference to another kind of object.
func notA(name, kind, show string) error {
	return errs.New(errs.NotFound, "show", name, "it is not a %s", kind).WithHint("use %s", errs.Run(show, name))
}

func (s *Service) listVolumes(ctx context.Context, in *listVolumesInput) (*volumePageAnswer, error) {
	q := engine.PageQuery{After: in.After, Limit: in.Limit, Golden: in.Golden, Name: in.Name,
		State: in.State, Measure: engine.Measure(in.Measure)}
	var err error
	if q.Labels, err = driver.ParseLabelSelector("list volumes", in.Label...); err != nil {
		return nil, err
	}

	// Of a golden that the policy does not show, only own volumes are known to descend: see hideGolden.
	within := ctx
	golden, _, _ := strings.Cut(q.Golden, "@") // it may be one generation
	if g := grantOf(ctx); g != nil && golden != "" && !g.Sees(golden) {
		within = g.ownOnly(ctx)
	}
	page, more, err := s.e.VolumePage(within, q)
	if err != nil {
		return nil, err
	}
	out := &volumePageAnswer{VolumePage{Items: append([]engine.Info{}, page...)}}
	if more {
		out.Body.Next = page[len(page)-1].Name
	}
	return out, nil
}

func (s *Service) clone(ctx context.Context, in *cloneInput) (*createdAnswer, error) {
	from, err := ref.Parse("clone", in.Body.From)
	if err != nil {
		return nil, err
	}
	q, err := in.Body.request("clone", from)
	if err == nil {
		err = grantOf(ctx).limitClone("clone", &q)
	}
	if err != nil {
		return nil, err
	}
	q.GoldenDecides = in.Body.Overlay == nil
	q.Overlay = in.Body.Overlay != nil && *in.Body.Overlay
	return s.make(ctx, in.Repeatable, "clone", in.Body, func(ctx context.Context) ([]engine.Info, error) {
		return s.e.Clone(ctx, q)
	})
}

func (s *Service) fork(ctx context.Context, in *struct {
	InVolume
	Repeatable
	Body MakeRequest
}) (*createdAnswer, error) {
	name, err := in.name("fork")
	if err != nil {
		return nil, err
	}
	q, err := in.Body.request("fork", name.Ref())
	if err == nil {
		err = grantOf(ctx).limitClone("fork", &q)
	}
	if err != nil {
		return nil, err
	}
	return s.make(ctx, in.Repeatable, "fork "+in.Volume, in.Body, func(ctx context.Context) ([]engine.Info, error) {
		return s.e.Fork(ctx, q)
	})
}

// Same makes it safe to repeat the destruction of an object.
type Same struct {
	ID string `query:"id" doc:"Its ID: if it no longer exists, this succeeds, whatever has its name now"`
}

// destroy returns the request to destroy an object.
func (s Same) destroy(r ref.Ref) engine.DestroyRequest {
	q := engine.DestroyRequest{What: []ref.Pattern{{Ref: r}}}
	if s.ID != "" {
		q.IDs = []driver.ObjectID{driver.ObjectID(s.ID)}
	}
	return q
}

// DestroyRequest says what to destroy.
type DestroyRequest struct {
	What   []string `json:"what,omitempty" doc:"Names of volumes or globs over them, and VOLUME@SNAPSHOT"`
	IDs    []string `json:"ids,omitempty" doc:"ID of each name: what is gone is left out, whatever has its name now"`
	Labels []string `json:"labels,omitempty" doc:"Only what has these labels: KEY or KEY=VALUE, a glob"`
	DryRun bool     `json:"dry_run,omitempty" doc:"Only report what would be destroyed, without snapshots of volumes"`
}

// DestroyReport says what was destroyed.
type DestroyReport struct {
	Destroyed []engine.Destroyed `json:"destroyed" nullable:"false"`
	Failed    []*Problem         `json:"failed" nullable:"false" doc:"One for each object that still exists"`
	Warnings  []errs.Message     `json:"warnings,omitempty"`
}

type destroyAnswer struct{ Body DestroyReport }

func (s *Service) destroyMany(ctx context.Context, in *struct{ Body DestroyRequest }) (*destroyAnswer, error) {
	const op = "destroy"
	what, err := ref.ParsePatterns(op, in.Body.What...)
	if err != nil {
		return nil, err
	}
	labels, err := driver.ParseLabelSelector(op, in.Body.Labels...)
	if err != nil {
		return nil, err
	}
	if len(what) == 0 && labels.IsZero() {
		return nil, errs.New(errs.Invalid, op, "", "nothing to destroy").WithHint("set the field what or labels")
	}

	q := engine.DestroyRequest{What: what, Labels: labels, DryRun: in.Body.DryRun}
	for _, id := range in.Body.IDs {
		q.IDs = append(q.IDs, driver.ObjectID(id))
	}

	report, err := s.e.Destroy(ctx, q)
	if err != nil {
		return nil, err
	}
	out := &destroyAnswer{DestroyReport{Destroyed: append([]engine.Destroyed{}, report.Destroyed...),
		Failed: []*Problem{}}}
	for _, f := range report.Failed {
		out.Body.Failed = append(out.Body.Failed, problemOf(f))
	}
	out.Body.Warnings = warned(ctx)
	return out, nil
}
