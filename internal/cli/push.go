package cli

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/base/ref"
	"pando/internal/remote/replicate"

	"github.com/spf13/cobra"
)

// checkEvery is how often `push --every` looks whether what is on the remote is whole.
const checkEvery = time.Hour

func (a *App) pushCommand() *cobra.Command {
	var q replicate.PushRequest
	var to, every, limit, as string
	c := &cobra.Command{
		Use:     "push [REF...]",
		GroupID: "remotes",
		Short:   "Carry volumes and goldens to a remote, encrypted; only what changed",
		Long: `Makes each REF a point on the remote: a snapshot (VOLUME@SNAP), a generation
(GOLDEN@N, GOLDEN), or a volume as it is now, which may be in use: it is
snapshotted first, and the snapshot stays until the next push has been made from
it. --all pushes every volume, and every golden's current generation.

Only what changed since the last point is read, compressed, encrypted and sent; a
clone sends what it does not share with the golden that it was made from, which is
pushed first if it is not there (--no-origin: the clone is sent whole). A push
that is interrupted has no effect on what is there, and the next one does not send
again what had arrived.

What a push builds upon is looked for on the remote first. If something of it is
missing, it is sent again as far as this point needs it, and a point that is there
but not whole is replaced. --full sends everything again without looking.

Images travel as blocks, trees of btrfs and ZFS as streams that only the same kind
of pool can pull, trees of plain pools as files, which any pool with trees can pull;
--portable sends the others in that form too.

A volume on a remote has one writer. If another pool has taken it over (` + "`pando\npull --take-over`" + `), or holds another volume of this name, the push is refused
(conflict) and nothing is lost: push it under another name with --as.

A remote that has lost a volume, or was put back to an older state of it than this
pool has seen, is noticed (damaged): --accept-rollback goes on with what is there.

With --every it goes on until it is interrupted, one round each DURATION, as
continuous protection. A round that fails is reported, and tried again after a
while, at first after DURATION, then at most every 15 min (or DURATION, if that is
longer). What is wrong, for example that the remote does not answer, is said once, and
once when it is over. With --json there is one line of JSON for each thing pushed.`,
		Example: `  pando push job-17 --to backup
  pando push web@3 --limit-rate 20M
  pando push --all --every 1m`,
		ValidArgsFunction: a.completeRefs(0),
	}

	f := c.Flags()
	f.StringVar(&to, "to", "", "the `REMOTE`; may be left out if there is one only")
	f.StringVar(&as, "as", "", "call it `NAME` on the remote")
	f.BoolVar(&q.All, "all", false, "push all volumes, and the current generation of all goldens")
	freezeFlags(f, &q.Freeze)
	f.BoolVar(&q.Full, "full", false, "send all data again, whatever is there")
	f.BoolVar(&q.NoOrigin, "no-origin", false, "do not push what a clone was made from")
	f.BoolVar(&q.Portable, "portable", false, "send trees of btrfs and ZFS as files, for pools of any driver")
	f.BoolVar(&q.AcceptRollback, "accept-rollback", false, "go on if the remote was put back to an older state")
	f.StringVar(&every, "every", "", "push again each `DURATION`, for example 1m, until interrupted")
	f.StringVar(&limit, "limit-rate", "", "send at most this many `BYTES` a second, for example 50M")
	_ = c.RegisterFlagCompletionFunc("to", a.completeRemotes)
	c.RunE = func(c *cobra.Command, args []string) (err error) {
		if as != "" {
			if q.As, err = ref.ParseName("push", as); err != nil {
				return err
			}
		}

		if q.Refs, err = pushRefs(args, q); err != nil {
			return err
		}

		if limit != "" {
			if q.LimitBytes, err = parseRate("push", limit); err != nil {
				return err
			}
		}

		var period time.Duration
		if c.Flags().Changed("every") {
			if period, err = parseTTL("push", every); err != nil {
				return err
			}
			if period < time.Second {
				return errs.New(errs.Invalid, "push", every, "less than a second").
					WithHint("write for example --every 10s")
			}
			q.Checks = &replicate.Checks{Every: checkEvery}
			return a.pushEvery(c.Context(), to, q, period)
		}

		out, err := a.pushRound(c.Context(), to, q)
		if err != nil && len(out) == 0 {
			return a.allButLast(err)
		}

		if perr := a.printPushed(out); perr != nil {
			return errors.Join(perr, err)
		}

		return a.allButLast(err)
	}

	return c
}

// pushRefs checks what is to be pushed. Invalid.
func pushRefs(args []string, q replicate.PushRequest) ([]ref.Ref, error) {
	bad := func(format string, v ...any) error {
		return errs.New(errs.Invalid, "push", "", format, v...).WithHint("see `pando push --help`")
	}
	switch {
	case q.All && len(args) > 0:
		return nil, bad("--all and %s do not go together", args[0])
	case !q.All && len(args) == 0:
		return nil, bad("nothing to push: name volumes, snapshots or goldens, or use --all")
	case !q.As.IsZero() && (q.All || len(args) > 1):
		return nil, bad("--as gives a name to one thing only")
	}

	var out []ref.Ref
	for _, s := range args {
		r, err := ref.Parse("push", s)
		if err != nil {
			return nil, err
		}
		out = append(out, r)
	}

	return out, nil
}

// parseRate reads bytes a second: a size, with or without "/s". Invalid.
func parseRate(op, s string) (int64, error) {
	n, err := parseSize(op, strings.TrimSuffix(s, "/s"))
	if err != nil {
		return 0, errs.New(errs.Invalid, op, s, "not a rate").WithHint("write bytes a second, for example 50M")
	}
	return n, nil
}

// pushRound opens the pool and the remote, and pushes once. What was pushed
// before an error is returned with it.
func (a *App) pushRound(ctx context.Context, to string, q replicate.PushRequest) (out []replicate.Pushed, err error) {
	e, err := a.open(ctx)
	if err != nil {
		return nil, err
	}

	defer e.Close()
	ctx, tell := a.reporting(ctx)
	defer tell()
	r, err := a.remote("push", to)
	if err != nil {
		return nil, err
	}

	err = a.track(func(t *progress.Tracker) (err error) {
		q.Tracker = t
		if !a.json {
			q.Warn = func(text string) { a.note("%s", text) }
		}
		out, err = replicate.Push(ctx, e, r, q)
		return err
	})
	if err != nil && ctx.Err() != nil {
		err = &errs.Error{Kind: errs.Canceled, Op: "push",
			Err: errors.New("interrupted; what was sent is kept, and the next push goes on with it")}
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
			a.note("%s: %s", p.Ref, p.Note)
		}
		if err := a.printf("%s\n", a.pushedWords(p)); err != nil {
			return err
		}
	}

	if len(out) == 0 {
		a.note("there is nothing to push")
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
		return fmt.Sprintf("%s  is there already", name)
	}

	how := "all of it"
	switch {
	case p.Resumed:
		how = "going on where an interrupted push had ended"
	case p.Base != "":
		how = "since " + p.Base
	case p.Origin != "":
		how = "since " + p.Origin
	}

	return fmt.Sprintf("%s  %s sent, %s, in %s", name, size(p.UploadedBytes), how, took(p.Seconds))
}
