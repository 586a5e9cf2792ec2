package cli

import (
	"context"
	"strconv"
	"strings"

	"pando/internal/api"
	"pando/internal/base/ref"
	"pando/internal/engine"
	"pando/internal/service/listing"

	"github.com/spf13/cobra"
)

// lsDefault are the columns that ls shows by default.
var lsDefault = []string{"name", "origin", "fs", "state", "logical", "exclusive", "shared", "created", "mountpoint"}

// lsSelection is what ls shows of the volumes.
type lsSelection struct {
	q       listing.Request
	columns []string
}

// addFlags adds the flags that fill s.
func (s *lsSelection) addFlags(c *cobra.Command) {
	f := c.Flags()
	f.StringArrayVar(&s.q.Filters, "filter", nil,
		"list only volumes with `KEY=VALUE`, for example 'name=agent-*', state=mounted or 'exclusive=>1G' (repeatable)")
	f.StringVar(&s.q.Sort, "sort", "", "sort by `COLUMN`, with :desc in descending order")
	f.IntVar(&s.q.Limit, "limit", 0, "list at most `N` volumes")
	f.StringSliceVar(&s.columns, "columns", nil, "show the `COLUMNS`, separated by commas")

	names := listing.ColumnNames()
	without := cobra.ShellCompDirectiveNoFileComp
	keys := make([]string, len(names))
	for i, n := range names {
		keys[i] = n + "="
	}
	keys = append(keys, listing.LabelFilter+"=")

	_ = c.RegisterFlagCompletionFunc("filter", cobra.FixedCompletions(keys, without|cobra.ShellCompDirectiveNoSpace))
	_ = c.RegisterFlagCompletionFunc("sort", cobra.FixedCompletions(names, without))
	_ = c.RegisterFlagCompletionFunc("limit", cobra.NoFileCompletions)
	_ = c.RegisterFlagCompletionFunc("columns", func(_ *cobra.Command, _ []string, word string) (
		out []string, _ cobra.ShellCompDirective) {
		done := word[:strings.LastIndexByte(word, ',')+1]
		for _, n := range names {
			out = append(out, done+n)
		}
		return out, without | cobra.ShellCompDirectiveNoSpace
	})
}

// parse checks the flags, and returns the columns to show. Invalid.
func (s *lsSelection) parse() (columns []listing.Column, err error) {
	if err := s.q.Check(); err != nil {
		return nil, err
	}

	names := s.columns
	if names == nil {
		names = lsDefault
	}
	return listing.FindColumns("--columns", names)
}

// choose lists only what words name. Invalid, NotFound.
func (s *lsSelection) choose(ctx context.Context, e *engine.Engine, words []string) error {
	if len(words) == 0 {
		return nil
	}
	what, err := ref.ParsePatterns("ls", words...)
	if err != nil {
		return err
	}
	found, err := e.Match(ctx, engine.MatchRequest{Op: "ls", What: what, Kinds: destroyable})
	for _, r := range found {
		s.q.Only = append(s.q.Only, r.String())
		s.q.Snapshots = s.q.Snapshots || r.At != ""
	}
	return err
}

// lsCell is what the table shows of a volume in a column.
func lsCell(c *listing.Column, v *api.Object) string {
	switch {
	case c.Name == "state":
		return stateWords(*v)
	case c.Text != nil:
		return orDash(c.Text(v))
	case c.Flag != nil && c.Flag(v):
		return "yes"
	case c.Flag != nil:
		return "no"
	case c.Bytes != nil && c.Name != "size":
		return spaceOf(v, c.Bytes(v))
	case c.Bytes != nil:
		return formatBytes(c.Bytes(v))
	case c.Number != nil:
		return strconv.FormatInt(c.Number(v), 10)
	case c.Moment(v).IsZero():
		return "-"
	}
	return formatAge(c.Moment(v))
}
