package cli

import (
	"context"
	"os"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/engine"

	"github.com/spf13/cobra"
	"golang.org/x/term"
)

// exportHelp is the text of `pando export --help`.
const exportHelp = `Write a volume, snapshot (VOLUME@SNAPSHOT) or generation (GOLDEN, GOLDEN@N) to
FILE, in the format that its name tells, or --format:

  tar      its files (.tar): owners, modes, times in nanoseconds, links, extended
           attributes, ACLs, flags, devices and holes
  tar.zst  the same, compressed (.tar.zst, .tzst)
  raw      its block device (.raw, .img); holes stay holes
  qcow2    its block device in QEMU's format (.qcow2), only what is in use

` + "`pando golden import NAME FILE`" + ` makes the same content of it. Tar has no
type for sockets; pando skips them and says so. Only pools with images (driver
reflink, zvols of zfs) can write raw and qcow2.

A volume may be in use: pando exports a private copy of one moment, as a
snapshot would be. In pools without reflinks (driver plain), pando copies files
again that change during the copy.

FILE gets mode 0600, and appears when it is complete and on the disk. If pando
fails or is interrupted, there is no FILE; one that existed is as before.
With - pando writes to standard output.`

func (a *App) exportCommand() *cobra.Command {
	var q engine.ExportRequest
	var format string
	c := &cobra.Command{
		Use:     "export REF FILE",
		GroupID: "volumes",
		Short:   "Write a volume, snapshot or generation to a tar archive or a disk image",
		Long:    exportHelp,
		Example: "  pando export job-17 job.tar.zst\n  pando export web@3 web.qcow2\n" +
			"  pando export job-17@before - --format tar | ssh other pando golden import web -",
		Args: cobra.ExactArgs(2),
		ValidArgsFunction: func(c *cobra.Command, args []string, part string) ([]string, cobra.ShellCompDirective) {
			if len(args) == 1 {
				return nil, cobra.ShellCompDirectiveDefault // a path
			}
			return a.completeArgs(anyRef)(c, args, part)
		},
	}

	f := c.Flags()
	freezeFlags(f, &q.Freeze)
	f.StringVar(&format, "format", "", "write the `FORMAT` tar, tar.zst, raw or qcow2 (default: by the name of FILE)")
	f.BoolVar(&q.Replace, "force", false, "replace FILE if it exists")
	formats := make([]string, len(engine.ExportFormats))
	for i, f := range engine.ExportFormats {
		formats[i] = string(f)
	}
	_ = c.RegisterFlagCompletionFunc("format", cobra.FixedCompletions(formats, cobra.ShellCompDirectiveNoFileComp))

	c.RunE = func(c *cobra.Command, args []string) (err error) {
		if q.From, err = ref.Parse("export", args[0]); err != nil {
			return err
		}

		q.File, q.Format = args[1], engine.ExportFormat(format)
		if c.Flags().Changed("format") && format == "" {
			return errs.New(errs.Invalid, "export", `""`, "the format is empty").WithHint("choose tar, tar.zst, raw or qcow2")
		}

		if q.File == "-" {
			if err := a.checkExportStdout(); err != nil {
				return err
			}
		}

		return a.withPool(func(ctx context.Context, e *engine.Engine, _ []string) error {
			return a.export(ctx, e, q)
		})(c, args)
	}

	return c
}

// checkExportStdout checks that standard output can get an export.
func (a *App) checkExportStdout() error {
	if a.json {
		return errs.New(errs.Invalid, "export", "-", "standard output cannot hold both the export and JSON").
			WithHint("name a file, or remove --json")
	}
	if f, ok := a.Stdout.(*os.File); ok && term.IsTerminal(int(f.Fd())) {
		return errs.New(errs.Invalid, "export", "-", "standard output is a terminal").
			WithHint("name a file, or redirect the output: > FILE")
	}
	return nil
}

func (a *App) export(ctx context.Context, e *engine.Engine, q engine.ExportRequest) error {
	ctx, stop := a.showProgress(ctx)
	var out engine.Exported
	var err error
	if q.File == "-" {
		out, err = e.ExportStream(ctx, q, a.Stdout)
	} else {
		out, err = e.Export(ctx, q)
	}
	stop()
	if err != nil {
		return err
	}

	for _, w := range out.Warnings {
		a.printWarning("%s", w)
	}

	if q.File == "-" {
		return nil
	}

	what := formatBytes(out.Bytes) + " of data"
	if out.Files > 0 {
		what = errs.Plural(int(out.Files), "file") + ", " + what
	}

	return a.printResult(out, out.File, "%s  %s, %s\n", out.File, out.Format, what)
}
