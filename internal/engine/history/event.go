// Package history keeps the log of a pool: who made, mounted, renamed, destroyed and so on which object, and when. It
// is for people. Nothing in Pando depends on it: an event may be missing after a power loss or on a full disk.
package history

import (
	"bytes"
	"encoding/json"
	"time"
)

// Version is the version of the lines that this package writes.
const Version = 1

// Event says that an operation has been committed. Fields that do not apply are empty.
type Event struct {
	Time       time.Time  `json:"time"`
	Verb       string     `json:"verb"`
	Kind       string     `json:"kind"` // volume, snapshot, generation, golden
	Name       string     `json:"name"` // reference at that time: job, job@v1, web@3; of a golden: web
	NameBefore string     `json:"name_before,omitempty"`
	ID         string     `json:"id,omitempty"`      // of the object; a golden has none
	Lineage    string     `json:"lineage,omitempty"` // of the volume, or of the snapshot's volume, unless it is ID
	Origin     string     `json:"origin,omitempty"`  // reference that it was made from
	Mountpoint string     `json:"mountpoint,omitempty"`
	SizeBytes  int64      `json:"size_bytes,omitempty"` // new size
	Until      *time.Time `json:"until,omitempty"`      // end of a pin, or time of expiry
	OwnerUID   *uint32    `json:"owner_uid,omitempty"`  // owner of the volume, or the snapshot's volume; missing: root
	Remote     string     `json:"remote,omitempty"`     // where it was pushed to
	Who
}

// Who says which process did something, and for whom.
type Who struct {
	UID       uint32  `json:"uid"`
	User      string  `json:"user,omitempty"`       // name of UID
	SudoUID   *uint32 `json:"sudo_uid,omitempty"`   // user who ran sudo
	SudoUser  string  `json:"sudo_user,omitempty"`  // its name
	LoginUID  *uint32 `json:"login_uid,omitempty"`  // user who logged in, according to the kernel
	LoginUser string  `json:"login_user,omitempty"` // its name
	ForUID    *uint32 `json:"for_uid,omitempty"`    // user for whom a service acted, if it is a user of this host
	ForUser   string  `json:"for_user,omitempty"`   // its name, or whom else the service acted for
	PID       int     `json:"pid"`
	Command   string  `json:"command,omitempty"` // program and verb, without arguments
	Why       string  `json:"why,omitempty"`     // reason of a service that acted by itself
}

// line is an event as it is written.
type line struct {
	V int `json:"v"`
	Event
}

// lineStart begins every line. No line has it anywhere else: JSON escapes quotes in texts.
const lineStart = `{"v":`

// lineMost limits the bytes of a line. Only a long mount point can exceed it.
const lineMost = 4 << 10

// appendLine appends an event as one line to b.
func appendLine(b *bytes.Buffer, e Event) error {
	at := b.Len()
	enc := json.NewEncoder(b)
	enc.SetEscapeHTML(false)
	err := enc.Encode(line{Version, e})
	if err == nil && b.Len()-at > lineMost && e.Mountpoint != "" {
		b.Truncate(at)
		e.Mountpoint = ""
		return appendLine(b, e)
	}
	return err
}

// parseLine reads a line. It reports false for a line that is damaged, or of a version that it does not know.
//
// A write that was cut off, by a full disk or a power loss, has no line feed: the next event follows it on the same
// line, and zeros may precede it.
func parseLine(b []byte) (Event, bool) {
	at := bytes.LastIndex(b, []byte(lineStart))
	if at < 0 {
		return Event{}, false
	}

	var l line
	if json.Unmarshal(b[at:], &l) != nil || l.V != Version || l.Verb == "" || l.Time.IsZero() {
		return Event{}, false
	}
	return l.Event, true
}
