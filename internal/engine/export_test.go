package engine

import (
	"context"
	"os"
	"os/signal"
	"sync"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/engine/content"

	"golang.org/x/sys/unix"
)

// HideProgram makes fsck believe that a program is not installed.
func HideProgram(t *testing.T, name string) {
	look := lookProgram
	t.Cleanup(func() { lookProgram = look })
	lookProgram = func(n string) (string, error) {
		if n == name {
			return "", errs.New(errs.Unsupported, "run", n, "program not found").
				WithHint("install it: `apt-get install e2fsprogs`")
		}
		return look(n)
	}
}

// AtStep calls fn between the steps of putting a mount in its place, with the name of what
// was done last.
func AtStep(t *testing.T, fn func(step string)) {
	t.Cleanup(func() { content.AtStep = func(string) {} })
	content.AtStep = fn
}

// SnapshotStopped makes the snapshot v@s in the pool in dir, and stops this process when it has frozen the volume.
func SnapshotStopped(dir string, drivers Drivers) error {
	e, err := Open(context.Background(), dir, drivers)
	if err != nil {
		return err
	}
	defer e.Close()
	goOn := make(chan os.Signal, 1)
	signal.Notify(goOn, unix.SIGCONT)
	stop := sync.OnceFunc(func() {
		_ = unix.Kill(os.Getpid(), unix.SIGSTOP)
		<-goOn // this thread may run on for a moment
	})
	content.AtStep = func(step string) {
		if step == "frozen" {
			stop()
		}
	}
	_, err = e.Snapshot(context.Background(), SnapshotRequest{Volume: ref.MustName("v"), Name: ref.MustName("s"),
		Freeze: FreezeAlways})
	return err
}

// UmountKilled unmounts v in the pool in dir, and kills this process when the kernel has done so.
func UmountKilled(dir string, drivers Drivers) error {
	e, err := Open(context.Background(), dir, drivers)
	if err != nil {
		return err
	}
	defer e.Close()
	content.AtStep = func(step string) {
		if step == "unmounted" {
			_ = unix.Kill(os.Getpid(), unix.SIGKILL)
		}
	}
	_, err = e.Umount(context.Background(), UmountRequest{Volume: ref.MustName("v")})
	return err
}

// SpendReserve spends a piece of the reserve, as on a full disk.
func (e *Engine) SpendReserve(ctx context.Context) bool { return e.spendReserve(mayUseReserve(ctx)) }

// HasReserve reports whether the reserve is whole.
func (e *Engine) HasReserve() bool { return e.pool.HasReserve() }

// BlamePool is what an error of writing to an image becomes.
func BlamePool(ctx context.Context, e *Engine, err error) error {
	return e.content.BlameFull(ctx, err)
}
