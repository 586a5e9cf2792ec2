package content

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/linux/mount"
	"pando/internal/linux/treewalk"
	"pando/internal/linux/usermount"
	"pando/internal/tree/treecopy"

	"golang.org/x/sys/unix"
)

// A user without privileges mounts overlays in user namespaces. Overlayfs keeps its marks in attributes that users may
// write then (Identity.UserXattr): mounted with those of root, such an overlay would show files that were deleted. So
// root never mounts a user's overlay, and a user never one of root.
//
// A program that runs in such an overlay has it mounted in a mount namespace of its own, below the pool, and nobody
// else sees it: its mount record has no mount ID. The kernel knows whether an upper layer is in use, by whomever.

// CheckOverlayUser returns an error if this user must not mount an overlay. Permission.
func (acc *Access) CheckOverlayUser(op, ref string, id driver.Identity) error {
	switch {
	case id.Lower == "":
		return nil
	case id.UserXattr && CanMount():
		return errs.New(errs.Permission, op, ref,
			"it is the overlay of a user, with attributes that overlays of root do not have: root must not mount it").
			WithHint("run it as the user who owns the pool, or make it a volume of its own as that user with %s",
				errs.Run("flatten", ref))
	case !id.UserXattr && !CanMount():
		return errs.New(errs.Permission, op, ref,
			"it is an overlay that root made, with attributes that only root can write").
			WithHint("run it as root")
	}
	return nil
}

// UserLayers returns the layers of a user's overlay, for the namespace that it will be mounted in. The upper layer is
// ready for that. NotFound, Damaged.
func (acc *Access) UserLayers(ctx context.Context, id driver.Identity) (usermount.Layers, error) {
	l, err := acc.userLayers(ctx, id)
	if err != nil {
		return l, err
	}
	return l, prepareUserUpper(ctx, l)
}

// userLayers is UserLayers, and writes nothing.
func (acc *Access) userLayers(ctx context.Context, id driver.Identity) (usermount.Layers, error) {
	l := usermount.Layers{Name: overlayName(id.ID), Options: usermount.Options(id.Ephemeral)}
	upper, err := acc.drv.Attachment(ctx, id.ID)
	if err != nil {
		return l, err
	}

	lower, err := acc.drv.Attachment(ctx, id.Lower)
	if err != nil {
		return l, err
	}

	if l.Object, l.Lower = upper.Tree, lower.Tree; l.Object == "" || l.Lower == "" {
		return l, errs.New(errs.Unsupported, "mount", string(id.ID), "the layers of a user's overlay are directories")
	}
	return l, nil
}

// prepareUserUpper is prepareUpper for a user: it writes only what that user owns.
func prepareUserUpper(ctx context.Context, l usermount.Layers) error {
	to, err := os.Open(l.Object)
	if err != nil {
		return errs.Wrap("mount", l.Object, err)
	}

	defer to.Close()

	if err := checkUpper(to, mount.UpperDir, mount.WorkDir, usedDir); err != nil {
		return err
	}

	// The directory that the kernel made has no permissions.
	unused, err := isUnused(to)
	if err != nil {
		return err
	}
	if !unused {
		return tidyUserUpper(ctx, l.Object)
	}

	from, err := os.Open(l.Lower)
	if err != nil {
		return errs.Wrap("mount", l.Lower, err)
	}

	defer from.Close()

	if err := treecopy.CopyAttributes(ctx, from, "", to, mount.UpperDir); err != nil {
		return err
	}
	return dropAttributes(to, mount.UpperDir, "user.overlay.")
}

// tidyUserUpper makes the upper layer in a directory, which is not mounted, such that its owner can read and copy
// it, and that overlayfs mounts it again: see forgetVolatile.
func tidyUserUpper(ctx context.Context, object string) error {
	if err := usermount.OpenWork(object); err != nil {
		return err
	}
	return treewalk.Remove(ctx, filepath.Join(object, usedDir, "incompat"))
}

// mountInside prepares a user's overlay for a program that will have it mounted at t in a namespace of its own: it
// makes the directory there, and returns the mount record.
func (acc *Access) mountInside(
	ctx context.Context, row catalog.Row, a catalog.MountRecord, t Target,
) (catalog.MountRecord, error) {
	if err := acc.CheckOverlayUser("mount", row.Name, row.Identity); err != nil {
		return a, err
	}

	if !t.inside {
		return a, InsideOnly("mount", row.Name)
	}

	if _, err := acc.UserLayers(ctx, row.Identity); err != nil {
		return a, acc.blameFull(ctx, err)
	}

	if err := os.MkdirAll(filepath.Dir(t.Path), 0o700); err != nil {
		return a, errs.Wrap("mount", t.Path, err)
	}
	if err := os.Mkdir(t.Path, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return a, acc.blameFull(ctx, errs.Wrap("mount", t.Path, err))
	}

	a.MountNS = 0 // not known yet, and not this one
	return a, nil
}

// InsideOnly returns the error of an operation that would mount a user's overlay where all can see it. Permission.
func InsideOnly(op, name string) error {
	return errs.New(errs.Permission, op, name,
		"a user can mount an overlay only in a namespace of its own, where other programs do not see it").
		WithHint("work inside it with %s", errs.Run("shell", name))
}

// Inside is CheckTarget for a user's overlay that a program will have mounted in a namespace of its own.
func (acc *Access) Inside(name string) Target {
	return Target{Path: acc.pool.DefaultMountpoint(name), inside: true}
}

// userState is MountState for a user's overlay. If it is not mounted, its owner can read the whole upper layer: the
// kernel has left a directory without permissions there.
func (acc *Access) userState(row catalog.Row) State {
	if acc.upperStaysInUse(row, releaseGrace) {
		return HeldElsewhere
	}
	if w, err := acc.drv.Attachment(context.Background(), row.ID); err == nil && w.Tree != "" {
		_ = tidyUserUpper(context.Background(), w.Tree) // if this fails, reading it does, too, and says why
	}
	return NotMounted
}

// userUpperInUse is upperInUse for a user. Where users may not have namespaces any more, the mount tables that this
// process can read decide.
func (acc *Access) userUpperInUse(ctx context.Context, id driver.Identity) bool {
	l, err := acc.userLayers(ctx, id)
	if err != nil {
		return !errs.Is(err, errs.NotFound)
	}

	used, err := l.InUse(ctx)
	switch {
	case errs.Is(err, errs.Unsupported):
		t, err := acc.tables.recentTables()
		return err != nil || t.OverlayDevice(l.Name) != 0
	case errors.Is(err, unix.ENOENT):
		return false // a layer is gone, or was never whole
	}
	return used || err != nil
}

// tryUserUpper is TryUpper for a user, whose tree is the directory dir, empty. Unsupported.
func tryUserUpper(ctx context.Context, dir string) error {
	root, err := os.Open(dir)
	if err != nil {
		return errs.Wrap("mount", dir, err)
	}

	defer root.Close()

	const lower, file = "lower", "gone"
	if err := MakeUpper(root); err != nil {
		return err
	}
	if err := os.Mkdir(filepath.Join(dir, lower), 0o700); err != nil {
		return errs.Wrap("make directory", lower, err)
	}
	if err := os.WriteFile(filepath.Join(dir, lower, file), nil, 0o600); err != nil {
		return errs.Wrap("write", file, err)
	}

	l := usermount.Layers{Lower: filepath.Join(dir, lower), Object: dir, Name: "pando",
		Options: usermount.Options(false)}
	if err := l.Try(ctx, file); err != nil {
		return err
	}

	for _, name := range []string{lower, mount.UpperDir, mount.WorkDir} {
		if err := treewalk.Remove(ctx, filepath.Join(dir, name)); err != nil {
			return err
		}
	}
	return nil
}

// overlayRef returns the name of the volume whose overlay an object is, or that it is a copy of.
func overlayRef(id driver.Identity) string {
	if id.Kind == driver.Volume && id.Name != "" {
		return id.Name
	}
	volume, _, _ := strings.Cut(id.Origin, "@")
	return cmp.Or(volume, string(id.ID))
}

// withUserLayers is withLayers for a user's overlay.
func (acc *Access) withUserLayers(
	ctx context.Context, id driver.Identity, readOnly bool, fn func(OverlayRoots) error,
) error {
	if err := acc.CheckOverlayUser("mount", overlayRef(id), id); err != nil {
		return err
	}

	l, err := acc.userLayers(ctx, id)
	if err != nil {
		return err
	}

	up, err := os.Open(l.Object)
	if err != nil {
		return errs.Wrap("open", l.Object, err)
	}

	defer up.Close()

	low, err := os.Open(l.Lower)
	if err != nil {
		return errs.Wrap("open", l.Lower, err)
	}

	defer low.Close()

	l.ReadOnly, l.Options = readOnly, usermount.Options(false)
	return withMerged(low, up, readOnly, merging{
		prepare: func() error { return prepareUserUpper(ctx, l) },
		mount:   func() (*mount.Detached, error) { return l.Mount(ctx) },
	}, fn)
}
