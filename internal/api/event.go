package api

import "time"

// EventKind says what happened.
type EventKind string

// What happens to the pool.
const (
	EventInit    EventKind = "init"    // the pool was made
	EventRebuild EventKind = "rebuild" // the catalogue was made anew: the events before are lost
	EventBoot    EventKind = "boot"    // the host has started again: the last events before may be lost
)

// What happens to an object or a golden.
const (
	EventCreate  EventKind = "create"  // an object or golden was made
	EventReplace EventKind = "replace" // a volume has another content from now on, and its former one is a snapshot
	EventRename  EventKind = "rename"  // it has another name, and its snapshots or generations follow without events
	EventChange  EventKind = "change"  // one of its properties has another value
	EventMount   EventKind = "mount"   // a volume was mounted
	EventUmount  EventKind = "umount"  // a volume was unmounted
	EventDestroy EventKind = "destroy" // it no longer exists; a volume is unmounted before, without an event
)

// EventGap stands for events that are no longer there: they were too old, or were lost with the catalogue. Who follows
// events must look at everything anew.
const EventGap EventKind = "gap"

// Event is a change of the pool.
type Event struct {
	Seq    int64     `json:"seq"`            // number, higher than those of all events before; some are left out
	At     time.Time `json:"at"`             // time of the change
	Event  EventKind `json:"event"`          // what happened
	Kind   Kind      `json:"kind,omitempty"` // kind of what changed; absent: the pool
	Ref    string    `json:"ref,omitempty"`  // reference to what changed, as it is after the change
	ID     string    `json:"id,omitempty"`   // ID of the object that changed; a golden and the pool have none
	WhoUID uint32    `json:"who_uid"`        // user ID of who asked for the change
	Op     string    `json:"op,omitempty"`   // operation that made the change; recover did what was due, whoever's it was
	// Detail says more: the reference to the origin (create), to the snapshot with the former content (replace), or to
	// the object before (rename); a property that has another value now, as PROPERTY=VALUE (change); the mount point
	// (mount, umount); why it was destroyed.
	Detail string `json:"detail,omitempty"`
}
