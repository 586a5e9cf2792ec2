package cli

import (
	"pando/internal/observe/syncbench"

	"github.com/spf13/cobra"
)

func (a *App) benchReportCommand() *cobra.Command {
	page := ""
	c := &cobra.Command{
		Use:   "report FILE",
		Short: "Show a report that `pando bench sync --json` has printed, also as a page",
		Long: `Reads FILE, which ` + "`pando bench sync --json`" + ` has printed, on any host, and shows it as
` + "`pando bench sync`" + ` would have; with --html also as a page. The exit code does not tell
the verdict: it is 0 if FILE could be shown.`,
		Example: "  pando bench report before.json\n  pando bench report before.json --html before.html",
		Args:    usage(cobra.ExactArgs(1)),
		ValidArgsFunction: func(_ *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
			if len(args) > 0 {
				return nil, cobra.ShellCompDirectiveNoFileComp
			}
			return []string{"json"}, cobra.ShellCompDirectiveFilterFileExt
		},
	}

	c.Flags().StringVar(&page, "html", "", "also write it into `FILE`, as a page")
	_ = c.MarkFlagFilename("html", "html", "htm")
	c.RunE = func(_ *cobra.Command, args []string) (err error) {
		r, err := syncbench.Read(args[0])
		if err != nil {
			return err
		}

		if page != "" {
			if page, err = pagePath("bench report", page); err != nil {
				return err
			}
		}

		if err := a.showSync(r); err != nil || page == "" {
			return err
		}

		return a.writePage("bench report", page, r)
	}

	return c
}
