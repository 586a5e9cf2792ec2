package cli

import (
	"context"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine"
	"pando/internal/front/viaservice"

	"github.com/spf13/cobra"
)

// calls are what verbs need of a pool. *engine.Engine implements them for a pool that this process opens, and
// *viaservice.Pool for one that a service has opened.
type calls interface {
	volumeCalls
	contentCalls
	snapshotCalls
	goldenCalls
	labelCalls
	poolCalls
}

// volumeCalls make, mount and destroy volumes.
type volumeCalls interface {
	Clone(context.Context, engine.CloneRequest) ([]engine.Info, error)
	Fork(context.Context, engine.CloneRequest) ([]engine.Info, error)
	Run(context.Context, engine.RunRequest) (engine.RunResult, error)
	Mount(context.Context, engine.MountRequest) (engine.Info, error)
	Umount(context.Context, engine.UmountRequest) (engine.Info, error)
	Destroy(context.Context, engine.DestroyRequest) (*engine.DestroyReport, error)
	Resize(context.Context, engine.ResizeRequest) (engine.Resized, error)
	Rebase(context.Context, engine.RebaseRequest) (engine.Rebased, error)
}

// contentCalls read what is in volumes.
type contentCalls interface {
	Diff(context.Context, engine.DiffRequest) (engine.Difference, error)
	Export(context.Context, engine.ExportRequest) (engine.Exported, error)
}

// snapshotCalls are about snapshots.
type snapshotCalls interface {
	Snapshot(context.Context, engine.SnapshotRequest) (engine.Info, error)
	SnapshotGroup(context.Context, engine.SnapshotGroupRequest) (engine.SnapshotGroup, error)
	Rewind(context.Context, engine.RewindRequest) (engine.Rewound, error)
	SnapshotNames(ctx context.Context, volume ref.Name) ([]string, error)
}

// goldenCalls are about goldens.
type goldenCalls interface {
	Goldens(context.Context) ([]engine.GoldenInfo, error)
	Import(context.Context, engine.ImportRequest) (engine.Imported, error)
	Publish(context.Context, engine.PublishRequest) (engine.Published, error)
	SetGolden(context.Context, engine.SetRequest) ([]string, error)
}

// labelCalls are about what objects of any kind have.
type labelCalls interface {
	Labels(context.Context, ref.Ref) (driver.Labels, error)
	SetLabels(context.Context, engine.LabelRequest) (engine.Info, error)
	LabelsInUse(context.Context) ([]string, error)
	Pin(ctx context.Context, r ref.Ref, d time.Duration) (engine.Info, error)
	Unpin(context.Context, ref.Ref) (engine.Info, error)
	Rename(context.Context, engine.RenameRequest) (engine.Renamed, error)
}

// poolCalls are about the pool.
type poolCalls interface {
	Volumes(ctx context.Context, exact bool) ([]engine.Info, error)
	VolumeNames(context.Context) ([]string, error)
	Show(context.Context, ref.Ref) (engine.Detail, error)
	Pool(ctx context.Context, exact bool) (engine.PoolInfo, error)
	Prune(context.Context, engine.PruneRequest) (*engine.PruneReport, error)
	GC(ctx context.Context, explain bool) (*engine.GCReport, error)
	Close()
}

// openCalls connects to the service, or opens the pool as openPool does. The caller closes it.
func (a *App) openCalls(ctx context.Context) (calls, error) {
	if a.service != "" {
		p, err := viaservice.Open(a.service)
		if err != nil {
			return nil, err // not an interface that holds nil
		}
		return p, nil
	}

	e, err := a.openPool(ctx)
	if err != nil {
		return nil, err
	}
	return e, nil
}

// readCalls is openCalls without maintenance, for what must change nothing.
func (a *App) readCalls(ctx context.Context, c *cobra.Command) (calls, error) {
	if err := a.chooseService(c); err != nil { // completion has not
		return nil, err
	}
	if a.service != "" {
		return a.openCalls(ctx)
	}
	e, err := a.openReadOnly(ctx)
	if err != nil {
		return nil, err
	}
	return e, nil
}

// opened returns the pool that this process has opened, for what only that can do. Unsupported.
func opened(c calls, op, what string) (*engine.Engine, error) {
	if e, ok := c.(*engine.Engine); ok {
		return e, nil
	}
	return nil, errs.New(errs.Unsupported, op, what, "this needs the pool itself, and the service does not do it").
		WithHint("run it as root, for example with sudo")
}

// withCalls opens the pool, calls fn and closes it.
func (a *App) withCalls(
	fn func(ctx context.Context, e calls, args []string) error,
) func(*cobra.Command, []string) error {
	return func(c *cobra.Command, args []string) error {
		e, err := a.openCalls(c.Context())
		if err != nil {
			return err
		}
		defer e.Close()
		ctx, tell := a.collectWarnings(c.Context())
		defer tell()
		return fn(ctx, e, args)
	}
}
