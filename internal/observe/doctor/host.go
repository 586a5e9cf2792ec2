package doctor

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/progress"
)

// HostRequest selects the checks of Examine.
type HostRequest struct {
	// Only holds the names of the checks to run; nil runs all.
	Only []string
	// PatienceEach limits the time of each check; 0 means 20 s. A check that takes longer keeps its findings so far,
	// unless it hangs.
	PatienceEach time.Duration
}

// host is what is examined, and how.
type host struct {
	HostRequest
	Pool   *PoolFacts    // Pando's pool on the host; nil: there is none, which is not a finding
	words  errs.Renderer // renders hints of errors that findings repeat; nil: in neutral words
	looked func()        // called after each look at the loop devices; for tests
}

// renderer returns words, or its default.
func (q *host) renderer() errs.Renderer {
	if q.words == nil {
		return errs.Neutral{}
	}
	return q.words
}

// PoolFacts describes a pool for the checks, because this package does not know pools.
type PoolFacts struct {
	Dir     string // of the pool
	Driver  string
	Loop    bool   // the pool lies in a loop-backed filesystem
	Data    string // directory (or mount point) of its objects
	Goldens []GoldenFacts
	// Attached maps the paths of images that are attached now to the names of their volumes. All other attached images in
	// the pool's directory are stray.
	Attached map[string]string
	// Mounts maps the current mount points of the pool's volumes to the names of the volumes.
	Mounts map[string]string
	// Ephemeral has the IDs of the pool's ephemeral volumes, which a reboot removes, and their current mount points. Pando
	// turns syncs off in them.
	Ephemeral map[string]string
	// Working is the number of objects that commands are working on. They may attach and mount objects that are in neither
	// map.
	Working int
	// Trouble is why Attached and Mounts are unknown, or nil. If it is set, nothing attached can be called stray.
	Trouble error
}

// command returns the shell command that runs a verb of pando on the pool.
func (p *PoolFacts) command(verb string) string { return "pando --pool " + word(p.Dir) + " " + verb }

// GoldenFacts is the current generation of a golden.
type GoldenFacts struct {
	Ref   string // "web@3"
	Image string // path of its image; "" if it has none
}

// Examination is the result of all checks. Its JSON form is stable.
type Examination struct {
	Worst   Severity  `json:"worst"` // of all checks: ok, note, warning, critical
	Checks  []Report  `json:"checks"`
	Started time.Time `json:"started_at"`
	Seconds float64   `json:"seconds"`
}

// check is one of those that Examine runs. run fills in a report; an error means that the check could not finish.
type check struct {
	name  string // "flushes"
	title string // "filesystems and pools that do not pass syncs on"
	run   func(context.Context, *host, *Report) error
}

// skip returns the error of a check that does not apply to this host or cannot run, with the reason for people.
func skip(format string, args ...any) error {
	return errs.New(errs.Unsupported, "", "", format, args...)
}

// checks returns all checks, in the order of the output.
func checks() []check {
	return slices.Concat(storageChecks(), kernelChecks())
}

// Check is a check that there is.
type Check struct {
	Name  string `json:"check"` // name of the check, stable: see docs/doctor.md
	Title string `json:"title"` // what the check looks for
}

// Checks returns all checks, in the order of the output.
func Checks() []Check {
	var out []Check
	for _, c := range checks() {
		out = append(out, Check{c.name, c.title})
	}
	return out
}

// graceEach is the time that a check has after PatienceEach to notice its timeout.
const graceEach = 3 * time.Second

// runLimited runs one check for at most q.PatienceEach, and the time it needs to notice. A check of something that
// hangs in the kernel can hang, too, and cannot be stopped: runLimited abandons it and returns the report empty.
func (c check) runLimited(ctx context.Context, q *host, empty Report) (Report, error) {
	mine, cancel := context.WithTimeout(ctx, q.PatienceEach)
	defer cancel()

	type result struct {
		r   Report
		err error
	}
	done := make(chan result, 1)
	go func() {
		own := empty
		err := c.run(mine, q, &own)
		done <- result{own, err}
	}()

	select {
	case x := <-done:
		return x.r, x.err
	case <-mine.Done():
	}

	select {
	case x := <-done:
		return x.r, x.err
	case <-time.After(graceEach):
		return empty, skip("the check hangs: the kernel or a device does not answer (see check stuck)")
	}
}

// Examine runs the checks, one after the other; they change nothing. They look at Pando's pool on this host, too; nil
// means that it has none. words renders hints of errors that findings repeat; nil renders them in neutral words.
// A check that fails is reported as skipped with its reason; Examine itself fails only
// for an unknown name (Invalid) or when ctx ends (Canceled).
func Examine(
	ctx context.Context, request HostRequest, pool *PoolFacts, words errs.Renderer,
) (*Examination, error) {
	q := host{HostRequest: request, Pool: pool, words: words}

	// Validate the request.
	all := checks()
	for _, name := range q.Only {
		if !slices.ContainsFunc(all, func(c check) bool { return c.name == name }) {
			return nil, errs.New(errs.Invalid, "doctor", name, "no such check").
				WithHint("run %s to list the checks", errs.Run("doctor", errs.Param("list")))
		}
	}

	if q.PatienceEach == 0 {
		q.PatienceEach = 20 * time.Second
	}

	// Run the checks.
	e := &Examination{Started: time.Now().UTC(), Worst: OK, Checks: []Report{}}
	for _, c := range all {
		if q.Only != nil && !slices.Contains(q.Only, c.name) {
			continue
		}

		progress.From(ctx).StartOf(progress.CheckingFor, c.title, 0, 0)
		r := Report{Check: c.name, Title: c.title, Status: OK, Measured: []Figure{}, Findings: []Finding{}}
		start := time.Now()
		r, err := c.runLimited(ctx, &q, r)
		if ctx.Err() != nil {
			return nil, errs.Wrap("doctor", "", ctx.Err())
		}

		// Conclude: a check with findings counts even if it could not finish.
		for _, f := range r.Findings {
			if rank(f.Severity) > rank(r.Status) {
				r.Status = f.Severity
			}
		}
		if err != nil {
			if len(r.Findings) == 0 {
				r.Status = Skipped
			}
			r.Summary = err.Error()
			if errors.Is(err, context.DeadlineExceeded) {
				r.Summary = fmt.Sprintf("the check took longer than %s: allow more with --time", q.PatienceEach)
			}
		}

		r.Seconds = time.Since(start).Seconds()
		if rank(r.Status) > rank(e.Worst) {
			e.Worst = r.Status
		}

		e.Checks = append(e.Checks, r)
	}

	e.Seconds = time.Since(e.Started).Seconds()
	return e, nil
}
