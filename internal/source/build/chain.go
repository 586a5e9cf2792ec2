package build

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"

	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine"
	"pando/internal/linux/run"
)

// stepsSuffix ends the name of the golden that has the results of all steps but the last.
const stepsSuffix = ".steps"

// Request says which build file to run.
type Request struct {
	File    *File
	Golden  ref.Name // instead of that of the file
	From    *ref.Ref // instead of that of the file
	Until   string   // the step to stop after; "": the last
	Again   bool     // run all steps
	Caller  []string // environment that secrets are taken from
	Keep    *int     // of the golden: newest generations to keep from now on, 0: all; nil: as before
	Share   *Sharing // with other hosts; nil: not
	Signals run.Signals
	Output  io.Writer // gets what the commands print; nil: nobody
	Tracker *progress.Tracker

	// Begin is called before a step runs, and Done after each step. They may be nil.
	Begin func(n int, s StepResult)
	Done  func(n int, s StepResult)
}

// Result is the result of Run. Its JSON form is stable.
type Result struct {
	engine.Info
	Steps   []StepResult `json:"steps"`
	Removed []string     `json:"removed,omitempty"` // older generations, by the golden's retention
}

// StepResult says what became of a step. Its JSON form is stable.
type StepResult struct {
	Name    string  `json:"name"`
	Key     string  `json:"key"`
	Result  string  `json:"result"` // reference of its generation; "" if a later step was found
	Cached  bool    `json:"cached"` // its command did not run
	Waited  bool    `json:"waited"` // for another process that built it
	Fetched bool    `json:"fetched"`
	Seconds float64 `json:"seconds"` // that its command took
}

// step is a step that is being built.
type step struct {
	*Step
	inputs []input
	env    []string
	chain  string // identifies the step and all before it, whatever they began with
	key    string // the same, and what they began with
}

// chain is a build file that is being run.
type chain struct {
	e     *engine.Engine
	q     Request
	name  ref.Name // of the golden
	steps ref.Name // of the golden with the steps
	from  ref.Ref  // an immutable object
	base  driver.ObjectID
	all   []step
	out   Result
}

// Run runs the steps of a build file, from the first one without a result, and returns the generation that the last one
// has made. An error or a killed process leaves the results of the steps before, and nothing of the step that ran. The
// errors of [engine.Engine.Build]; Invalid (the file), NotFound (an input file, a secret).
func Run(ctx context.Context, e *engine.Engine, q Request) (Result, error) {
	c := &chain{e: e, q: q}
	if err := c.prepare(ctx); err != nil {
		return Result{}, err
	}

	// Find the last step that has a result.
	first, at, err := c.findLast(ctx)
	if err != nil {
		return Result{}, err
	}

	if next, fetched, err := c.fetchLast(ctx, first); err != nil {
		return Result{}, err
	} else if next > first {
		first, at = next, fetched
	}

	// Run the others.
	for i := first; i < len(c.all); i++ {
		built, err := c.runStep(ctx, i, at)
		if err != nil {
			return Result{}, c.stepError(i, err)
		}
		at = generation(built.Info)
		c.out.Info, c.out.Removed = built.Info, built.Removed
	}

	return c.out, nil
}

// stepError adds to an error which step it is about.
func (c *chain) stepError(i int, err error) error {
	cause := err
	var known *errs.Error
	if errors.As(err, &known) && known.Err != nil {
		cause = known.Err
		if known.Ref != "" && known.Ref != c.goldenOf(i).String() {
			cause = fmt.Errorf("%s: %w", known.Ref, cause)
		}
	}
	return &errs.Error{Kind: errs.KindOf(err), Op: op, Ref: c.q.File.path, Hint: errs.HintIn(err),
		Err: fmt.Errorf("step %d (%s): %w", i+1, c.all[i].Name, cause)}
}

// prepare finds out everything that keys depend on. It changes nothing.
func (c *chain) prepare(ctx context.Context) (err error) {
	f, q := c.q.File, c.q
	if c.name = q.Golden; c.name.IsZero() {
		if f.Golden == "" {
			return errs.New(errs.Invalid, op, f.path, "it does not name a golden").
				WithHint("add the line golden = \"NAME\", or use %s", errs.Param("golden"))
		}
		if c.name, err = ref.ParseName(op, f.Golden); err != nil {
			return err
		}
	}
	if c.steps, err = ref.ParseName(op, c.name.String()+stepsSuffix); err != nil {
		return err
	}

	if err := c.findBase(ctx); err != nil {
		return err
	}

	// Compute the keys of all steps.
	steps := f.Steps
	if q.Until != "" {
		n := slices.IndexFunc(steps, func(s Step) bool { return s.Name == q.Until })
		if n < 0 {
			return errs.New(errs.NotFound, op, q.Until, "%s has no step of this name", f.path)
		}
		steps = steps[:n+1]
	}

	before := ""
	for i := range steps {
		s := step{Step: &steps[i]}
		if s.inputs, err = f.inputs(ctx, s.Step); err != nil {
			return err
		}
		s.env = f.environment(s.Step)
		s.chain = s.chainSum(before)
		s.key = c.keyOf(s.chain)
		before = s.chain
		c.all = append(c.all, s)
		c.out.Steps = append(c.out.Steps, StepResult{Name: s.Name, Key: s.key, Cached: true})
	}
	return nil
}

// findBase finds what the first step begins with, and keeps to that even if the golden gets another generation.
func (c *chain) findBase(ctx context.Context) (err error) {
	f := c.q.File
	switch {
	case c.q.From != nil:
		c.from = *c.q.From
	case f.From == "":
		return errs.New(errs.Invalid, op, f.path, "it does not say what to begin with").
			WithHint("add the line from = \"REF\", or use %s", errs.Param("from"))
	default:
		if c.from, err = ref.Parse(op, f.From); err != nil {
			return err
		}
	}

	if c.from, err = c.e.BuildBase(ctx, c.from); err != nil {
		return err
	}
	p, err := c.e.Point(ctx, c.from)
	if err != nil {
		return err
	}
	c.base, c.from = p.ID, ref.Ref{Name: p.Volume, At: p.Name}
	return nil
}

// chainSum returns what identifies a step and those before it: docs/builds.md has its form.
func (s *step) chainSum(before string) string {
	h := newSum("step 1")
	h.add("before", before)
	h.add("run", s.Run)
	h.add("dir", s.Dir)
	h.add("env", s.env...)
	h.add("secrets", slices.Sorted(slices.Values(s.Secrets))...)
	h.add("to", s.To)
	for _, in := range s.inputs {
		h.add("input", in.fields()...)
	}
	return h.hex()
}

// keyOf returns the key of a step in this pool.
func (c *chain) keyOf(chainSum string) string {
	h := newSum("key 1")
	h.add("chain", chainSum)
	h.add("base", string(c.base))
	return keyPrefix + h.hex()
}

// goldenOf returns the golden that gets the result of a step. The last step of the file goes to the golden itself.
func (c *chain) goldenOf(i int) ref.Name {
	if i == len(c.q.File.Steps)-1 {
		return c.name
	}
	return c.steps
}

// findLast returns the first step to run, and the result of the one before it; zero if that is what the build begins
// with. Steps before need no result.
func (c *chain) findLast(ctx context.Context) (int, ref.Ref, error) {
	if c.q.Again {
		return 0, ref.Ref{}, nil
	}

	for i, s := range slices.Backward(c.all) {
		for _, golden := range []ref.Name{c.name, c.steps} {
			found, ok, err := c.e.CachedBuild(ctx, engine.BuildRequest{Golden: golden, From: c.from, Key: s.key})
			if err != nil {
				return 0, ref.Ref{}, err
			}
			if !ok {
				continue
			}

			at := generation(found.Info)
			if i == len(c.q.File.Steps)-1 && golden == c.steps { // it was not the last step before
				if found, err = c.publishAsLast(ctx, i, at); err != nil {
					return 0, ref.Ref{}, err
				}
				at = generation(found.Info)
			}
			c.out.Info, c.out.Steps[i].Result = found.Info, at.String()
			for n := range i + 1 {
				c.done(n)
			}
			return i + 1, at, nil
		}
	}
	return 0, ref.Ref{}, nil
}

// publishAsLast publishes the result that a step has in the golden with the steps in that of the last step, too.
func (c *chain) publishAsLast(ctx context.Context, i int, at ref.Ref) (engine.Built, error) {
	q := engine.BuildRequest{Golden: c.name, From: c.from, Key: c.all[i].key, Keep: c.q.Keep, Tracker: c.q.Tracker}
	unlock, err := c.e.LockBuild(ctx, q)
	if err != nil {
		return engine.Built{}, err
	}
	defer unlock()

	if out, found, err := c.e.CachedBuild(ctx, q); err != nil || found { // another process was faster
		return out, err
	}
	return c.e.PublishFetched(ctx, q, at)
}

// runStep runs a step in a clone of at, the result of the one before.
func (c *chain) runStep(ctx context.Context, i int, at ref.Ref) (engine.Built, error) {
	s := c.all[i]
	q := engine.BuildRequest{
		Golden: c.goldenOf(i), From: c.from, In: at, Key: s.key, Again: c.q.Again,
		Command: []string{"sh", "-e", "-c", s.Run}, Dir: s.Dir, Env: slices.Clone(s.env),
		Signals: c.q.Signals, Output: c.q.Output, Tracker: c.q.Tracker,
		Prepare: func(ctx context.Context, dir string) error {
			return c.q.File.copyInputs(ctx, s.Step, s.inputs, dir)
		},
	}
	if i == len(c.q.File.Steps)-1 {
		q.Keep = c.q.Keep
	}

	var err error
	if q.Env, err = c.withSecrets(s, q.Env); err != nil {
		return engine.Built{}, err
	}

	if c.q.Begin != nil {
		c.q.Begin(i, c.out.Steps[i])
	}
	built, err := c.q.Share.build(ctx, c.e, q, s.chain)
	if err != nil {
		return built, err
	}

	r := &c.out.Steps[i]
	r.Result, r.Cached, r.Waited, r.Fetched = generation(built.Info).String(), built.Cached, built.Waited, built.Fetched
	r.Seconds = built.Seconds
	c.done(i)
	return built, nil
}

func (c *chain) done(i int) {
	if c.q.Done != nil {
		c.q.Done(i, c.out.Steps[i])
	}
}

// withSecrets adds the secrets of a step to an environment. NotFound.
func (c *chain) withSecrets(s step, env []string) ([]string, error) {
	for _, name := range s.Secrets {
		value, ok := lookup(c.q.Caller, name)
		if !ok {
			return nil, errs.New(errs.NotFound, op, name, "the secret is not set").
				WithHint("set the variable %s when you call pando", name)
		}
		env = set(env, name, value)
	}
	return env, nil
}

// generation returns the reference of a generation.
func generation(i engine.Info) ref.Ref {
	return ref.Ref{Name: i.Golden, At: fmt.Sprint(i.Generation)}
}
