package service

import (
	"context"

	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/base/ref"
	"pando/internal/engine"
)

// MountRequest says where and how to mount a volume.
type MountRequest struct {
	Dir  string `json:"dir,omitempty" doc:"Absolute path of the mount point (default: below the pool)"`
	Dev  bool   `json:"dev,omitempty" doc:"Devices in it work"`
	SUID bool   `json:"suid,omitempty" doc:"Set-user-ID programs in it work"`
}

// RewindRequest says to which snapshot a volume is rewound.
type RewindRequest struct {
	Snapshot string `json:"snapshot" minLength:"1"`
	Detach   bool   `json:"detach,omitempty" doc:"Unmount the volume first, and mount it again in the same place"`
}

// RewoundVolume is a volume that was rewound.
type RewoundVolume struct {
	engine.Rewound
	Warnings []errs.Message `json:"warnings,omitempty"`
}

// TTLRequest says when a volume expires.
type TTLRequest struct {
	Seconds float64 `json:"seconds,omitempty" minimum:"0" maximum:"3e9" doc:"From now on; 0 or missing: never"`
}

// ResizeRequest says how large a volume shall be.
type ResizeRequest struct {
	SizeBytes int64 `json:"size_bytes" minimum:"1"`
}

// ResizedVolume is a volume that was resized.
type ResizedVolume struct {
	engine.Resized
	Warnings []errs.Message `json:"warnings,omitempty"`
}

// RebaseRequest says onto which generation a volume is moved.
type RebaseRequest struct {
	Onto string `json:"onto" minLength:"1" doc:"GOLDEN or GOLDEN@N"`
	Keep string `json:"keep,omitempty" enum:"ours,theirs" doc:"Of paths that both have changed (default: fail)"`
}

// RebaseConflicts is the result of a rebase that failed because of conflicts.
type RebaseConflicts struct {
	Conflicts []engine.RebaseConflict `json:"conflicts" nullable:"false"`
}

func (s *Service) addVolumeContentRoutes() {
	add(s, route{id: "mount-volume", access: changes, method: "POST", path: "/v1/volumes/{volume}/mount", tag: "volumes",
		summary: "Mount a volume", about: "Does nothing if it is mounted there already."},
		func(ctx context.Context, in *struct {
			InVolume
			Body *MountRequest
		}) (*volumeAnswer, error) {
			name, err := in.name("mount")
			if err != nil {
				return nil, err
			}
			q := engine.MountRequest{Volume: name}
			if b := in.Body; b != nil {
				if err := checkMount("mount", in.Volume, b.Dir, true, false); err != nil {
					return nil, err
				}
				q.Dir, q.May = b.Dir, engine.Rights{Dev: b.Dev, SUID: b.SUID}
			}
			if err := grantOf(ctx).limitMount(&q); err != nil {
				return nil, err
			}
			i, err := s.e.Mount(ctx, q)
			return answerVolume(ctx, i, err)
		})

	add(s, route{id: "unmount-volume", access: changes, method: "POST", path: "/v1/volumes/{volume}/unmount",
		tag:     "volumes",
		summary: "Unmount a volume"},
		func(ctx context.Context, in *InVolume) (*volumeAnswer, error) {
			name, err := in.name("umount")
			if err != nil {
				return nil, err
			}
			i, err := s.e.Umount(ctx, engine.UmountRequest{Volume: name})
			return answerVolume(ctx, i, err)
		})

	add(s, route{id: "rewind-volume", access: changes, method: "POST", path: "/v1/volumes/{volume}/rewind", tag: "volumes",
		summary: "Restore a volume to one of its snapshots", about: "Its previous state stays as a snapshot."}, s.rewind)

	add(s, route{id: "resize-volume", access: changes, method: "POST", path: "/v1/volumes/{volume}/resize", tag: "volumes",
		summary: "Enlarge a volume and its filesystem"}, s.resize)

	add(s, route{id: "set-ttl", access: changes, method: "PUT", path: "/v1/volumes/{volume}/ttl", tag: "volumes",
		summary: "Set when a volume expires, in place of what was set before",
		about:   "A volume that is in use when it expires is destroyed when it no longer is."}, s.setTTL)

	add(s, route{id: "rebase-volume", access: makes, method: "POST", path: "/v1/volumes/{volume}/rebase", tag: "volumes",
		status: accepted, summary: "Move a volume's own changes onto another generation of its golden"}, s.rebase)

	add(s, route{id: "flatten-volume", access: changes, method: "POST", path: "/v1/volumes/{volume}/flatten",
		tag:    "volumes",
		status: accepted, summary: "Make a volume independent of all others"},
		func(ctx context.Context, in *InVolume) (*operationAnswer, error) {
			name, err := in.name("flatten")
			if err != nil {
				return nil, err
			}
			return s.start(ctx, "flatten", in.Volume, func(ctx context.Context, t *progress.Tracker) (any, error) {
				return s.e.Flatten(ctx, engine.FlattenRequest{Volume: name, Tracker: t})
			})
		})

	add(s, route{id: "diff", access: makes, method: "GET", path: "/v1/diff", tag: "volumes",
		summary: "List what differs between two volumes, snapshots or generations"},
		func(ctx context.Context, in *struct {
			A string `query:"a" required:"true" doc:"What to compare: VOLUME, VOLUME@SNAPSHOT, GOLDEN or GOLDEN@N"`
			B string `query:"b" required:"true" doc:"With what"`

			Freeze string `query:"freeze" enum:"if_needed,always,never" doc:"Stop writes to volumes in use"`
		}) (*struct{ Body engine.Difference }, error) {
			a, err := ref.Parse("diff", in.A)
			if err != nil {
				return nil, err
			}
			b, err := ref.Parse("diff", in.B)
			if err != nil {
				return nil, err
			}
			if c := callerOf(ctx); !c.trusted() {
				end, ok := s.diffs.add(c.UID, maxDiffsOfUser)
				if !ok {
					return nil, errs.New(errs.InUse, "diff", in.A, "%d comparisons of yours are running, and no more may",
						maxDiffsOfUser).WithHint("wait until one of them has ended")
				}
				defer end()
			}
			d, err := s.e.Diff(ctx, engine.DiffRequest{A: a, B: b, Freeze: freezes[in.Freeze]})
			return &struct{ Body engine.Difference }{d}, err
		})
}

func (s *Service) rewind(ctx context.Context, in *struct {
	InVolume
	Body RewindRequest
}) (*struct{ Body RewoundVolume }, error) {
	name, err := in.name("rewind")
	if err != nil {
		return nil, err
	}
	snapshot, err := ref.ParseName("rewind", in.Body.Snapshot)
	if err != nil {
		return nil, err
	}
	r, err := s.e.Rewind(ctx, engine.RewindRequest{Volume: name, Snapshot: snapshot, Detach: in.Body.Detach})
	return &struct{ Body RewoundVolume }{RewoundVolume{r, warned(ctx)}}, err
}

func (s *Service) resize(ctx context.Context, in *struct {
	InVolume
	Body ResizeRequest
}) (*struct{ Body ResizedVolume }, error) {
	name, err := in.name("resize")
	if err != nil {
		return nil, err
	}
	r, err := s.e.Resize(ctx, engine.ResizeRequest{Volume: name, SizeBytes: in.Body.SizeBytes})
	return &struct{ Body ResizedVolume }{ResizedVolume{r, warned(ctx)}}, err
}

func (s *Service) setTTL(ctx context.Context, in *struct {
	InVolume
	Condition
	Body TTLRequest
}) (*volumeAnswer, error) {
	name, err := in.name("set")
	if err != nil {
		return nil, err
	}
	i, err := s.e.SetTTL(in.in(ctx), name, seconds(in.Body.Seconds))
	return answerVolume(ctx, i, err)
}

func (s *Service) rebase(ctx context.Context, in *struct {
	InVolume
	Body RebaseRequest
}) (*operationAnswer, error) {
	name, err := in.name("rebase")
	if err != nil {
		return nil, err
	}
	onto, err := ref.Parse("rebase", in.Body.Onto)
	if err != nil {
		return nil, err
	}
	q := engine.RebaseRequest{Volume: name, Onto: onto, Ours: in.Body.Keep == "ours", Theirs: in.Body.Keep == "theirs"}
	return s.start(ctx, "rebase", in.Volume, func(ctx context.Context, t *progress.Tracker) (any, error) {
		q.Tracker = t
		out, err := s.e.Rebase(ctx, q)
		if err != nil && len(out.Conflicts) > 0 {
			err = partial{err, RebaseConflicts{out.Conflicts}}
		}
		return out, err
	})
}
