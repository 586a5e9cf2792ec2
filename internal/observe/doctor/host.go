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
	// Only are the names of the checks to do; nil: all.
	Only []string
	// Pool is Pando's pool on this host; nil: none, which is fine.
	Pool *PoolFacts
	// PatienceEach limits the time of each check, which then reports what it has; 0: 20 s.
	PatienceEach time.Duration
	// Words renders hints of errors that findings repeat; nil: in neutral words.
	Words   errs.Renderer
	Tracker *progress.Tracker

	looked func() // for tests: called after each look at the loop devices
}

func (q *HostRequest) renderer() errs.Renderer {
	if q.Words == nil {
		return errs.Neutral{}
	}
	return q.Words
}

// PoolFacts describes a pool for the checks, because this package does not know pools.
type PoolFacts struct {
	Dir     string // of the pool
	Driver  string
	Loop    bool   // it lies in a file of its own
	Data    string // the directory (or mount point) that its objects are in
	Goldens []GoldenFacts
	// Images are the files behind volumes that are attached now, by path, with the
	// volume's name: what else is attached from the pool's directory is left over.
	Attached map[string]string
	// Mounts are the mount points that the pool's volumes have now.
	Mounts map[string]string
	// Working is how many things commands are at work on, which may attach and mount
	// what is in neither list.
	Working int
	// Trouble is why the lists are not known, nil if they are: then nothing that is
	// attached can be called left over.
	Trouble error
}

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

// check is one of the things that Examine looks at.
type check struct {
	name  string // "flushes"
	title string // "filesystems and pools that do not pass syncs on"
	run   func(context.Context, *HostRequest, *Report) error
}

// skip ends a check that cannot look, with a reason for people.
func skip(format string, args ...any) error {
	return errs.New(errs.Unsupported, "", "", format, args...)
}

// checks are all that there are, in the order of the output.
func checks() []check {
	return slices.Concat(storageChecks(), kernelChecks())
}

// Checks are the names and titles of all checks, in order.
func Checks() [][2]string {
	var out [][2]string
	for _, c := range checks() {
		out = append(out, [2]string{c.name, c.title})
	}
	return out
}

// graceEach is the time a check has to notice its timeout.
const graceEach = 3 * time.Second

// runLimited runs one check. A check of something that hangs in the kernel can hang, too, and cannot be stopped: it is
// abandoned, and its findings are dropped.
func (c check) runLimited(ctx context.Context, q *HostRequest, empty Report) (Report, error) {
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

// Examine runs the checks, one after the other; they change nothing.
// A check that fails is reported as skipped with its reason; Examine itself fails only
// for an unknown name (Invalid) or when ctx ends (Canceled).
func Examine(ctx context.Context, q HostRequest) (*Examination, error) {
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

	e := &Examination{Started: time.Now().UTC(), Worst: OK, Checks: []Report{}}
	for _, c := range all {
		if q.Only != nil && !slices.Contains(q.Only, c.name) {
			continue
		}

		q.Tracker.Start("checking for "+c.title, 0, 0)
		r := Report{Check: c.name, Title: c.title, Status: OK, Measured: []Figure{}, Findings: []Finding{}}
		start := time.Now()
		r, err := c.runLimited(ctx, &q, r)
		if ctx.Err() != nil {
			return nil, errs.Wrap("doctor", "", ctx.Err())
		}

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
