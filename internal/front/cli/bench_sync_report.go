package cli

import (
	"pando/internal/observe/syncbench"

	"github.com/spf13/cobra"
)

func (a *App) benchReportCommand() *cobra.Command {
	page := ""
	c := &cobra.Command{
		Use:   "report FILE",
		Short: "Show a report of `pando bench sync --json`, as text or as a page",
		Long: `Read FILE, a report printed by ` + "`pando bench sync --json`" + ` on any host, and print
it as ` + "`pando bench sync`" + ` does. --html also writes it as a page. The exit code is
0 if pando could show the report, whatever its verdict.`,
		Example: "  pando bench report before.json\n  pando bench report before.json --html before.html",
		Args:    cobra.ExactArgs(1),
		ValidArgsFunction: func(_ *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
			if len(args) > 0 {
				return nil, cobra.ShellCompDirectiveNoFileComp
			}
			return []string{"json"}, cobra.ShellCompDirectiveFilterFileExt
		},
	}

	c.Flags().StringVar(&page, "html", "", "also write the report to `FILE`, as an HTML page")
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
