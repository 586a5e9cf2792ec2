// Package api has the things that Pando speaks of, as other programs see them: volumes, snapshots, generations and
// goldens, the pool, remotes with their points and operations, events and errors. --json prints them, and the service
// answers with them. What a verb did is described beside the code that did it, with these types in it.
//
// Their JSON is a promise: it has the same form wherever a thing appears, a field keeps its name and meaning, and
// programs must expect further fields. In it
//
//   - ref is what commands take: job-17, job-17@before, web@3. name is the thing's own name, and kind what it is;
//   - what does not apply, or is not known, is absent: there is no null, and no "" for it. A list that is always
//     there is [] without elements;
//   - sizes are in bytes, and end in _bytes; durations are in seconds, and end in _seconds; numbers of things end in
//     _count; times are RFC 3339.
//
// A tag of:"KIND,..." names the kinds of objects that can have a field; without it, all can. A tag always:"KIND,..."
// names those that always have it. A tag is:"KIND" says of what kind the objects in a field are.
package api

// Kind says what a reference names.
type Kind string

// The kinds.
const (
	KindVolume     Kind = "volume"
	KindSnapshot   Kind = "snapshot"
	KindGeneration Kind = "generation" // a generation of a golden
	KindGolden     Kind = "golden"     // a golden as a whole

	// What only the garbage collection speaks of.
	KindLayer Kind = "layer" // what overlays of a removed generation share
	KindTrash Kind = "trash" // an object that was destroyed, and is still to be removed
	KindTie   Kind = "tie"   // an object that was destroyed, and that others need
)

// State is what an object is doing.
type State string

// The states.
const (
	StateIdle       State = "idle"       // a snapshot, or a volume that is not mounted
	StateMounted    State = "mounted"    // a volume that is mounted
	StateCurrent    State = "current"    // a generation that new clones are made of
	StateSuperseded State = "superseded" // a generation that new clones are not made of
)
