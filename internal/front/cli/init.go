package cli

import (
	"context"
	"fmt"
	"strconv"

	"pando/internal/base/errs"
	"pando/internal/base/units"
	"pando/internal/engine"
	"pando/internal/engine/pool"
	"pando/internal/remote/replicate"

	"github.com/spf13/cobra"
)

func itoa(n int) string { return strconv.Itoa(n) }

// initHelp is the text of `pando init --help`.
var initHelp = fmt.Sprintf(`Create a pool in the directory given with --pool. With --driver auto, pando
tries drivers and takes the first that works: btrfs (subvolumes), reflink (image
files on XFS or another filesystem that can share blocks), or else reflink on an
XFS in a sparse file of --size bytes. It prints which driver it chose, why, and
what would be faster. If the driver that you ask for cannot work here, init
fails.

--rebuild creates the catalogue of an existing pool again from the contents of
the pool.

pando refuses new clones while less than --min-free of the pool is free (default
%d %%), so that existing clones do not run out of space.`, pool.DefaultMinFreePercent)

func (a *App) initCommand() *cobra.Command {
	var q engine.InitRequest
	var sizeFlag, minFree, zfsDataset string
	var rebuild bool
	c := &cobra.Command{
		Use:     "init",
		GroupID: "pool",
		Short:   "Create a pool with the best driver for this host",
		Long:    initHelp,
		Example: "  pando init\n  pando init --pool /srv/pando --size 200G\n  pando init --driver plain --pool ~/pando",
		Args:    cobra.NoArgs,
	}

	f := c.Flags()
	f.StringVar(&q.Driver, "driver", engine.Auto, "use `DRIVER`: auto, zfs, btrfs, reflink or plain")
	f.StringVar(&sizeFlag, "size", "",
		"`SIZE` in bytes of a pool in a sparse file, for example 200G (default: 100G, but at most 90 % of the free space)")
	f.StringVar(&zfsDataset, "zfs-dataset", "", "use `DATASET` with the zfs driver, for example tank/pando")
	f.BoolVar(&q.Loop, "loop", false, "put the pool into a sparse file even if the filesystem could hold it directly")
	f.StringVar(&minFree, "min-free", strconv.Itoa(pool.DefaultMinFreePercent)+"%",
		"keep this `PERCENT` of the pool free when creating clones")
	f.BoolVar(&rebuild, "rebuild", false, "create the catalogue of an existing pool again")
	_ = c.RegisterFlagCompletionFunc("driver", cobra.FixedCompletions([]string{"auto", "zfs", "btrfs", "reflink", "plain"},
		cobra.ShellCompDirectiveNoFileComp))
	c.RunE = func(c *cobra.Command, _ []string) (err error) {
		q.Dir = a.poolDir()
		if rebuild {
			return a.rebuildCatalogue(c)
		}

		if c.Flags().Changed("size") {
			if q.SizeBytes, err = units.ParseSize("init", sizeFlag); err != nil {
				return err
			}
		}

		if q.Dataset = zfsDataset; zfsDataset != "" && q.Driver == engine.Auto {
			q.Driver = "zfs"
		}

		if q.MinFreePercent, err = parsePercent("init", minFree); err != nil {
			return err
		}

		r, err := engine.Init(c.Context(), q, a.Drivers)
		if err != nil {
			return err
		}
		if a.json {
			return a.printJSON(r)
		}

		for _, n := range r.Notes {
			a.printNote("%s", n)
		}

		if a.quiet {
			return nil
		}

		faster := renderMessage(r.Faster)
		a.printf("pool %s, driver %s\n", r.Dir, r.Driver)

		a.printFields("  why", r.Why, "  faster", faster,
			"  room", fmt.Sprintf("%s free of %s", formatBytes(r.FreeBytes), formatBytes(r.TotalBytes)),
			"  next", "pando golden import NAME SOURCE")
		return nil
	}

	return c
}

func (a *App) rebuildCatalogue(c *cobra.Command) error {
	r, err := engine.Rebuild(c.Context(), a.poolDir(), a.Drivers)
	if err != nil {
		return err
	}
	if a.json {
		return a.printJSON(r)
	}

	for _, n := range r.Notes {
		a.printNote("%s", n)
	}

	a.printf("rebuilt the catalogue of %s: %s, %s, %s with %s\n", r.Dir, errs.Plural(r.Volumes, "volume"),
		errs.Plural(r.Snapshots, "snapshot"),
		errs.Plural(r.Goldens, "golden"), errs.Plural(r.Generations, "generation"))

	if r.Old != "" {
		a.printNote("the old catalogue is kept as %s", r.Old)
	}

	return nil
}

func (a *App) deinitCommand() *cobra.Command {
	var force, loseKeys bool
	c := &cobra.Command{
		Use:     "deinit",
		GroupID: "pool",
		Short:   "Remove the pool",
		Long: `Remove the pool, including its files, mounts and loop devices. Without --force,
the command fails if the pool contains anything. It also fails if a process uses
a volume, if files of others lie among the mount points or the data, or if the
pool holds the only key to a remote. What it refuses to remove, it has not
changed.

To find out about keys, pando asks the remotes, and the pool's copies of their
lists of keys if they cannot be reached. Keep what is stored there with
` + "`pando remote key export`" + ` or ` + "`pando remote key add`" + `, or give it up with
--lose-keys.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			mayForget := a.mayForget
			if loseKeys {
				mayForget = nil
			}
			q := engine.DeinitRequest{Dir: a.poolDir(), Force: force}
			r, err := engine.Deinit(c.Context(), q, a.Drivers, mayForget)
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(r)
			}

			for _, w := range r.Warnings {
				a.printWarning("%s", w)
			}

			if a.quiet {
				return nil
			}

			return a.printf("removed the pool %s (%s destroyed)\n", r.Dir, errs.Plural(r.Destroyed, "object"))
		},
	}

	c.Flags().BoolVar(&force, "force", false, "destroy everything in the pool")
	c.Flags().BoolVar(&loseKeys, "lose-keys", false,
		"with --force: forget remotes even if nobody can read them afterwards, or it is not known who can")
	return c
}

// mayForget returns an error if the pool's remotes must not be forgotten: see replicate.CheckOtherKeys.
func (a *App) mayForget(ctx context.Context, _ []string) error {
	access, err := a.remoteAccess()
	if err != nil {
		return err
	}
	return replicate.CheckOtherKeys(ctx, a.poolDir(), access)
}
