// Package progress tracks the progress of a long operation, whose context carries the tracker. The operation updates
// the counts from any goroutine, and the front end reads them at any time. A nil *Tracker is valid and counts nothing.
package progress

import (
	"context"
	"strings"
	"sync/atomic"
	"time"
)

type key struct{}

// With returns a context whose operations report their progress to t, or to nobody if t is nil.
func With(ctx context.Context, t *Tracker) context.Context { return context.WithValue(ctx, key{}, t) }

// From returns the tracker that a context carries, or nil.
func From(ctx context.Context) *Tracker {
	t, _ := ctx.Value(key{}).(*Tracker)
	return t
}

// Tracker holds the counts. The zero value is ready to use.
type Tracker struct {
	stage                  atomic.Pointer[begun]
	files, bytes           atomic.Int64
	totalFiles, totalBytes atomic.Int64
	stall                  atomic.Pointer[Stall]
}

// begun is a stage that has begun.
type begun struct {
	stage Stage
	of    string
}

// Stall describes why an operation makes no progress at the moment.
type Stall struct {
	Answer      string    // the cause: "server answers 503"
	Attempt, Of int       // attempts so far, and the maximum
	Next        time.Time // start of the next attempt
}

// State is a snapshot of a Tracker. Totals are 0 while unknown.
type State struct {
	Stage      Stage
	Of         string // what the stage is about, a reference or a path; "": the whole operation
	Files      int64  // files, or what else the stage counts: see [Stage.Unit]
	Bytes      int64
	TotalFiles int64
	TotalBytes int64
	Stalled    *Stall // nil: not stalled
}

// Words returns stage and what it is about in English: "pushing web@daily".
func (s State) Words() string { return strings.TrimSpace(s.Stage.String() + " " + s.Of) }

// Start begins a stage with its totals, 0 if unknown, and resets the counts.
func (t *Tracker) Start(stage Stage, totalFiles, totalBytes int64) {
	t.StartOf(stage, "", totalFiles, totalBytes)
}

// StartOf is Start for a stage that is about something.
func (t *Tracker) StartOf(stage Stage, of string, totalFiles, totalBytes int64) {
	if t == nil {
		return
	}
	t.files.Store(0)
	t.bytes.Store(0)
	t.totalFiles.Store(totalFiles)
	t.totalBytes.Store(totalBytes)
	t.stage.Store(&begun{stage, of})
}

// Add adds finished files and bytes to the counts.
func (t *Tracker) Add(files, bytes int64) {
	if t == nil {
		return
	}
	if files != 0 {
		t.files.Add(files)
	}
	if bytes != 0 {
		t.bytes.Add(bytes)
	}
}

// Expect sets the totals of the stage, when they become known only after its start.
func (t *Tracker) Expect(totalFiles, totalBytes int64) {
	if t == nil {
		return
	}
	t.totalFiles.Store(totalFiles)
	t.totalBytes.Store(totalBytes)
}

// Set replaces the counts of the stage.
func (t *Tracker) Set(files, bytes, totalBytes int64) {
	if t == nil {
		return
	}
	t.files.Store(files)
	t.bytes.Store(bytes)
	t.totalBytes.Store(totalBytes)
}

// Stall records why the operation makes no progress, or, with nil, that it does again. Start does not change it.
func (t *Tracker) Stall(s *Stall) {
	if t != nil {
		t.stall.Store(s)
	}
}

// State returns the current counts.
func (t *Tracker) State() State {
	if t == nil {
		return State{}
	}

	s := State{
		Files:      t.files.Load(),
		Bytes:      t.bytes.Load(),
		TotalFiles: t.totalFiles.Load(),
		TotalBytes: t.totalBytes.Load(),
		Stalled:    t.stall.Load(),
	}

	if p := t.stage.Load(); p != nil {
		s.Stage, s.Of = p.stage, p.of
	}

	return s
}
