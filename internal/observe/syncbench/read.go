package syncbench

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"

	"pando/internal/base/errs"
	"pando/internal/observe/proof"
)

// Kind is what a report's JSON form calls itself.
const Kind = "pando bench sync"

const (
	// maxReport is the longest file that is read as a report, in bytes: an hour of
	// ten runs has some 10 MB.
	maxReport = 256 << 20
	// maxValue is the largest number in a report: a petabyte in a run, and some 30
	// million years. The sum of those of MaxRuns is still an int64.
	maxValue = 1e15
)

// MaxRuns is how many runs a report has at the most.
const MaxRuns = 1000

// Read reads the JSON form of a report from a file (or a pipe). NotFound, Permission,
// Invalid (it is something else), Damaged (it is not whole, or its figures cannot be),
// TooNew.
func Read(path string) (*Report, error) {
	const op = "read the report"
	f, err := os.Open(path)
	if err != nil {
		return nil, errs.Wrap(op, path, err)
	}

	defer f.Close()
	if st, err := f.Stat(); err != nil {
		return nil, errs.Wrap(op, path, err)
	} else if st.IsDir() {
		return nil, errs.New(errs.Invalid, op, path, "is a directory").WithHint("use the file with the output of "+
			"%s", errs.Run("bench sync", errs.Param("json")))
	}

	b, err := io.ReadAll(io.LimitReader(f, maxReport+1))
	if err != nil {
		return nil, errs.Wrap(op, path, err)
	}
	if len(b) > maxReport {
		return nil, errs.New(errs.Invalid, op, path, "too large for a report of `pando bench sync`")
	}

	return Parse(b, path)
}

// Parse reads the JSON form of a report; name is what errors call it. Fields that it
// does not know are of a newer pando of the same format, and are passed over. The kinds
// of errors are those of Read.
func Parse(b []byte, name string) (*Report, error) {
	const op = "read the report"
	const hint = "use the output of `pando bench sync --json`"
	if len(bytes.TrimSpace(b)) == 0 {
		return nil, errs.New(errs.Invalid, op, name, "file is empty").WithHint(hint)
	}

	var head struct {
		Kind   *string          `json:"kind"`
		Format *json.Number     `json:"format"`
		Fio    *string          `json:"fio version"`
		Error  *json.RawMessage `json:"error"`
	}

	// Of the first value only: fio, for one, prints several.
	if err := json.NewDecoder(bytes.NewReader(b)).Decode(&head); err != nil {
		return nil, syntax(op, name, len(b), err)
	}

	switch {
	case head.Kind == nil && head.Fio != nil:
		return nil, errs.New(errs.Invalid, op, name, "this is the output of fio itself").WithHint(hint)
	case head.Kind == nil && head.Error != nil:
		return nil, errs.New(errs.Invalid, op, name, "this is an error message, not a report").WithHint(hint)
	case head.Kind == nil:
		return nil, errs.New(errs.Invalid, op, name, "not a report of `pando bench sync`").WithHint(hint)
	case *head.Kind != Kind:
		return nil, errs.New(errs.Invalid, op, name, "this is a report of %q, not of %q", *head.Kind, Kind).WithHint(hint)
	case head.Format == nil:
		return nil, errs.New(errs.Damaged, op, name, "the format is missing").WithHint("create the report again")
	}

	n, err := head.Format.Int64()
	switch {
	case err != nil || n < 1:
		return nil, errs.New(errs.Damaged, op, name, "unknown format %q", head.Format.String()).
			WithHint("create the report again")
	case n > Format:
		return nil, errs.New(errs.TooNew, op, name, "the report has format %d; this pando reads formats up to %d", n, Format).
			WithHint("use the pando that wrote it, or a newer one")
	}

	var r Report
	if err := json.Unmarshal(b, &r); err != nil {
		return nil, syntax(op, name, len(b), err)
	}

	if err := r.check(); err != nil {
		return nil, errs.New(errs.Damaged, op, name, "%w", err).
			WithHint("the file was changed or is incomplete: create the report again")
	}

	return &r, nil
}

// syntax says what is wrong with JSON of so many bytes.
func syntax(op, name string, length int, err error) error {
	const hint = "use the unchanged output of `pando bench sync --json`: redirect only standard output"
	var bad *json.SyntaxError
	var typ *json.UnmarshalTypeError
	switch {
	case errors.Is(err, io.ErrUnexpectedEOF):
		return errs.New(errs.Damaged, op, name, "the report ends in the middle, after %d bytes", length).
			WithHint("the run was interrupted or the copy is incomplete: create the report again")
	case errors.As(err, &bad):
		return errs.New(errs.Invalid, op, name, "not JSON: %v, at byte %d", bad, bad.Offset).WithHint(hint)
	case errors.As(err, &typ):
		return errs.New(errs.Invalid, op, name, "%s must not be of type %s", orTop(typ.Field), typ.Value).WithHint(hint)
	}

	return errs.New(errs.Invalid, op, name, "not JSON: %v", err).WithHint(hint)
}

func orTop(field string) string {
	if field == "" {
		return "a report"
	}
	return "its " + field
}

// check finds what no run can have measured, so that nothing that computes with the
// figures has to.
func (r *Report) check() error {
	switch {
	case len(r.Runs) == 0:
		return errors.New("the report has no runs")
	case len(r.Runs) > MaxRuns:
		return fmt.Errorf("the report has %d runs, more than %d", len(r.Runs), MaxRuns)
	case r.Verdict.Result != Pass && r.Verdict.Result != Failed:
		return fmt.Errorf("the verdict is %q, neither %s nor %s", r.Verdict.Result, Pass, Failed)
	}

	if err := numbers("the report", r.Seconds, float64(r.Host.CPUs), float64(r.Host.MemoryBytes), float64(r.Profile.Bytes),
		float64(r.Profile.File),
		float64(r.Profile.Writers), float64(r.Profile.PerSync)); err != nil {
		return err
	}

	for i := range r.Runs {
		if err := r.Runs[i].check(); err != nil {
			return fmt.Errorf("run %d: %w", i+1, err)
		}
		if p := r.Runs[i].Proof.Result; r.Verdict.Result == Pass && p != proof.OK && p != proof.NotNeeded {
			return fmt.Errorf("the verdict is %s, but the proof of run %d is %q", Pass, i+1, p)
		}
	}

	if t := r.Target; t != nil {
		if err := numbers("the target", t.P99, t.Best, float64(t.Writers)); err != nil {
			return err
		}
		for _, s := range t.Steps {
			if err := numbers("a step to the target", float64(s.Writers), s.SyncsPerSecond, s.P99); err != nil {
				return err
			}
		}
	}

	return nil
}

func (r *Run) check() error {
	if err := numbers("its totals", r.Seconds, float64(r.Writers), float64(r.Writes), float64(r.Bytes), float64(r.Syncs),
		r.WritesPerSecond, r.SyncsPerSecond); err != nil {
		return err
	}

	if r.Seconds == 0 {
		return errors.New("the run took no time")
	}

	if err := r.Sync.check(); err != nil {
		return fmt.Errorf("syncs: %w", err)
	}

	if r.Write != nil {
		if err := r.Write.check(); err != nil {
			return fmt.Errorf("writes: %w", err)
		}
	}

	at := 0.0
	for _, m := range r.Timeline {
		if err := numbers("time line", m.At, m.Length, m.Syncs, m.P50, m.P99, m.Max); err != nil {
			return err
		}
		if m.At <= at || m.Length == 0 {
			return fmt.Errorf("time line: an interval of %g s that ends at %g s follows %g s", m.Length, m.At, at)
		}
		at = m.At
	}

	for _, s := range r.Stalls {
		if err := numbers("a stall", s.From, s.To); err != nil {
			return err
		}
		if s.To < s.From {
			return fmt.Errorf("a stall ends at %g s, before it begins at %g s", s.To, s.From)
		}
	}

	switch r.Proof.Result {
	case proof.OK, proof.Fail, proof.Unknown, proof.NotNeeded:
	default:
		return fmt.Errorf("unknown result of the proof: %q", r.Proof.Result)
	}

	return nil
}

func (l *Latency) check() error {
	if err := numbers("a latency", float64(l.Count), l.Min, l.Mean, l.P50, l.P95, l.P99, l.P999, l.Max); err != nil {
		return err
	}

	if l.P50 > l.P95 || l.P95 > l.P99 || l.P99 > l.P999 {
		return fmt.Errorf("percentiles decrease: p50 %g, p95 %g, p99 %g, p99.9 %g", l.P50, l.P95, l.P99, l.P999)
	}

	last, sum := -1.0, int64(0)
	for _, b := range l.Histogram {
		if err := numbers("the histogram", b.Value, float64(b.Count)); err != nil {
			return err
		}
		if b.Value <= last {
			return fmt.Errorf("histogram: %g follows %g", b.Value, last)
		}
		last = b.Value
		if sum += b.Count; sum < 0 || float64(sum) > maxValue {
			return errors.New("histogram: the counts are too large")
		}
	}

	return nil
}

// numbers finds one that is no amount of anything.
func numbers(of string, all ...float64) error {
	for _, v := range all {
		if v < 0 || v > maxValue || math.IsNaN(v) {
			return fmt.Errorf("%s: %g is out of range", of, v)
		}
	}
	return nil
}
