package engine

import (
	"context"
	"os"

	"pando/internal/driver"
	"pando/internal/engine/content"
	"pando/internal/linux/sandbox"
	"pando/internal/linux/usermount"
)

// withoutRoot completes the sandbox of a user without privileges: it has a user namespace, and a user's overlay is
// mounted in it.
func (e *Engine) withoutRoot(ctx context.Context, s Sandbox, vol Info, spec *sandbox.Spec) error {
	if content.CanMount() {
		return nil
	}

	if err := s.inUserNamespace(spec); err != nil {
		return err
	}

	row, err := e.rowOf(ctx, driver.ObjectID(vol.ID))
	if err != nil || !row.UserXattr {
		return err
	}

	layers, err := e.content.UserLayers(ctx, row.Identity)
	if err != nil {
		return err
	}

	if s.Root {
		spec.Root, spec.RootOverlay = "", layers.MountOptions()
		return nil
	}

	for i, m := range spec.Mounts {
		if m.Kind == sandbox.Bind && m.Source == vol.Mountpoint {
			spec.Mounts[i] = sandbox.Mount{Kind: sandbox.Overlay, Target: m.Target, Options: layers.MountOptions()}
		}
	}
	return nil
}

// inUserNamespace gives a sandbox a user namespace. Unsupported.
func (s Sandbox) inUserNamespace(spec *sandbox.Spec) (err error) {
	if spec.UserNS, err = userNamespace(opRun, s.User); err != nil {
		return err
	}

	// The host's network is not that of the namespace, and so neither is /sys.
	for i, m := range spec.Mounts {
		spec.Mounts[i].Optional = m.Optional || m.Kind == sandbox.Sys
	}
	return nil
}

// userNamespace returns the IDs of a user namespace for a program that runs as user. "": it keeps the ID of this
// user, and no other has a meaning. Else this user is root in it, and the other IDs are those of its ranges in
// /etc/subuid and /etc/subgid, if there are any. Unsupported: the setting that forbids user namespaces.
func userNamespace(op, user string) (*sandbox.UserNS, error) {
	if err := usermount.Forbidden(op, user); err != nil {
		return nil, err
	}

	uid, gid := os.Geteuid(), os.Getegid()
	if user == "" {
		own := func(id int) []sandbox.IDMap { return []sandbox.IDMap{{Inside: id, Host: id, Size: 1}} }
		return &sandbox.UserNS{UIDs: own(uid), GIDs: own(gid)}, nil
	}

	return sandbox.RootNamespace(uid, gid)
}
