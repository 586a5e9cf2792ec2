package service

import (
	"cmp"
	"context"

	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/base/ref"
	"pando/internal/bench"
	"pando/internal/driver"
	"pando/internal/engine"
	"pando/internal/observe/syncbench"
)

// BenchCloneRequest says what a measurement of clones does.
type BenchCloneRequest struct {
	Golden  string `json:"golden,omitempty" doc:"Golden to clone (default: a generated tree, which is imported)"`
	Files   int    `json:"files,omitempty" minimum:"1" maximum:"1000000" default:"10000" doc:"Of a generated tree"`
	Clones  int    `json:"clones,omitempty" minimum:"1" maximum:"100000" default:"100" doc:"Clones in each series"`
	Volumes int    `json:"volumes,omitempty" minimum:"1" maximum:"1000000" default:"1000" doc:"Then fill the pool to this"`
	Rounds  int    `json:"rounds,omitempty" minimum:"1" maximum:"100" default:"3" doc:"Repetitions of each comparison"`
	Overlay bool   `json:"overlay,omitempty" doc:"Measure overlay clones"`

	Tail float64 `json:"tail_seconds,omitempty" minimum:"0.1" maximum:"3600" default:"60" doc:"Wait for writes to end"`
	Idle float64 `json:"idle_seconds,omitempty" minimum:"0.1" maximum:"3600" default:"3" doc:"Measure the neighbour alone"`
}

// BenchReclaimRequest says what a measurement of destroyed volumes does.
type BenchReclaimRequest struct {
	Clones      int   `json:"clones,omitempty" minimum:"1" maximum:"100000" default:"1000"`
	Files       int   `json:"files,omitempty" minimum:"1" maximum:"1000000" default:"2000" doc:"Of the tree to clone"`
	WriteBytes  int64 `json:"write_bytes,omitempty" minimum:"1" default:"1048576" doc:"Written into each clone"`
	Goldens     int   `json:"goldens,omitempty" minimum:"1" maximum:"100000" default:"100" doc:"For gc to check"`
	Generations int   `json:"generations,omitempty" minimum:"1" maximum:"1000" default:"10" doc:"Of each golden"`
	Volumes     int   `json:"volumes,omitempty" minimum:"1" maximum:"1000000" default:"1000" doc:"For gc to check"`
}

// BenchSyncRequest says what a measurement of syncs does.
type BenchSyncRequest struct {
	Volume  string  `json:"volume" minLength:"1" doc:"Volume to measure; it is mounted for the run"`
	Profile string  `json:"profile,omitempty" default:"postgres" doc:"Writes and syncs as this database does"`
	Seconds float64 `json:"seconds,omitempty" minimum:"1" maximum:"86400" doc:"Of each run (default: 120; 5 if quick)"`
	Runs    int     `json:"runs,omitempty" minimum:"1" maximum:"100" default:"1"`
	Quick   bool    `json:"quick,omitempty" doc:"Only find out whether syncs reach the disk"`

	SizeBytes int64 `json:"size_bytes,omitempty" minimum:"1" doc:"Of all files (default: as the profile says)"`
}

func (s *Service) addBenchRoutes() {
	const host = "Run it on a host that does nothing else: only one measurement runs at a time. The result is the report that the command prints as JSON."
	add(s, route{id: "bench-clone", access: rootOnly, method: "POST", path: "/v1/benches/clone",
		tag: "benches", status: accepted,
		summary: "Measure what clones cost on this pool", about: host},
		func(ctx context.Context, in *struct{ Body *BenchCloneRequest }) (*operationAnswer, error) {
			return s.benchClone(ctx, orZero(in.Body))
		})

	add(s, route{id: "bench-reclaim", access: rootOnly, method: "POST", path: "/v1/benches/reclaim",
		tag: "benches", status: accepted,
		summary: "Measure how much space and memory destroyed volumes return", about: host},
		func(ctx context.Context, in *struct{ Body *BenchReclaimRequest }) (*operationAnswer, error) {
			return s.benchReclaim(ctx, orZero(in.Body))
		})

	add(s, route{id: "bench-sync", access: rootOnly, method: "POST", path: "/v1/benches/sync",
		tag: "benches", status: accepted,
		summary: "Measure the cost of syncs in a volume, and prove that they reach the disk",
		about:   host + " An operation whose verdict is FAIL is done."},
		func(ctx context.Context, in *struct{ Body BenchSyncRequest }) (*operationAnswer, error) {
			return s.benchSync(ctx, in.Body)
		})
}

// orZero returns what p points to, or the zero value.
func orZero[T any](p *T) (v T) {
	if p != nil {
		v = *p
	}
	return v
}

func (s *Service) benchClone(ctx context.Context, b BenchCloneRequest) (*operationAnswer, error) {
	golden, err := optionalName("bench", b.Golden)
	if err != nil {
		return nil, err
	}
	if b.Golden != "" {
		if _, err := s.e.Show(ctx, golden.Ref()); err != nil {
			return nil, err
		}
	}

	q := bench.Config{Engine: s.e, Drivers: s.Drivers, TempDir: s.TempDir, Source: b.Golden,
		Files:  cmp.Or(b.Files, 10_000),
		Clones: cmp.Or(b.Clones, 100), Volumes: cmp.Or(b.Volumes, 1000), Rounds: cmp.Or(b.Rounds, 3), Overlay: b.Overlay,
		Tail: cmp.Or(seconds(b.Tail), bench.UsualTail), Idle: cmp.Or(seconds(b.Idle), bench.UsualIdle)}
	return s.startBench(ctx, "bench clone", b.Golden, func(ctx context.Context, t *progress.Tracker) (any, error) {
		q.Program, q.Tracker = s.Program, t
		return bench.Run(ctx, q)
	})
}

func (s *Service) benchReclaim(ctx context.Context, b BenchReclaimRequest) (*operationAnswer, error) {
	q := bench.ReclaimConfig{Engine: s.e, Drivers: s.Drivers, TempDir: s.TempDir, Clones: cmp.Or(b.Clones, 1000),
		Files: cmp.Or(b.Files, 2000), WriteBytes: cmp.Or(b.WriteBytes, 1<<20), Goldens: cmp.Or(b.Goldens, 100),
		Generations: cmp.Or(b.Generations, 10), Volumes: cmp.Or(b.Volumes, 1000)}
	return s.startBench(ctx, "bench reclaim", "", func(ctx context.Context, t *progress.Tracker) (any, error) {
		q.Program, q.Tracker = s.Program, t
		return bench.Reclaim(ctx, q)
	})
}

// startBench begins a measurement of the pool, after removing what is left of killed ones.
func (s *Service) startBench(
	ctx context.Context, verb, ref string, fn func(context.Context, *progress.Tracker) (any, error),
) (*operationAnswer, error) {
	return s.start(ctx, verb, ref, func(ctx context.Context, t *progress.Tracker) (any, error) {
		if _, err := bench.Clean(ctx, s.e); err != nil {
			return nil, err
		}
		return fn(ctx, t)
	})
}

func (s *Service) benchSync(ctx context.Context, b BenchSyncRequest) (*operationAnswer, error) {
	const op = "bench sync"
	name, err := ref.ParseName(op, b.Volume)
	if err != nil {
		return nil, err
	}
	d, err := s.e.Show(ctx, name.Ref())
	switch {
	case err != nil:
		return nil, err
	case d.Kind != string(driver.Volume):
		return nil, notA(b.Volume, "volume", "golden show")
	case d.FS == string(driver.None):
		return nil, errs.New(errs.Invalid, op, b.Volume,
			"the volume is a block device without a filesystem, and measuring would overwrite it").
			WithHint("measure a volume with a filesystem")
	}

	q := syncbench.Config{Volume: b.Volume, Profile: cmp.Or(b.Profile, "postgres"), Version: s.Version,
		Duration: seconds(b.Seconds),
		Runs:     cmp.Or(b.Runs, 1), Quick: b.Quick, SizeBytes: b.SizeBytes}
	if err := syncbench.CheckProfile(op, q.Profile); err != nil {
		return nil, err
	}
	if d.Ephemeral {
		q.NotDurable = syncbench.EphemeralIs(b.Volume)
	}

	return s.start(ctx, op, b.Volume, func(ctx context.Context, t *progress.Tracker) (_ any, err error) {
		v, err := s.e.Mount(ctx, engine.MountRequest{Volume: name})
		if err != nil {
			return nil, err
		}
		q.Path, q.Tracker = v.Mountpoint, t
		report, err := syncbench.Measure(ctx, q)

		if !d.Mounted() {
			if _, uerr := s.e.Umount(context.WithoutCancel(ctx), engine.UmountRequest{Volume: name}); err == nil {
				err = uerr
			}
		}
		return report, err
	})
}
