// Package progress tracks the progress of a long operation. The operation updates the
// counts from any goroutine, and the front end reads them at any time. A nil *Tracker is
// valid and counts nothing.
package progress

import (
	"sync/atomic"
	"time"
)

// Tracker holds the counts. The zero value is ready to use.
type Tracker struct {
	stage                  atomic.Pointer[string]
	files, bytes           atomic.Int64
	totalFiles, totalBytes atomic.Int64
	stall                  atomic.Pointer[Stall]
}

// Stall describes why an operation makes no progress at the moment.
type Stall struct {
	Answer      string    // the cause: "server answers 503"
	Attempt, Of int       // attempts so far, and the maximum
	Next        time.Time // start of the next attempt
}

// State is a snapshot of a Tracker. Totals are 0 while unknown.
type State struct {
	Stage      string
	Files      int64
	Bytes      int64
	TotalFiles int64
	TotalBytes int64
	Stalled    *Stall // nil: not stalled
}

// Start begins a stage with its totals, 0 if unknown, and resets the counts.
func (t *Tracker) Start(stage string, totalFiles, totalBytes int64) {
	if t == nil {
		return
	}
	t.files.Store(0)
	t.bytes.Store(0)
	t.totalFiles.Store(totalFiles)
	t.totalBytes.Store(totalBytes)
	t.stage.Store(&stage)
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
		s.Stage = *p
	}

	return s
}
