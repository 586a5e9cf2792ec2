package cli

import (
	"context"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"pando/internal/base/ref"
	"pando/internal/engine"

	"github.com/spf13/cobra"
)

func (a *App) diffCommand() *cobra.Command {
	var q engine.DiffRequest
	var stat bool
	c := &cobra.Command{
		Use:     "diff A B",
		GroupID: "volumes",
		Short:   "List the differences between two volumes, snapshots or generations",
		Long: `List the paths in B that differ from A: the changes that turn A into B. A and B
are volumes, even in use, snapshots (VOLUME@SNAPSHOT) or generations (GOLDEN,
GOLDEN@N). Neither is changed. Each line begins with a letter:

  A  added
  D  deleted
  R  renamed, and possibly modified
  M  modified content
  m  modified mode, owner or attributes only

The size before and after follows, and how many bytes are new in B. A changed
timestamp alone is not a difference, nor is a file rewritten with the same
bytes. For raw volumes (--fs none), pando lists ranges of bytes.

The exit code is 0 whether or not there are differences. ` + "`-q`" + ` prints paths only.`,
		Example: "  pando diff web job-17\n  pando diff web@1 web@2 --stat\n  pando diff job-17@before job-17 " +
			"--json",
		Args:              cobra.ExactArgs(2),
		ValidArgsFunction: a.completeArgs(anyRef, anyRef),
	}

	freezeFlags(c.Flags(), &q.Freeze)
	c.Flags().BoolVar(&stat, "stat", false, "print only the numbers of changes and bytes")

	c.RunE = func(c *cobra.Command, args []string) (err error) {
		if q.A, err = ref.Parse("diff", args[0]); err != nil {
			return err
		}

		if q.B, err = ref.Parse("diff", args[1]); err != nil {
			return err
		}

		return a.withPool(func(ctx context.Context, e *engine.Engine, _ []string) error {
			ctx, stop := a.showProgress(ctx)
			out, err := e.Diff(ctx, q)
			stop()
			if err != nil {
				return err
			}

			switch {
			case a.json:
				if stat {
					out.Changes, out.Ranges = []engine.DiffChange{}, nil
				}
				return a.printJSON(out)
			case stat:
				return a.printDiffStat(out)
			}

			return a.printDiff(out)
		})(c, args)
	}

	return c
}

func (a *App) printDiffStat(d engine.Difference) error {
	s := d.Stat
	return a.printf("%d added, %d modified, %d deleted, %d renamed; %s changed\n", s.Added, s.Modified, s.Deleted,
		s.Renamed, formatBytes(s.ChangedBytes))
}

func (a *App) printDiff(d engine.Difference) error {
	if len(d.Changes) == 0 && d.Stat.ChangedBytes == 0 {
		a.printNote("no differences")
	}

	for _, c := range d.Changes {
		if a.quiet {
			a.printf("%s\n", showPath(c.Path))
			continue
		}
		a.printf("%s\n", changeLine(c))
	}

	for _, r := range d.Ranges {
		a.printf("M  bytes %d to %d  (%s)\n", r.Offset, r.Offset+r.Length-1, formatBytes(r.Length))
	}

	if d.Method == "extents" && d.Ranges == nil && d.Stat.ChangedBytes > 0 {
		return a.printDiffStat(d) // too many ranges to list
	}

	return nil
}

// changeLine is one line of a list of changes.
func changeLine(c engine.DiffChange) string {
	letter := strings.ToUpper(c.Op[:1])
	if c.Op == "modified" && !c.Content {
		letter = "m"
	}

	line := letter + "  "
	if c.From != "" {
		line += showPath(c.From) + " -> "
	}

	line += showPath(c.Path)
	if c.Type == "directory" {
		line += "/"
	}

	var notes []string
	switch {
	case c.TypeBefore != "":
		notes = append(notes, c.TypeBefore+" -> "+c.Type)
	case c.Type != "file" && c.Type != "directory":
		notes = append(notes, c.Type)
	}

	if c.Link != "" {
		notes = append(notes, "same file as "+showPath(c.Link))
	} else if c.Type == "file" || c.TypeBefore == "file" {
		switch {
		case c.Op == "added":
			notes = append(notes, formatBytes(c.SizeAfter))
		case c.Op == "deleted":
			notes = append(notes, formatBytes(c.SizeBefore))
		case c.Content && c.SizeBefore != c.SizeAfter:
			notes = append(notes, formatBytes(c.SizeBefore)+" -> "+formatBytes(c.SizeAfter),
				formatBytes(c.ChangedBytes)+" changed")
		case c.Content:
			notes = append(notes, formatBytes(c.SizeAfter), formatBytes(c.ChangedBytes)+" changed")
		}
	}

	if c.Metadata {
		notes = append(notes, "mode, owner or attributes")
	}
	if len(notes) == 0 {
		return line
	}

	return line + "  (" + strings.Join(notes, ", ") + ")"
}

// showPath quotes what would not fit on a line, or not be what it seems.
func showPath(p engine.Path) string {
	s := string(p)
	if !utf8.ValidString(s) || strings.ContainsFunc(s, func(r rune) bool {
		return !unicode.IsPrint(r) || r == '"' || r == '\\'
	}) {
		return strconv.Quote(s)
	}
	return s
}
