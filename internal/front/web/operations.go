package web

import (
	"slices"
	"strconv"

	"pando/client"
)

// operationsList is what the service does, and did.
type operationsList struct {
	Running, Ended []client.Operation
	Tasks          []client.Task
	Actions        []offer // of the pool
}

func (w *Web) operationsView(v *visit) (name, title string, view any, err error) {
	all, err := v.c.Operations(v.Context())
	if err != nil {
		return "", "", nil, err
	}
	o := operationsList{Tasks: v.who.Tasks, Actions: v.offers(poolActions, subject{})}
	for _, op := range all {
		if op.Running() {
			o.Running = append(o.Running, op)
			continue
		}
		o.Ended = append(o.Ended, op)
	}
	return "operations", "Operations", o, nil
}

// Lengths of the list of events.
const (
	usualEvents = 200
	mostEvents  = 5000
)

// activityList is who did what, the newest first.
type activityList struct {
	Ref    string // only events of this object; "": all
	Events []client.Event
	More   int // length of a longer list; 0: this is all
}

func (w *Web) activity(v *visit) (name, title string, view any, err error) {
	q := v.URL.Query()
	limit, _ := strconv.Atoi(q.Get("limit"))
	if limit < 1 || limit > mostEvents {
		limit = usualEvents
	}
	l := activityList{Ref: q.Get("ref")}
	l.Events, err = v.c.History(v.Context(), client.HistoryFilter{Ref: l.Ref, Limit: limit})
	if l.Ref != "" && client.IsKind(err, client.NotFound) {
		err = nil // nothing has or had this name: an empty list
	}
	slices.Reverse(l.Events)
	if len(l.Events) == limit && limit < mostEvents {
		l.More = min(limit*5, mostEvents)
	}
	return "activity", "Activity", l, err
}
