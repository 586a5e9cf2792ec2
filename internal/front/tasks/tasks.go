package tasks

import (
	"context"
	"fmt"
	"path"
	"strings"
	"sync"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/base/ref"
	"pando/internal/base/warnings"
	"pando/internal/engine"
	"pando/internal/front/schedule"
	"pando/internal/remote/replicate"
	"pando/internal/source/git"
)

// Label is the label of snapshots that a task has taken; its value is the task's name. Retention removes no others.
const Label = "pando.task"

// Host is what tasks need of the service that runs them.
type Host struct {
	Engine *engine.Engine
	Env    []string // of programs that refreshes start

	// Remote opens a remote. Retries show in the tracker.
	Remote func(op, name string, t *progress.Tracker) (*replicate.Remote, error)

	// Begin begins an operation that others can see and cancel. end must be called once.
	Begin func(ctx context.Context, verb, ref, task string) (_ context.Context, _ *progress.Tracker,
		end func(result any, err error), err error)

	// Log gets problems, once as long as they stay the same.
	Log func(format string, args ...any)
}

// Intervals of the jobs that watch.
const (
	expireEvery   = 500 * time.Millisecond // sees a time to live that another process has set just now
	maintainEvery = time.Minute
	keepFreeEvery = 10 * time.Second
)

// lookAgain is when a service looks again after a task that another one was running.
const lookAgain = time.Minute

// checkEvery is how often pushes check whether what is on the remote is whole.
const checkEvery = time.Hour

// Jobs returns the jobs of a service with a configuration.
func (h *Host) Jobs(c *Config) []schedule.Job {
	jobs := []schedule.Job{
		h.job(schedule.Job{Name: nameExpire, Verb: "destroy", Ref: "expired volumes", Every: expireEvery, Watch: true,
			Run: h.expire()}),
		h.job(schedule.Job{Name: nameMaintain, Verb: "clean up", Ref: "after interrupted commands", Every: maintainEvery,
			Watch: true, Run: h.maintain}),
	}
	if c.KeepFree > 0 {
		q := engine.PruneRequest{KeepFreePercent: c.KeepFree}
		jobs = append(jobs, h.job(schedule.Job{Name: nameKeepFree, Verb: "prune", Ref: selection(q), Watch: true,
			Every: keepFreeEvery, Same: fmt.Sprint(c.KeepFree), Run: h.once(nameKeepFree, 0, h.keepFree(q))}))
	}
	if c.GC > 0 {
		jobs = append(jobs, h.job(schedule.Job{Name: nameGC, Verb: "gc", Every: c.GC, Same: c.GC.String(),
			Run: h.once(nameGC, c.GC, h.gc)}))
	}

	for _, t := range c.Tasks {
		jobs = append(jobs, h.job(schedule.Job{Name: t.Name, Verb: t.Verb(), Ref: t.What(), Every: t.Every,
			Same: fmt.Sprintf("%+v", t), Run: h.once(t.Name, t.Every, h.work(t))}))
	}
	return jobs
}

// run does the work of a job.
type run = func(context.Context) (schedule.Outcome, error)

// job makes a job act in its name, and report its problems.
func (h *Host) job(j schedule.Job) schedule.Job {
	work, said := j.Run, ""
	j.Run = func(ctx context.Context) (schedule.Outcome, error) {
		list := &warnings.List{}
		ctx = warnings.Collect(act(ctx, j.Name, ""), list)
		out, err := work(ctx)

		var problems []string
		if err != nil && ctx.Err() == nil {
			problems = append(problems, err.Error())
			if hint := errs.HintIn(err); hint != "" {
				problems = append(problems, "hint: "+string(hint))
			}
		}
		for _, w := range list.Messages() {
			problems = append(problems, string(w))
		}

		// What is the same as before, or over, is not said again.
		if now := strings.Join(problems, "; "); now != said && (now != "" || !out.Idle) {
			if said = now; now != "" {
				h.Log("task %q: %s", j.Name, errs.Message(now))
			}
		}
		return out, err
	}
	return j
}

// act returns a context whose changes are those of a task, and why.
func act(ctx context.Context, task, why string) context.Context {
	return engine.ActAs(ctx, engine.Actor{Command: "pando serve: task " + task, Why: why})
}

// once keeps services of the same pool from doing the work of a task at the same time, or twice in an interval. 0: the
// work decides by itself whether it is needed.
func (h *Host) once(task string, every time.Duration, work run) run {
	return func(ctx context.Context) (schedule.Outcome, error) {
		r, err := h.Engine.BeginTask(ctx, task)
		if err != nil || r == nil { // if the other process dies, this one is not long in coming
			return schedule.Outcome{Idle: true, Next: time.Now().Add(lookAgain)}, err
		}
		defer r.End()

		// A run of another service, or of this one before it was restarted, counts as well. Times in the future are those
		// of a clock that was set back.
		if age := time.Since(r.Last); every > 0 && age >= 0 && age < every-every/10 {
			return schedule.Outcome{Idle: true, Next: r.Last.Add(every)}, nil
		}

		out, err := work(ctx)
		if err == nil && every > 0 {
			err = r.Done(context.WithoutCancel(ctx))
		}
		return out, err
	}
}

// operation runs a task as an operation. fn returns the result of the operation, and what to say of it.
func (h *Host) operation(
	ctx context.Context, verb, ref, task string, fn func(context.Context, *progress.Tracker) (any, string, error),
) (schedule.Outcome, error) {
	ctx, t, end, err := h.Begin(ctx, verb, ref, task)
	if err != nil {
		return schedule.Outcome{}, err
	}
	result, words, err := fn(ctx, t)
	if err == nil {
		err = ctx.Err()
	}
	end(result, err)
	return schedule.Outcome{Words: words}, err
}

// expire returns the work that destroys volumes at the time when they expire.
func (h *Host) expire() run {
	x := sync.OnceValue(h.Engine.WatchExpiry)
	return func(ctx context.Context) (schedule.Outcome, error) {
		round, err := x().DestroyDue(act(ctx, nameExpire, "its time to live had ended"))
		out := schedule.Outcome{Idle: len(round.Destroyed) == 0, Next: round.Again}
		out.Words = "destroyed " + errs.Plural(len(round.Destroyed), "expired volume")
		if round.Waiting > 0 {
			out.Words += fmt.Sprintf("; %d in use", round.Waiting)
		}
		return out, err
	}
}

// maintain cleans up after processes that died.
func (h *Host) maintain(ctx context.Context) (schedule.Outcome, error) {
	r, err := h.Engine.Maintain(ctx)
	for _, w := range r.Warnings {
		warnings.Add(ctx, "%s", w)
	}

	var did []string
	if r.Undone > 0 {
		did = append(did, "cleaned up "+errs.Plural(r.Undone, "interrupted operation"))
	}
	if r.Reclaimed > 0 {
		did = append(did, "removed "+errs.Plural(r.Reclaimed, "destroyed object"))
	}
	if r.Expired > 0 {
		did = append(did, "destroyed "+errs.Plural(r.Expired, "expired object"))
	}
	return schedule.Outcome{Idle: len(did) == 0, Words: strings.Join(did, ", ")}, err
}

// gc cleans the pool up completely.
func (h *Host) gc(ctx context.Context) (schedule.Outcome, error) {
	return h.operation(ctx, "gc", "", nameGC, func(ctx context.Context, _ *progress.Tracker) (any, string, error) {
		r, err := h.Engine.GC(ctx, false)
		if err != nil {
			return nil, "", err
		}
		return r, "returned " + errs.FormatBytes(r.FreedBytes), nil
	})
}

// work returns the work of a task of the file.
func (h *Host) work(t Task) run {
	switch t.Verb() {
	case "snapshot":
		return func(ctx context.Context) (schedule.Outcome, error) { return h.snapshot(ctx, t) }
	case "push":
		checks := &replicate.Checks{Every: checkEvery}
		return func(ctx context.Context) (schedule.Outcome, error) { return h.push(ctx, t, checks) }
	case "pull":
		return func(ctx context.Context) (schedule.Outcome, error) { return h.pull(ctx, t) }
	case "refresh":
		return func(ctx context.Context) (schedule.Outcome, error) { return h.refresh(ctx, t) }
	case "verify":
		return func(ctx context.Context) (schedule.Outcome, error) { return h.verify(ctx, t) }
	case "remote prune":
		return func(ctx context.Context) (schedule.Outcome, error) { return h.pruneRemote(ctx, t) }
	}
	return func(ctx context.Context) (schedule.Outcome, error) {
		return h.prune(ctx, t.Name, t.Prune, t.Prune.KeepFreePercent, t.why())
	}
}

// why is the reason for what a task does.
func (t Task) why() string { return "every " + schedule.FormatInterval(t.Every) }

// matching lists the volumes whose names match a pattern.
func (h *Host) matching(ctx context.Context, pattern string) ([]ref.Name, error) {
	names, err := h.Engine.VolumeNames(ctx)
	if err != nil {
		return nil, err
	}
	var out []ref.Name
	for _, n := range names {
		if ok, _ := path.Match(pattern, n); ok { // the pattern was checked
			name, err := ref.ParseName("snapshot", n)
			if err != nil {
				return nil, err
			}
			out = append(out, name)
		}
	}
	return out, nil
}

func (h *Host) push(ctx context.Context, t Task, checks *replicate.Checks) (schedule.Outcome, error) {
	ctx = act(ctx, t.Name, t.why())
	q := replicate.PushRequest{LimitBytes: t.Limit, Checks: checks}
	for _, p := range t.Push {
		if p.Glob == "" {
			q.Refs = append(q.Refs, p.Ref)
			continue
		}
		names, err := h.matching(ctx, p.Glob)
		if err != nil {
			return schedule.Outcome{}, err
		}
		for _, n := range names {
			q.Refs = append(q.Refs, n.Ref())
		}
	}
	if len(q.Refs) == 0 {
		return schedule.Outcome{Words: "nothing matches"}, nil
	}

	return h.operation(ctx, "push", t.What(), t.Name, func(
		ctx context.Context, tr *progress.Tracker,
	) (any, string, error) {
		r, err := h.Remote("push", t.Remote, tr)
		if err != nil {
			return nil, "", err
		}
		q.Tracker = tr
		done, err := replicate.Push(ctx, h.Engine, r, q)
		var sent int64
		unchanged := 0
		for _, p := range done {
			if sent += p.UploadedBytes; p.Unchanged {
				unchanged++
			}
		}
		return append([]replicate.Pushed{}, done...), fmt.Sprintf("pushed %d, %d up to date, %s sent",
			len(done)-unchanged, unchanged, errs.FormatBytes(sent)), err
	})
}

func (h *Host) pull(ctx context.Context, t Task) (schedule.Outcome, error) {
	ctx = act(ctx, t.Name, t.why())
	return h.operation(ctx, "pull", t.What(), t.Name, func(
		ctx context.Context, tr *progress.Tracker,
	) (any, string, error) {
		r, err := h.Remote("pull", t.Remote, tr)
		if err != nil {
			return nil, "", err
		}
		p, err := replicate.Pull(ctx, h.Engine, r, replicate.PullRequest{Ref: t.Pull, As: t.As, Update: true,
			LimitBytes: t.Limit, Tracker: tr})
		if err != nil {
			return nil, "", err
		}
		at := p.Volume + "@" + p.Point
		if p.Unchanged {
			return p, at + " is up to date", nil
		}
		return p, fmt.Sprintf("pulled %s, %s read", at, errs.FormatBytes(p.ReadBytes)), nil
	})
}

// refresh fetches what is new in the repository of a golden.
func (h *Host) refresh(ctx context.Context, t Task) (schedule.Outcome, error) {
	ctx = act(ctx, t.Name, t.why())
	return h.operation(ctx, "golden refresh", t.What(), t.Name, func(
		ctx context.Context, tr *progress.Tracker,
	) (any, string, error) {
		m, err := git.Refresh(ctx, h.Engine, git.RefreshRequest{Golden: t.Refresh, Env: h.Env, Tracker: tr})
		switch {
		case err != nil:
			return nil, "", err
		case m.Unchanged:
			return m, "nothing is new", nil
		}
		return m, "made " + ref.Generation(m.Golden, m.Generation), nil
	})
}
