package cli

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/base/units"
	"pando/internal/base/warnings"
	"pando/internal/remote/replicate"

	"github.com/spf13/cobra"
)

// checkEvery is how often `push --every` looks whether what is on the remote is whole.
const checkEvery = time.Hour

// pushHelp is the text of `pando push --help`.
const pushHelp = `Store each REF as a point on the remote: a snapshot (VOLUME@SNAPSHOT), a
generation (GOLDEN@N, or GOLDEN for the current one), or the current state of a
volume, even while it is in use. For a volume, pando takes a snapshot first and
keeps it until the next push has used it as its base. REF may be a pattern:
'job-*' pushes the volumes and goldens whose names match, and nothing is pushed
if any REF is unknown. --all pushes every volume, and the current generation of
every golden.

Only changes since the last point are read, compressed, encrypted and sent. For
a clone, these are the blocks that it does not share with its golden; the golden
is pushed first if the remote does not have it. With --no-origin, the clone is
sent whole instead. An interrupted push does not change what the remote holds,
and the next push does not send again what already arrived.

pando first checks that the base of the push is complete on the remote. It sends
missing data again as far as this point needs it, and replaces a point that
exists but is incomplete. --full sends all data again without checking.

Images are sent as blocks, trees of btrfs and ZFS as streams that only pools of
the same kind can pull, and trees of plain pools as files that any pool with
trees can pull. --portable sends trees of btrfs and ZFS as files too.

A volume on a remote has one writer. If another pool has taken the volume over
(` + "`pando pull --take-over`" + `), or if the remote has a different volume with this
name, the push fails (conflict) and nothing is lost; --as pushes the volume
under another name.

If the remote has lost a volume, or was restored to an older state than this
pool has seen, the push fails (damaged). --accept-rollback continues from what
the remote holds now.

--every pushes again in every interval until interrupted, as continuous
protection. A failed round is reported, and tried again after DURATION at first
and then less often, but at least every 15 min (or every DURATION, if that is
longer). A lasting problem, for example a remote that does not answer, is
reported once, and once more when it is over. With --json, pando prints one line
of JSON for each point.`

func (a *App) pushCommand() *cobra.Command {
	var q replicate.PushRequest
	var to, every, limit, as string
	c := &cobra.Command{
		Use:     "push [REF...]",
		GroupID: "remotes",
		Short:   "Push volumes and goldens to a remote, encrypted and incrementally",
		Long:    pushHelp,
		Example: `  pando push job-17 --to backup
  pando push web@3 --limit-rate 20M
  pando push --all --every 1m`,
		ValidArgsFunction: a.completeEvery(anyRef),
	}

	f := c.Flags()
	f.StringVar(&to, "to", "", "push to this `REMOTE` (default: the only remote of the pool)")
	f.StringVar(&as, "as", "", "call the volume or golden `NAME` on the remote (default: its name in this pool)")
	f.BoolVar(&q.All, "all", false, "push all volumes and the current generation of all goldens")
	freezeFlags(f, &q.Freeze)
	f.BoolVar(&q.Full, "full", false, "send all data again, without checking what the remote has")
	f.BoolVar(&q.NoOrigin, "no-origin", false, "do not push the origin of a clone, and send the clone whole")
	f.BoolVar(&q.Portable, "portable", false, "send trees of btrfs and ZFS as files, which any pool with trees can pull")
	f.BoolVar(&q.AcceptRollback, "accept-rollback", false, "continue even if the remote was restored to an older state")
	f.StringVar(&every, "every", "", "push every `DURATION`, for example 1m, at least 1s, until interrupted")
	f.StringVar(&limit, "limit-rate", "", "send at most this many `BYTES` per second, for example 50M (default: no limit)")
	_ = c.RegisterFlagCompletionFunc("to", a.completeRemotes)
	c.RunE = func(c *cobra.Command, args []string) (err error) {
		if as != "" {
			if q.As, err = ref.ParseName("push", as); err != nil {
				return err
			}
		}

		if err := checkPush(args, q); err != nil {
			return err
		}

		if limit != "" {
			if q.LimitBytes, err = parseRate("push", limit); err != nil {
				return err
			}
		}

		var period time.Duration
		if c.Flags().Changed("every") {
			if period, err = parseEvery("push", every); err != nil {
				return err
			}
			return a.pushEvery(replicate.CheckEvery(c.Context(), checkEvery), to, args, q, period)
		}

		out, err := a.pushRound(c.Context(), to, args, q)
		if err != nil && len(out) == 0 {
			return a.notRemote(a.allButLast(err), "to")
		}

		if perr := a.printPushed(out); perr != nil {
			return errors.Join(perr, err)
		}

		return a.allButLast(err)
	}

	return c
}

// checkPush checks how much is to be pushed. Invalid.
func checkPush(args []string, q replicate.PushRequest) error {
	bad := func(format string, v ...any) error {
		return errs.New(errs.Invalid, "push", "", format, v...).WithHint("run `pando push --help` for examples")
	}
	switch {
	case q.All && len(args) > 0:
		return bad("--all cannot be combined with %s", args[0])
	case !q.All && len(args) == 0:
		return bad("nothing to push: name volumes, snapshots or goldens, or use --all")
	case !q.As.IsZero() && (q.All || len(args) > 1 || ref.IsGlob(args[0])):
		return bad("--as can name only one volume or golden")
	}
	return nil
}

// parseRate reads bytes a second: a size, with or without "/s". Invalid.
func parseRate(op, s string) (int64, error) {
	n, err := units.ParseSize(op, strings.TrimSuffix(s, "/s"))
	if err != nil {
		return 0, errs.New(errs.Invalid, op, s, "not a rate").WithHint("use bytes per second, for example 50M")
	}
	return n, nil
}

// pushRound opens the pool and the remote, and pushes once. What was pushed
// before an error is returned with it.
func (a *App) pushRound(
	ctx context.Context, to string, words []string, q replicate.PushRequest,
) (out []replicate.Pushed, err error) {
	e, err := a.openPool(ctx)
	if err != nil {
		return nil, err
	}

	defer e.Close()

	ctx, tell := a.collectWarnings(ctx)
	defer tell()

	r, err := a.findRemote("push", to)
	if err != nil {
		return nil, err
	}

	if !q.All {
		what, err := choose(ctx, e, "push", words, anyRef)
		if err != nil {
			return nil, err
		}
		q.Refs = what.refs
	}

	if !a.json {
		ctx = warnings.Listen(ctx, func(text string) { a.printNote("%s", text) })
	}

	ctx, stop := a.showProgress(ctx)
	out, err = replicate.Push(ctx, e, r, q)
	stop()
	if err != nil && ctx.Err() != nil {
		err = &errs.Error{Kind: errs.Canceled, Op: "push",
			Err: errors.New("interrupted; the next push resumes with what was sent")}
	}

	return out, err
}

func (a *App) printPushed(out []replicate.Pushed) error {
	if a.json {
		if out == nil {
			out = []replicate.Pushed{}
		}
		return a.printJSON(out)
	}

	for _, p := range out {
		if p.Note != "" {
			a.printNote("%s: %s", p.Ref, p.Note)
		}
		a.printf("%s\n", a.pushedWords(p))
	}

	if len(out) == 0 {
		a.printNote("nothing to push")
	}

	return nil
}

// allButLast prints the errors of what could not be pushed, but for the last, which
// it returns.
func (a *App) allButLast(err error) error {
	many, ok := err.(interface{ Unwrap() []error }) // at the top only: further down they are one error's causes
	if !ok {
		return err
	}
	all := many.Unwrap()
	for _, e := range all[:len(all)-1] {
		a.printError(e)
	}
	return all[len(all)-1]
}

// pushedWords says in a line what came of a push.
func (a *App) pushedWords(p replicate.Pushed) string {
	name := p.Volume + "@" + p.Point
	switch {
	case a.quiet:
		return name
	case p.Unchanged:
		return fmt.Sprintf("%s  up to date", name)
	}

	how := "in full"
	switch {
	case p.Resumed:
		how = "resumed"
	case p.Base != "":
		how = "since " + p.Base
	case p.Origin != "":
		how = "since " + p.Origin
	}

	return fmt.Sprintf("%s  %s sent, %s, in %s", name, formatBytes(p.UploadedBytes), how, formatSeconds(p.Seconds))
}
