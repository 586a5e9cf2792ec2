package cli

import (
	"context"
	"path/filepath"
	"strings"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/engine"

	"github.com/spf13/cobra"
)

func (a *App) umountCommand() *cobra.Command {
	var discard bool
	c := &cobra.Command{
		Use:     "umount VOLUME|DIR...",
		GroupID: "volumes",
		Short:   "Unmount volumes",
		Long: `Unmount each VOLUME, or the volume that is mounted at DIR (a word with a slash, or
a mount point whose name no volume has), and return the space of files deleted in
it to the pool. VOLUME may be a quoted glob. If something uses a volume, pando names the processes and mount namespaces
and leaves it mounted. If any name is unknown, nothing is unmounted.

Data in memory is written to the pool first. If that fails, for example because
the pool is full, or if it has failed since the volume was mounted, umount fails
and the volume stays mounted, so that you can copy the data elsewhere. --discard
gives it up.`,
		Example:           "  pando umount job-17\n  pando umount /srv/job-17\n  pando umount 'agent-*'",
		Args:              cobra.MinimumNArgs(1),
		ValidArgsFunction: a.completeMounted,
		RunE: a.withPool(func(ctx context.Context, e *engine.Engine, args []string) error {
			what, err := toUnmount(ctx, e, args)
			if err != nil {
				return err
			}
			return doEach(ctx, a, what, "could not be unmounted", func(r ref.Ref) (api.Object, error) {
				volume, err := ref.ParseName("umount", r.Name)
				if err != nil {
					return api.Object{}, err
				}
				return e.Umount(ctx, engine.UmountRequest{Volume: volume, Discard: discard})
			}, func(v api.Object) error { return a.printResult(nil, "", "unmounted %s\n", v.Name) })
		}),
	}
	c.Flags().BoolVar(&discard, "discard", false, "give up data that could not be stored in the pool")
	return c
}

// toUnmount finds the volumes that words name, some by the directories where they are mounted. Invalid, NotFound.
func toUnmount(ctx context.Context, e *engine.Engine, words []string) (chosen, error) {
	names := make([]string, len(words))
	for i, w := range words {
		names[i] = w
		mounted, err := mountedAt(ctx, e, w)
		switch {
		case strings.Contains(w, "/") && err != nil:
			return chosen{}, err
		case strings.Contains(w, "/"), err == nil && !isVolume(ctx, e, w):
			names[i] = mounted
		}
	}
	return choose(ctx, e, "umount", names, aVolume)
}

// isVolume reports whether a volume has a name.
func isVolume(ctx context.Context, e *engine.Engine, word string) bool {
	name, err := ref.ParseName("umount", word)
	if err == nil {
		_, err = e.Mountpoints(ctx, "umount", name)
	}
	return err == nil
}

// mountedAt returns the name of the volume that is mounted at a directory. NotFound.
func mountedAt(ctx context.Context, e *engine.Engine, dir string) (string, error) {
	all, err := e.Mountpoints(ctx, "umount")
	if err != nil {
		return "", err
	}

	path, err := filepath.Abs(dir)
	if err != nil {
		return "", errs.Wrap("umount", dir, err)
	}
	real, err := filepath.EvalSymlinks(path)
	if err != nil {
		real = path // a link to a device that is gone, or nothing
	}
	for _, v := range all {
		if v.Mounted() && (v.Mountpoint == path || v.Mountpoint == real) {
			return v.Name, nil
		}
	}
	return "", errs.New(errs.NotFound, "umount", dir, "no volume is mounted there").
		WithHint("list mounted volumes with %s", errs.Run("ls", errs.Param("filter", "state=mounted")))
}

// completeMounted completes volumes that are mounted.
func (a *App) completeMounted(c *cobra.Command, _ []string, word string) ([]string, cobra.ShellCompDirective) {
	if strings.Contains(word, "/") {
		return nil, cobra.ShellCompDirectiveFilterDirs
	}
	return a.completeWords(c, func(ctx context.Context, e *engine.Engine) (out []string, _ error) {
		all, err := e.Mountpoints(ctx, "complete")
		for _, v := range all {
			if v.Mounted() {
				out = append(out, v.Name)
			}
		}
		return out, err
	})
}
