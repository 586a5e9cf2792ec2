package web

import (
	"context"
	"net/url"
	"strings"
	"time"

	"pando/client"
	"pando/internal/base/quantity"
)

// volumeActions are those of a volume.
func volumeActions(s subject) []action {
	return []action{mountAction(), unmountAction(), snapshotAction(), cloneAction(isOwn(nil)), publishAction(s),
		rewindAction(s), rebaseAction(s), flattenAction(), pinAction(isOwn), unpinAction(isOwn), expireAction(),
		resizeAction(), labelAction(isOwn), renameAction(isOwn(nil)), destroyAction()}
}

// snapshotActions are those of a snapshot.
func snapshotActions(subject) []action {
	return []action{cloneAction(isOwn(nil)), pinAction(isOwn), unpinAction(isOwn), destroySnapshotAction()}
}

func mountAction() action {
	return action{Name: "mount", Title: "Mount", Needs: "idle",
		Fields: []field{{Name: "dir", Title: "Directory", Hint: "default: below the pool"}},
		why: isOwn(func(s subject) string {
			if s.State == "mounted" && !s.Sandboxed {
				return "It is mounted already, at " + s.Mountpoint + "."
			}
			return isMounted(s)
		}),
		do: func(ctx context.Context, c *client.Client, ref string, q url.Values) (string, error) {
			o, err := c.Mount(ctx, ref, client.MountRequest{Dir: q.Get("dir")})
			if err != nil {
				return "", err
			}
			return "mounted at " + o.Mountpoint, nil
		}}
}

func unmountAction() action {
	return action{Name: "unmount", Title: "Unmount", Needs: "mounted",
		why: isOwn(func(s subject) string {
			switch {
			case s.Sandboxed:
				return isMounted(s)
			case s.State != "mounted":
				return "It is not mounted."
			}
			return ""
		}),
		do: func(ctx context.Context, c *client.Client, ref string, _ url.Values) (string, error) {
			_, err := c.Unmount(ctx, ref)
			return "unmounted", err
		}}
}

func snapshotAction() action {
	return action{Name: "snapshot", Title: "Snapshot",
		Fields: []field{{Name: "name", Title: "Name", Hint: "default: the time"}}, why: isOwn(nil),
		do: func(ctx context.Context, c *client.Client, ref string, q url.Values) (string, error) {
			o, err := c.Snapshot(ctx, ref, client.SnapshotRequest{Name: q.Get("name"), Key: q.Get("key")})
			if err != nil {
				return "", err
			}
			return "snapshot " + o.Name, nil
		}}
}

// cloneAction makes a volume of anything.
func cloneAction(why func(*visit, subject) string) action {
	return action{Name: "clone", Title: "Clone", why: why,
		Fields: []field{{Name: "name", Title: "New volume", Required: true},
			{Name: "ttl", Title: "Expires after", Hint: "4h, 7d; default: never"},
			{Name: "mount", Title: "Mount it", Choices: []string{"no", "yes"}}},
		do: func(ctx context.Context, c *client.Client, ref string, q url.Values) (string, error) {
			ttl, err := durationIn(q.Get("ttl"))
			if err != nil {
				return "", err
			}
			o, err := c.Clone(ctx, client.CloneRequest{From: ref, Name: q.Get("name"), Key: q.Get("key"),
				Make: client.Make{Mount: q.Get("mount") == "yes", TTL: ttl.Seconds()}})
			if err != nil {
				return "", err
			}
			return strings.TrimSpace("cloned as " + o.Name + " " + o.Mountpoint), nil
		}}
}

// durationIn parses a duration that may be missing.
func durationIn(text string) (time.Duration, error) {
	if strings.TrimSpace(text) == "" {
		return 0, nil
	}
	return quantity.ParseDuration("set", text)
}

func publishAction(s subject) action {
	return action{Name: "publish", Title: "Publish", why: isOwn(nil),
		Fields: []field{{Name: "golden", Title: "Golden", Value: s.Golden, Required: true}},
		do: func(ctx context.Context, c *client.Client, ref string, q url.Values) (string, error) {
			return started(c.Publish(ctx, q.Get("golden"), client.PublishRequest{Volume: ref, Key: q.Get("key")}))
		}}
}

func rewindAction(s subject) action {
	var names []string
	if s.details != nil {
		for _, snap := range s.details.Snapshots {
			_, at, _ := strings.Cut(snap.Name, "@")
			names = append(names, at)
		}
	}

	return action{Name: "rewind", Title: "Rewind",
		Fields: []field{{Name: "snapshot", Title: "To", Choices: names, Required: true}},
		why: isOwn(func(s subject) string {
			if len(names) == 0 {
				return "It has no snapshot."
			}
			return isMounted(s)
		}),
		do: func(ctx context.Context, c *client.Client, ref string, q url.Values) (string, error) {
			o, err := c.Rewind(ctx, ref, q.Get("snapshot"), false)
			if err != nil {
				return "", err
			}
			return "rewound; its state before is " + o.Before, nil
		}}
}

func rebaseAction(s subject) action {
	return action{Name: "rebase", Title: "Rebase",
		Fields: []field{{Name: "onto", Title: "Onto", Value: s.Golden, Required: true}},
		why: isOwn(func(s subject) string {
			if s.Golden == "" {
				return "It was not cloned from a golden."
			}
			return isMounted(s)
		}),
		do: func(ctx context.Context, c *client.Client, ref string, q url.Values) (string, error) {
			return started(c.Rebase(ctx, ref, q.Get("onto"), ""))
		}}
}

func flattenAction() action {
	return action{Name: "flatten", Title: "Flatten", why: isOwn(isMounted),
		do: func(ctx context.Context, c *client.Client, ref string, _ url.Values) (string, error) {
			return started(c.Flatten(ctx, ref))
		}}
}

// pinAction keeps objects of all kinds. may returns the check of who may.
func pinAction(may func(func(subject) string) func(*visit, subject) string) action {
	return action{Name: "pin", Title: "Pin", Needs: "unpinned", why: may(nil),
		Fields: []field{{Name: "for", Title: "For", Hint: "2h, 7d; default: until unpinned"}},
		do: func(ctx context.Context, c *client.Client, ref string, q url.Values) (string, error) {
			d, err := durationIn(q.Get("for"))
			if err == nil {
				_, err = c.Pin(ctx, ref, d.Seconds())
			}
			return "pinned", err
		}}
}

func unpinAction(may func(func(subject) string) func(*visit, subject) string) action {
	return action{Name: "unpin", Title: "Unpin", Needs: "pinned",
		why: may(func(s subject) string {
			if s.PinnedUntil == nil {
				return "It is not pinned."
			}
			return ""
		}),
		do: func(ctx context.Context, c *client.Client, ref string, _ url.Values) (string, error) {
			_, err := c.Unpin(ctx, ref)
			return "unpinned", err
		}}
}

func expireAction() action {
	return action{Name: "expire", Title: "Expire", why: isOwn(nil),
		Fields: []field{{Name: "ttl", Title: "After", Hint: "4h, 7d; empty: never"}},
		do: func(ctx context.Context, c *client.Client, ref string, q url.Values) (string, error) {
			d, err := durationIn(q.Get("ttl"))
			if err != nil {
				return "", err
			}
			o, err := c.SetTTL(ctx, ref, d.Seconds())
			if err != nil || o.ExpiresAt == nil {
				return "does not expire", err
			}
			return "expires " + formatTime(*o.ExpiresAt), nil
		}}
}

func resizeAction() action {
	return action{Name: "resize", Title: "Resize",
		Fields: []field{{Name: "size", Title: "Size", Hint: "20G", Required: true}},
		why: isOwn(func(s subject) string {
			switch {
			case s.Overlay:
				return "It is an overlay: flatten it first."
			case s.SizeBytes == 0:
				return "Volumes of this pool have no size of their own."
			}
			return ""
		}),
		do: func(ctx context.Context, c *client.Client, ref string, q url.Values) (string, error) {
			n, err := quantity.ParseSize("resize", q.Get("size"))
			if err == nil {
				_, err = c.Resize(ctx, ref, n)
			}
			return "has " + quantity.FormatBytes(n), err
		}}
}

// labelAction changes labels of volumes and goldens.
func labelAction(may func(func(subject) string) func(*visit, subject) string) action {
	return action{Name: "label", Title: "Label", why: may(nil),
		Fields: []field{{Name: "set", Title: "Set", Hint: "KEY=VALUE"}, {Name: "remove", Title: "Remove", Hint: "KEY"}},
		do: func(ctx context.Context, c *client.Client, ref string, q url.Values) (string, error) {
			set := map[string]string{}
			for _, text := range strings.Fields(q.Get("set")) {
				key, value, _ := strings.Cut(text, "=")
				set[key] = value
			}
			_, err := c.SetLabels(ctx, ref, set, strings.Fields(q.Get("remove")), "")
			return "labels changed", err
		}}
}

// renameAction renames volumes and goldens.
func renameAction(why func(*visit, subject) string) action {
	return action{Name: "rename", Title: "Rename", Fields: []field{{Name: "name", Title: "To", Required: true}}, why: why,
		do: func(ctx context.Context, c *client.Client, ref string, q url.Values) (string, error) {
			_, err := c.Rename(ctx, ref, q.Get("name"), "")
			return "renamed to " + q.Get("name"), err
		}}
}

func destroyAction() action {
	return action{Name: "destroy", Title: "Destroy", Danger: true, Needs: "unpinned",
		why: isOwn(func(s subject) string {
			if s.Sandboxed {
				return isMounted(s)
			}
			if s.details != nil {
				for _, snap := range s.details.Snapshots {
					if snap.PinnedUntil != nil {
						return "Its snapshot " + snap.Name + " is pinned: unpin it first."
					}
				}
			}
			return isPinned(s)
		}),
		do: func(ctx context.Context, c *client.Client, ref string, q url.Values) (string, error) {
			return "destroyed", c.Destroy(ctx, ref, q.Get("etag"))
		}}
}

func destroySnapshotAction() action {
	return action{Name: "destroy-snapshot", Title: "Destroy", Danger: true, why: isOwn(isPinned),
		do: func(ctx context.Context, c *client.Client, ref string, _ url.Values) (string, error) {
			volume, name, _ := strings.Cut(ref, "@")
			return "destroyed", c.DestroySnapshot(ctx, volume, name, "")
		}}
}
