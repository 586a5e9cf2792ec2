package cli

import (
	"fmt"
	"strconv"

	"pando/internal/engine"
	"pando/internal/engine/pool"

	"github.com/spf13/cobra"
)

func itoa(n int) string { return strconv.Itoa(n) }

func (a *App) initCommand() *cobra.Command {
	var q engine.InitRequest
	var sizeFlag, minFree, zfsDataset string
	var rebuild bool
	c := &cobra.Command{
		Use:     "init",
		GroupID: "pool",
		Short:   "Make a pool, with the best driver that works here",
		Long: fmt.Sprintf(`Makes a pool in the directory --pool. With --driver auto it takes the first that
works there, found by trying: btrfs (subvolumes), reflink (image files on XFS or
another filesystem that can share blocks), or else an XFS in a sparse file of
--size. It says what it chose, why, and what would be faster. A driver that is
asked for and cannot work is an error.

--rebuild makes the catalogue of an existing pool anew from what lies in it.

New clones are refused when less than --min-free of the pool is free (default %d %%),
so that those that run do not meet a full disk.`, pool.DefaultMinFreePercent),
		Example: "  pando init\n  pando init --pool /srv/pando --size 200G\n  pando init --driver plain --pool ~/pando",
		Args:    usage(cobra.NoArgs),
	}

	f := c.Flags()
	f.StringVar(&q.Driver, "driver", engine.Auto, "auto, zfs, btrfs, reflink or plain")
	f.StringVar(&sizeFlag, "size", "",
		"of a pool in a sparse file, for example 200G (default: 100G, at most 90 % of what is free)")
	f.StringVar(&zfsDataset, "zfs-dataset", "", "dataset for the zfs driver, for example tank/pando")
	f.BoolVar(&q.Loop, "loop", false, "make a pool in a sparse file even where the filesystem could hold it")
	f.StringVar(&minFree, "min-free", strconv.Itoa(pool.DefaultMinFreePercent)+"%",
		"part of the pool that new clones must leave free")
	f.BoolVar(&rebuild, "rebuild", false, "make the catalogue of an existing pool anew")
	_ = c.RegisterFlagCompletionFunc("driver", cobra.FixedCompletions([]string{"auto", "zfs", "btrfs", "reflink", "plain"},
		cobra.ShellCompDirectiveNoFileComp))
	c.RunE = func(c *cobra.Command, _ []string) (err error) {
		q.Dir = a.poolDir()
		if rebuild {
			return a.rebuild(c)
		}

		if c.Flags().Changed("size") {
			if q.SizeBytes, err = parseSize("init", sizeFlag); err != nil {
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
			a.note("%s", n)
		}

		if a.quiet {
			return nil
		}

		faster := words(r.Faster)
		if err := a.printf("pool %s, driver %s\n", r.Dir, r.Driver); err != nil {
			return err
		}

		return a.fields("  why", r.Why, "  faster", faster,
			"  room", fmt.Sprintf("%s free of %s", size(r.FreeBytes), size(r.TotalBytes)),
			"  next", "pando golden import NAME SOURCE")
	}

	return c
}

func (a *App) rebuild(c *cobra.Command) error {
	r, err := engine.Rebuild(c.Context(), a.poolDir(), a.Drivers)
	if err != nil {
		return err
	}
	if a.json {
		return a.printJSON(r)
	}

	for _, n := range r.Notes {
		a.note("%s", n)
	}

	if err := a.printf("rebuilt the catalogue of %s: %s, %s, %s with %s\n", r.Dir, plural(r.Volumes, "volume"),
		plural(r.Snapshots, "snapshot"),
		plural(r.Goldens, "golden"), plural(r.Generations, "generation")); err != nil {
		return err
	}

	if r.Old != "" {
		a.note("the old catalogue is kept as %s", r.Old)
	}

	return nil
}

func (a *App) deinitCommand() *cobra.Command {
	var force bool
	c := &cobra.Command{
		Use:     "deinit",
		GroupID: "pool",
		Short:   "Remove the pool",
		Long: `Removes the pool and leaves no file, mount or loop device. A pool that holds
anything is refused without --force. A volume that a process uses, or a file of
somebody's among the mount points, stops it before anything is destroyed.`,
		Args: usage(cobra.NoArgs),
		RunE: func(c *cobra.Command, _ []string) error {
			r, err := engine.Deinit(c.Context(), a.poolDir(), force, a.Drivers)
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(r)
			}

			for _, w := range r.Warnings {
				a.warn("%s", w)
			}

			if a.quiet {
				return nil
			}

			return a.printf("removed the pool %s (%s destroyed)\n", r.Dir, plural(r.Destroyed, "object"))
		},
	}

	c.Flags().BoolVar(&force, "force", false, "destroy everything in it")
	return c
}
