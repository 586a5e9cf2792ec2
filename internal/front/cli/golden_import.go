package cli

import (
	"context"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/base/units"
	"pando/internal/driver"
	"pando/internal/engine"

	"github.com/spf13/cobra"
	"golang.org/x/term"
)

// goldenImportHelp is the text of `pando golden import --help`.
const goldenImportHelp = `Create golden NAME from SOURCE: a directory, a tar archive (plain, gzip or zstd,
recognised by content), a disk image, a block device, or - for a tar archive on
standard input. The import keeps owners, modes, times, links, extended
attributes, ACLs, holes and device nodes. The root directory of the golden has
mode 0755.

An image (raw or qcow2, also compressed, but without a backing file) must
contain a complete and undamaged ext4 or XFS. pando checks its superblock and
size, then the filesystem in the copy (e2fsck -n, xfs_repair -n).
A log left by a crash is replayed in the copy. With --fs none, any image becomes
a raw block volume. --force imports an image without these checks: truncated,
damaged, or from a block device in use.

If two imports of one name run at once, one does the work; the other waits and
returns the same golden. An interrupted import leaves nothing behind.

With --git, SOURCE is the URL of a git repository. The golden holds all branches
and tags, and the default branch is checked out; docs/git.md explains more.

With --adopt, SOURCE is a directory that programs are using. pando copies files
again that change during the copy, until it has a copy of a single point in
time, and fails if the directory does not stop changing. --replace then puts a
mounted volume of the golden in the directory's place, in one step, and keeps
the old directory beside it.

With --preset, the golden has no files that its clones must not share, such as
the identity of a Docker engine. A preset is a file of rules, which also say how
to find a process that still runs on SOURCE: then the import fails (in_use).
SOURCE is not changed. docker is for the data-root of a stopped dockerd.`

func (a *App) goldenImportCommand() *cobra.Command {
	var q engine.ImportRequest
	var fs, sizeFlag, keep, as string
	var repository gitSource
	c := &cobra.Command{
		Use:   "import NAME SOURCE",
		Short: "Create a golden from a directory, an archive or a disk image",
		Long:  goldenImportHelp,
		Example: `  pando golden import go /usr/local/go
  docker export c1 | pando golden import rootfs -
  pando golden import toolchain /opt/toolchain --overlay
  pando golden import vm disk.img
  pando golden import repo https://github.com/git/git --git
  pando golden import disk /dev/vg/whole-disk --fs none
  pando golden import images /srv/docker --preset docker
  pando golden import cache /var/cache/golden --adopt --replace --as cache-live`,
		Args: cobra.ExactArgs(2),
		ValidArgsFunction: func(_ *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
			if len(args) == 1 {
				return nil, cobra.ShellCompDirectiveDefault // a path
			}
			return nil, cobra.ShellCompDirectiveNoFileComp
		},
	}

	f := c.Flags()
	f.StringVar(&fs, "fs", "",
		"filesystem `KIND` of the volumes: native, ext4, xfs or none (default: the driver's, or that of the image)")
	f.StringVar(&sizeFlag, "size", "",
		"`SIZE` of each volume in bytes, for example 64G (default: 32G, or more for large trees)")
	f.BoolVar(&q.Update, "update", false, "create the next generation of an existing golden")
	keepFlag(f, &keep)
	overlay := overlayPolicyFlag(c, "import")
	labels := a.labelFlag(c, "import", "the golden")
	presetFlag(c, &q.Preset)
	f.BoolVar(&q.Force, "force", false, "import an image even if it is truncated, damaged or in use")
	f.BoolVar(&q.Adopt, "adopt", false, "import a directory in use, and copy files again that change during the import")
	f.BoolVar(&q.Replace, "replace", false,
		"with --adopt: replace SOURCE with a mounted volume of the golden, and keep the old directory beside it")
	f.StringVar(&as, "as", "", "with --replace: call the volume `VOLUME` (default: NAME-live)")
	repository.addFlags(f)
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

		q.Source = args[1]
		if q.Source == "-" && term.IsTerminal(int(a.Stdin.Fd())) {
			return errs.New(errs.Invalid, "import", "-",
				"standard input is a terminal").WithHint("pipe an archive into it: tar c . | pando golden import %s -", q.Name)
		}

		switch q.FS = driver.FS(fs); q.FS {
		case "", driver.Native, driver.Ext4, driver.XFS, driver.None:
		default:
			return errs.New(errs.Invalid, "import", fs,
				"unknown kind of filesystem").WithHint("choose --fs native, ext4, xfs or none")
		}

		if c.Flags().Changed("size") {
			if q.SizeBytes, err = units.ParseSize("import", sizeFlag); err != nil {
				return err
			}
		}

		if q.Keep, err = parseKeep("import", keep); err != nil {
			return err
		}

		if q.Overlay, err = overlay(); err != nil {
			return err
		}

		added, err := labels()
		if err != nil {
			return err
		}
		q.Labels = added.Map()

		if err := repository.check(f, q.Source); err != nil {
			return err
		}

		return a.withPool(func(ctx context.Context, e *engine.Engine, _ []string) error {
			if repository.is {
				return a.importGit(ctx, e, repository, q)
			}
			return a.importGolden(ctx, e, q)
		})(c, args)
	}

	return c
}

func (a *App) importGolden(ctx context.Context, e *engine.Engine, q engine.ImportRequest) error {
	ctx, stop := a.showProgress(ctx)
	var out engine.Imported
	var err error
	if q.Source == "-" {
		out, err = e.ImportStream(ctx, q, a.Stdin)
	} else {
		out, err = e.Import(ctx, q)
	}
	stop()
	if err != nil {
		return err
	}

	for _, w := range out.Warnings {
		a.printWarning("%s", w)
	}

	if a.json {
		return a.printJSON(out)
	}

	a.noteRemoved(out.Removed)
	a.noteCleaned(q.Preset, out.Cleaned)
	if out.Waited {
		a.printNote("another pando process was already importing it; this is its result")
	} else if out.Files > 0 {
		a.printNote("%s, %s, in %s on disk", errs.Plural(int(out.Files), "file"), formatBytes(out.LogicalBytes),
			errs.Plural(int(out.Extents), "extent"))
	}

	if out.Changed > 0 {
		a.printNote("copied changed files again: directories %d, passes %d", out.Changed, out.Passes)
	}

	if out.Replaced != "" {
		a.printNote("%s is now volume %s; the old directory is %s", out.Replaced, out.Volume, out.Aside)
		a.printNote("remove the old directory when it is no longer needed: rm -rf %s", shellWord(out.Aside))
	}

	return a.printf("%s\n", ref.Generation(out.Golden, out.Generation))
}
