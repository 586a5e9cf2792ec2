package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/progress"

	"github.com/schollz/progressbar/v3"
	"golang.org/x/term"
)

// How often progress is shown: on a terminal, and where there is none.
const (
	barInterval  = 100 * time.Millisecond
	lineInterval = 5 * time.Second
)

// showProgress shows the progress of an operation, which gets the context that it returns, until stop is called: a bar
// on a terminal, else a line every few seconds, which with --json is one JSON object. Short work shows nothing.
func (a *App) showProgress(ctx context.Context) (_ context.Context, stop func()) {
	if a.quiet || a.noProgress {
		return ctx, func() {}
	}

	t := &progress.Tracker{}
	a.outage.showIn(t)

	done := make(chan struct{})
	finished := make(chan struct{})
	go func() {
		defer close(finished)
		f, ok := a.Stderr.(*os.File)
		switch {
		case a.json:
			a.showLines(t, done, progressJSON)
		case ok && term.IsTerminal(int(f.Fd())):
			a.showBar(t, done)
		default:
			a.showLines(t, done, func(s progress.State, d time.Duration) string { return "pando: " + describeProgress(s, d) })
		}
	}()

	return progress.With(ctx, t), func() {
		close(done)
		<-finished
		a.outage.showIn(nil)
	}
}

func (a *App) showLines(t *progress.Tracker, done <-chan struct{}, line func(progress.State, time.Duration) string) {
	tick := time.NewTicker(lineInterval)
	defer tick.Stop()
	start, stage := time.Now(), ""
	var still idle
	for {
		select {
		case <-done:
			return
		case <-tick.C:
			s := still.markStalled(t.State(), time.Now())
			if s.Words() != stage {
				start, stage = time.Now().Add(-lineInterval), s.Words()
			}
			if s.Stalled != nil && a.lasting {
				continue // pushEvery reports it once
			}
			fmt.Fprintln(a.Stderr, line(s, time.Since(start)))
		}
	}
}

// progressEvent is a line of progress with --json. Unknown totals are left out.
type progressEvent struct {
	Stage          string  `json:"stage"`
	Files          int64   `json:"files"`
	TotalFiles     int64   `json:"total_files,omitempty"`
	Bytes          int64   `json:"bytes"`
	TotalBytes     int64   `json:"total_bytes,omitempty"`
	BytesPerSecond int64   `json:"bytes_per_second"`
	SecondsLeft    float64 `json:"seconds_left,omitempty"`

	Stalled *stallEvent `json:"stalled,omitempty"` // set while the remote does not answer properly
}

// stallEvent describes with --json what pando waits for.
type stallEvent struct {
	Answer      string  `json:"answer"`
	Attempt     int     `json:"attempt,omitempty"`
	Of          int     `json:"of,omitempty"`
	NextSeconds float64 `json:"next_seconds,omitempty"`
}

// progressJSON is a state as one JSON object, d after its stage began.
func progressJSON(s progress.State, d time.Duration) string {
	rate := float64(s.Bytes) / max(d.Seconds(), 0.001)
	e := progressEvent{Stage: errs.MaskURLs(s.Words()), Files: s.Files, TotalFiles: s.TotalFiles, Bytes: s.Bytes,
		TotalBytes: s.TotalBytes, BytesPerSecond: int64(rate)}
	if x := s.Stalled; x != nil && x.Of == 0 {
		e.Stalled = &stallEvent{Answer: errs.MaskURLs(x.Answer)}
	} else if x != nil {
		next := max(time.Until(x.Next), 0).Round(100 * time.Millisecond)
		e.Stalled = &stallEvent{Answer: errs.MaskURLs(x.Answer), Attempt: x.Attempt, Of: x.Of, NextSeconds: next.Seconds()}
	} else if rate > 0 && s.TotalBytes > s.Bytes {
		e.SecondsLeft = float64(s.TotalBytes-s.Bytes) / rate
	}

	return e.line()
}

// line is the event as one JSON object.
func (e progressEvent) line() string {
	b, err := json.Marshal(map[string]progressEvent{"progress": e})
	if err != nil {
		return "" // cannot happen: numbers and a text
	}

	return string(b)
}

// describeProgress puts a state into words.
func describeProgress(s progress.State, d time.Duration) string {
	out := s.Words()
	if s.TotalFiles > 0 {
		out += fmt.Sprintf(", %d of %d %s", s.Files, s.TotalFiles, s.Stage.Unit())
	} else if s.Files > 0 {
		out += fmt.Sprintf(", %d %s", s.Files, s.Stage.Unit())
	}
	out = strings.TrimSpace(out)

	rate := float64(s.Bytes) / max(d.Seconds(), 0.001)
	switch {
	case s.TotalBytes > 0:
		total := max(s.TotalBytes, s.Bytes) // it may be an estimate
		out += fmt.Sprintf(", %s of %s", formatBytes(s.Bytes), formatBytes(total))
		if rate > 0 && s.Stalled == nil {
			left := time.Duration(float64(total-s.Bytes) / rate * float64(time.Second))
			out += fmt.Sprintf(", %s/s, %s left", formatBytes(int64(rate)), left.Round(time.Second))
		}
	case s.Bytes > 0 && s.Stalled == nil:
		out += fmt.Sprintf(", %s, %s/s", formatBytes(s.Bytes), formatBytes(int64(rate)))
	case s.Bytes > 0:
		out += ", " + formatBytes(s.Bytes)
	}

	if s.Stalled != nil {
		out = strings.TrimPrefix(out+": "+stallWords(s.Stalled), ": ")
	}

	return errs.MaskURLs(out)
}

func (a *App) showBar(t *progress.Tracker, done <-chan struct{}) {
	tick := time.NewTicker(barInterval)
	defer tick.Stop()

	var bar *progressbar.ProgressBar
	var still idle
	stage, stalled := "", false
	clear := func() {
		if bar != nil {
			_ = bar.Clear() // of a terminal line
		}
		if stalled {
			fmt.Fprint(a.Stderr, clearLine)
		}
	}

	defer clear()

	start := time.Now()
	for {
		select {
		case <-done:
			return
		case <-tick.C:
			s := still.markStalled(t.State(), time.Now())
			if s.Stalled != nil { // replaces the bar, whose estimate is meaningless now
				clear()
				stalled = true
				fmt.Fprint(a.Stderr, clearLine+a.fitting(describeProgress(s, time.Since(start))))
				continue
			}

			if stalled {
				clear()
				stalled = false
			}

			if s.Stage == progress.None {
				continue
			}

			bytes := s.TotalBytes > 0 || s.Bytes > 0
			total, at := s.TotalFiles, s.Files
			if bytes {
				total, at = s.TotalBytes, s.Bytes
			}
			if total == 0 {
				total = -1 // a spinner
			}

			if s.Words() != stage || bar == nil {
				clear()
				stage = s.Words()
				bar = progressbar.NewOptions64(total,
					progressbar.OptionSetWriter(a.Stderr), progressbar.OptionSetDescription(stage), progressbar.OptionShowBytes(bytes),
					progressbar.OptionUseIECUnits(true), progressbar.OptionSetWidth(24), progressbar.OptionShowCount(),
					progressbar.OptionSetPredictTime(true), progressbar.OptionSpinnerType(14), progressbar.OptionFullWidth(),
					progressbar.OptionClearOnFinish(), progressbar.OptionThrottle(barInterval))
			}

			if total > 0 && bar.GetMax64() != total {
				bar.ChangeMax64(total)
			}

			desc := stage
			if bytes && s.TotalFiles > 0 {
				desc = strings.TrimSpace(fmt.Sprintf("%s %d/%d %s", stage, s.Files, s.TotalFiles, s.Stage.Unit()))
			}

			bar.Describe(desc)
			_ = bar.Set64(at)
		}
	}
}

// clearLine clears a line of a terminal.
const clearLine = "\r\x1b[K"

// fitting cuts a line to the width of the terminal.
func (a *App) fitting(line string) string {
	f, ok := a.Stderr.(*os.File)
	if !ok {
		return line
	}
	if width, _, err := term.GetSize(int(f.Fd())); err == nil && width > 0 {
		line = line[:min(len(line), width-1)]
	}
	return line
}
