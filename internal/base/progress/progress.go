// Package progress counts how far a long operation has come. The operation adds
// to it from any goroutine; whoever shows it reads it when it likes. A nil
// *Tracker is valid and counts nothing.
package progress

import (
	"sync/atomic"
	"time"
)

// Tracker holds the counts. The zero value is ready.
type Tracker struct {
	stage                  atomic.Pointer[string]
	files, bytes           atomic.Int64
	totalFiles, totalBytes atomic.Int64
	stall                  atomic.Pointer[Stall]
}

// Stall is what an operation waits for that cannot go on at the moment.
type Stall struct {
	Answer      string    // what happens instead: "server answers 503"
	Attempt, Of int       // at it so far, and how many there are at most
	Next        time.Time // when the next one begins
}

// State is a moment of a Tracker. Totals are 0 while unknown.
type State struct {
	Stage      string
	Files      int64
	Bytes      int64
	TotalFiles int64
	TotalBytes int64
	Stalled    *Stall // nil: it goes on
}

// Start begins a stage with its totals (0: unknown) and resets the counts.
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

// Add counts files and bytes that are done.
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

// Stall says that the operation cannot go on, and why; nil: it goes on. It is left as it is by Start.
func (t *Tracker) Stall(s *Stall) {
	if t != nil {
		t.stall.Store(s)
	}
}

// State returns the counts of this moment.
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
