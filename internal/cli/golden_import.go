package cli

import (
	"context"

	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine"

	"github.com/spf13/cobra"
	"golang.org/x/term"
)

func (a *App) goldenImportCommand() *cobra.Command {
	var q engine.ImportRequest
	var fs, sizeFlag, keep, as string
	c := &cobra.Command{
		Use:   "import NAME SOURCE",
		Short: "Make a golden from a directory, an archive or a disk image",
		Long: `Makes golden NAME from SOURCE: a directory, a tar archive (plain, gzip or zstd,
told by its content), a disk image or block device, or - for a tar on standard
input. It keeps owners, modes, times, links, extended attributes, ACLs, holes and
device nodes. The root directory of the golden has mode 0755.

An image must hold a whole and undamaged ext4 or XFS: its superblock and size are
checked, and then, on the copy, the filesystem (e2fsck -n, xfs_repair -n). A log
that a crash left is replayed, in the copy. --fs none makes a raw block volume of
any image. --force imports an image as it is: truncated, damaged, or a block device
that is in use.

Two imports of one name at once: one does the work, the other waits for it and
returns the same golden. An import that is interrupted leaves nothing.

With --adopt, SOURCE is a directory that a live system works with: what changes
while it is copied is copied again, until a copy of one moment is there. It is
refused if the directory does not come to rest. --replace then puts a volume of
the golden, mounted, in the place of the directory, in one step, and keeps the old
directory beside it.`,
		Example: `  pando golden import go /usr/local/go
  docker export c1 | pando golden import rootfs -
  pando golden import vm disk.img
  pando golden import disk /dev/vg/whole-disk --fs none
  pando golden import cache /var/cache/golden --adopt --replace --as cache-live`,
		Args: usage(cobra.ExactArgs(2)),
		ValidArgsFunction: func(_ *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
			if len(args) == 1 {
				return nil, cobra.ShellCompDirectiveDefault // a path
			}
			return nil, cobra.ShellCompDirectiveNoFileComp
		},
	}

	f := c.Flags()
	f.StringVar(&fs, "fs", "",
		"what volumes hold: native, ext4, xfs or none (default: the driver's, or what an image holds)")
	f.StringVar(&sizeFlag, "size", "", "room in each volume, for example 64G (default: 32G, more for larger trees)")
	f.BoolVar(&q.Update, "update", false, "make the next generation of a golden that exists")
	keepFlag(f, &keep)
	f.BoolVar(&q.Force, "force", false, "import an image as it is, although it is truncated, damaged or in use")
	f.BoolVar(&q.Adopt, "adopt", false, "SOURCE is a directory in use: copy again what changes during the import")
	f.BoolVar(&q.Replace, "replace", false,
		"with --adopt: put a volume of the golden in the place of SOURCE, which is kept beside it")
	f.StringVar(&as, "as", "", "with --replace: name of the volume (default: NAME-live)")
	_ = c.RegisterFlagCompletionFunc("fs", cobra.FixedCompletions([]string{"native", "ext4", "xfs", "none"},
		cobra.ShellCompDirectiveNoFileComp))
	c.RunE = func(c *cobra.Command, args []string) (err error) {
		if q.Name, err = ref.ParseName("import", args[0]); err != nil {
			return err
		}

		if as != "" {
			if q.ReplaceVolume, err = ref.ParseName("adopt", as); err != nil {
				return err
			}
		}

		q.Source, q.Stdin = args[1], a.Stdin
		if q.Source == "-" && term.IsTerminal(int(a.Stdin.Fd())) {
			return errs.New(errs.Invalid, "import", "-",
				"standard input is a terminal").WithHint("pipe an archive into it: tar c . | pando golden import %s -", q.Name)
		}

		switch q.FS = driver.FS(fs); q.FS {
		case "", driver.Native, driver.Ext4, driver.XFS, driver.None:
		default:
			return errs.New(errs.Invalid, "import", fs,
				"there is no such kind of filesystem").WithHint("choose --fs native, ext4, xfs or none")
		}

		if c.Flags().Changed("size") {
			if q.SizeBytes, err = parseSize("import", sizeFlag); err != nil {
				return err
			}
		}

		if q.Keep, err = parseKeep("import", keep); err != nil {
			return err
		}

		return a.with(func(ctx context.Context, e *engine.Engine, _ []string) error {
			return a.importGolden(ctx, e, q)
		})(c, args)
	}

	return c
}

func (a *App) importGolden(ctx context.Context, e *engine.Engine, q engine.ImportRequest) error {
	var out engine.Imported
	err := a.track(func(t *progress.Tracker) (err error) {
		q.Tracker = t
		out, err = e.Import(ctx, q)
		return err
	})
	if err != nil {
		return err
	}

	for _, w := range out.Warnings {
		a.warn("%s", w)
	}

	if a.json {
		return a.printJSON(out)
	}

	a.noteRemoved(out.Removed)
	if out.Waited {
		a.note("another pando was importing it: this is what it made")
	} else if out.Files > 0 {
		a.note("%s, %s, in %s on disk", plural(int(out.Files), "file"), size(out.LogicalBytes),
			plural(int(out.Extents), "extent"))
	}

	if out.Changed > 0 {
		a.note("what changed during the import was copied again: directories %d, passes %d", out.Changed, out.Passes)
	}

	if out.Replaced != "" {
		a.note("%s is volume %s now; the old directory is %s", out.Replaced, out.Volume, out.Aside)
		a.note("when nobody needs that any more: rm -rf %s", shellWord(out.Aside))
	}

	return a.printf("%s\n", ref.Generation(out.Golden, out.Generation))
}
