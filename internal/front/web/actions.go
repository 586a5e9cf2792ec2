package web

import (
	"context"
	"net/url"
	"strconv"

	"pando/client"
)

// action is something that can be done to objects. Whether it may be done is decided by the API; why says in advance
// what would make the API refuse it.
type action struct {
	Name, Title string
	Fields      []field
	Danger      bool   // it is confirmed, on a page that says what is lost
	Needs       string // in lists, of a row: mounted, idle, pinned, unpinned; "": any

	why func(*visit, subject) string // it cannot be done; "" if it can
	do  func(context.Context, *client.Client, string, url.Values) (string, error)
}

// subject is what an action is done to.
type subject struct {
	client.Object
	details *client.Details // of the volume or golden that it is, or is part of
	golden  string          // the golden itself, not one of its generations
}

// ref returns the reference of a subject.
func (s subject) ref() string {
	if s.golden != "" {
		return s.golden
	}
	if s.Kind == "golden" {
		return s.Golden + "@" + strconv.Itoa(s.Generation)
	}
	return s.Name
}

// offer is an action for one object, with the reason if it is not possible.
type offer struct {
	action
	Ref, ETag string
	Why       string
	Key       string // so that the same form, sent twice, does its work once
}

// field is an input of an action.
type field struct {
	Name, Title, Value string
	Hint               string
	Choices            []string
	Required           bool
}

// offers returns the actions for an object.
func (v *visit) offers(actions func(subject) []action, s subject) (out []offer) {
	for _, a := range actions(s) {
		o := offer{action: a, Ref: s.ref(), Key: randomText(8)}
		if s.details != nil && s.details.Name == s.Name {
			o.ETag = s.details.ETag
		}
		if a.why != nil {
			o.Why = a.why(v, s)
		}
		out = append(out, o)
	}
	return out
}

// isOwn returns a check of an action that changes a volume: the user may, and then what else it needs.
func isOwn(then func(subject) string) func(*visit, subject) string {
	return func(v *visit, s subject) string {
		if why := v.mayChange(s.Object); why != "" || then == nil {
			return why
		}
		return then(s)
	}
}

// forRoot is a check of an action that only root may do.
func forRoot(then func(subject) string) func(*visit, subject) string {
	return func(v *visit, s subject) string {
		if why := v.rootOnly(); why != "" || then == nil {
			return why
		}
		return then(s)
	}
}

// Reasons that several actions have.
func isMounted(s subject) string {
	switch {
	case s.Sandboxed:
		return "It is mounted in the sandbox of a run, which unmounts it at its end."
	case s.State == "mounted":
		return "It is mounted at " + s.Mountpoint + ": unmount it first."
	}
	return ""
}

func isPinned(s subject) string {
	switch {
	case s.PinnedUntil == nil:
		return ""
	case s.PinnedUntil.Year() >= 2200:
		return "It is pinned: unpin it first."
	}
	return "It is pinned until " + formatTime(*s.PinnedUntil) + ": unpin it first."
}

// bulkActions are those of a selection of volumes, without fields.
func bulkActions() (out []action) {
	for _, a := range volumeActions(subject{}) {
		switch a.Name {
		case "mount", "unmount", "snapshot", "pin", "unpin", "destroy":
			out = append(out, a)
		}
	}
	return out
}

// actionNamed finds an action by its name.
func actionNamed(name string) (action, bool) {
	for _, list := range [][]action{volumeActions(subject{}), snapshotActions(subject{}), goldenActions(subject{}),
		generationActions(subject{}), poolActions(subject{}), {cancelAction()}} {
		for _, a := range list {
			if a.Name == name {
				return a, true
			}
		}
	}
	return action{}, false
}

// started says that an operation was begun.
func started(op *client.Operation, err error) (string, error) {
	if err != nil {
		return "", err
	}
	return op.Verb + " has begun: see Operations", nil
}
