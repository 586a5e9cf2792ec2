package cli

import (
	"context"
	"fmt"
	"strings"

	"pando/internal/base/errs"
	"pando/internal/engine"
	"pando/internal/observe/doctor"
)

// doctorHost examines the host and the pool.
func (a *App) doctorHost(ctx context.Context, q doctor.HostRequest) error {
	facts, err := a.poolFacts(ctx)
	if err != nil {
		return err
	}

	ctx, stop := a.showProgress(ctx)
	e, err := doctor.Examine(ctx, q, facts, commandLine{})
	stop()
	if err != nil {
		return err
	}

	switch e.Worst {
	case doctor.Critical:
		a.exit = exitCritical
	case doctor.Warning:
		a.exit = exitWarning
	}

	return a.printExamination(e)
}

// poolFacts looks at the pool without touching it. That there is none is an error only
// if --pool names one.
func (a *App) poolFacts(ctx context.Context) (*doctor.PoolFacts, error) {
	v, err := engine.Look(ctx, a.poolDir(), a.Drivers)
	switch {
	case err == nil:
	case ctx.Err() != nil, a.dir != "" && errs.Is(err, errs.NotFound):
		return nil, err
	case errs.Is(err, errs.NotFound):
		a.printNote("no pool in %s: examining only the host", a.poolDir())
		return nil, nil
	default: // damaged, or of another user
		return &doctor.PoolFacts{Dir: a.poolDir(), Trouble: err}, nil
	}

	f := &doctor.PoolFacts{Dir: v.Dir, Driver: v.Driver, Loop: v.Loop, Data: v.Data, Attached: v.Attached,
		Mounts: v.Mounts, Ephemeral: v.Ephemeral, Working: v.Working, Trouble: v.Trouble}
	for _, g := range v.Goldens {
		image := g.Image
		if g.Tree {
			image = "" // not one file
		}
		f.Goldens = append(f.Goldens, doctor.GoldenFacts{Ref: g.Ref, Image: image})
	}

	return f, nil
}

// printChecks lists the checks.
func (a *App) printChecks() error {
	all := doctor.Checks()
	if a.json {
		return a.printJSON(all)
	}

	if a.quiet {
		for _, c := range all {
			a.printf("%s\n", c.Name)
		}
		return nil
	}

	t := a.table("CHECK", "LOOKS FOR")
	for _, c := range all {
		t.row(c.Name, c.Title)
	}

	return t.flush()
}

// printExamination prints a line for each check that is well, then findings in full,
// the worst first.
func (a *App) printExamination(e *doctor.Examination) error {
	switch {
	case a.json:
		return a.printJSON(e)
	case a.quiet:
		a.printCodes(e.Checks...)
		return nil
	}

	width := 0
	for _, c := range e.Checks {
		width = max(width, len(c.Check))
	}

	skipped := 0
	for _, c := range e.Checks {
		text := c.Summary
		if text == "" && len(c.Findings) > 0 {
			text = c.Findings[0].Title
		}
		if c.Status == doctor.Skipped {
			skipped++
		}
		indent := strings.Repeat(" ", width+12)
		a.printf("%-8s  %-*s  %s", c.Status, width, c.Check,
			strings.TrimPrefix(wrapText(text, indent, doctorWidth+12), indent))
	}

	counts := map[doctor.Severity]int{}
	told := map[string]bool{} // why, which is the same for all of a code
	for _, severity := range []doctor.Severity{doctor.Critical, doctor.Warning, doctor.Note} {
		for _, c := range e.Checks {
			for _, f := range c.Findings {
				if f.Severity != severity {
					continue
				}
				counts[severity]++
				if told[f.Why] {
					f.Why = ""
				}
				told[f.Why] = true
				a.printFinding(f, nil)
			}
		}
	}

	return a.printf("\n%s\n", summarizeFindings(counts, skipped))
}

// summarizeFindings sums up: "2 critical, 1 warning, 3 notes; 4 checks were skipped".
func summarizeFindings(counts map[doctor.Severity]int, skipped int) string {
	var parts []string
	if n := counts[doctor.Critical]; n > 0 {
		parts = append(parts, fmt.Sprintf("%d critical", n))
	}

	if n := counts[doctor.Warning]; n > 0 {
		parts = append(parts, errs.Plural(n, "warning"))
	}

	if n := counts[doctor.Note]; n > 0 {
		parts = append(parts, errs.Plural(n, "note"))
	}

	text := strings.Join(parts, ", ")
	if text == "" {
		text = "nothing found"
	}

	switch {
	case skipped == 1:
		text += "; 1 check was skipped"
	case skipped > 1:
		text += fmt.Sprintf("; %d checks were skipped", skipped)
	}

	return text
}
