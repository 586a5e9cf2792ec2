package engine

import (
	"context"
	"slices"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/warnings"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/engine/history"
	"pando/internal/engine/pool"
)

// Actor is the user for whom a front end calls the engine, for the history.
type Actor = history.Actor

// ActAs returns a context whose changes are recorded as those of an actor. Without it they are those of the user of
// this process.
func ActAs(ctx context.Context, a Actor) context.Context { return history.ActAs(ctx, a) }

// Unrecorded returns a context whose changes are not recorded in the history, because they only serve another one.
func Unrecorded(ctx context.Context) context.Context {
	return catalog.NoteAs(ctx, catalog.Noting{Not: true})
}

// HistoryQuery, History and HistoryEvent are what ReadHistory needs and returns.
type (
	HistoryQuery = history.Query
	History      = history.Result
	HistoryEvent = history.Event
)

// HistoryTail and NumberedEvent are what FollowHistory returns.
type (
	HistoryTail   = history.Tail
	NumberedEvent = history.Numbered
)

// FollowHistory returns a tail of the history of the pool in dir: see [history.Follow]. NotFound (no pool), Invalid,
// Permission, IO.
func FollowHistory(dir, after string) (*HistoryTail, error) {
	p, err := pool.Read(dir)
	if err != nil {
		return nil, err
	}
	return history.Follow(p.Dir, after)
}

// ReadHistory returns events from the history of the pool in dir, whether it is mounted or not. It changes nothing, and
// does not need the catalogue. NotFound (no pool; nothing had the name of the query), Permission, IO.
func ReadHistory(dir string, q HistoryQuery) (History, error) {
	p, err := pool.Read(dir)
	if err != nil {
		return History{}, err
	}

	out, err := history.Read(p.Dir, q)
	if err != nil || q.Ref == "" || len(out.Events) > 0 {
		return out, err
	}

	// Distinguish a name that nothing had from one without events in the time that was asked for.
	q.Since, q.Limit = time.Time{}, 1
	if any, err := history.Read(p.Dir, q); err != nil || len(any.Events) > 0 {
		return out, err
	}
	return out, errs.New(errs.NotFound, "history", q.Ref, "the history has no event of this name").
		WithHint("list all events with %s; it does not go back to events that older versions of pando made, "+
			"and forgets the oldest", errs.Run("history", errs.Param("limit", "0")))
}

// recordChanges writes what a transaction has committed to the history. It never fails an operation.
func (e *Engine) recordChanges(ctx context.Context, changes []catalog.Change) {
	now, who := time.Now().UTC(), history.WhoIn(ctx)
	events := func(yield func(history.Event) bool) {
		for _, c := range changes {
			if !yield(eventOf(c, now, who)) {
				return
			}
		}
	}

	// A full disk has other signs, and a command that frees space must not be noisy.
	if err := e.history.Append(events); err != nil && !errs.Is(err, errs.NoSpace) {
		warnings.Add(ctx, "could not record this in the history of the pool: %v", err)
	}
}

func eventOf(c catalog.Change, now time.Time, who history.Who) history.Event {
	ev := history.Event{
		Time: now, Who: who, Verb: verbOf(c), Kind: string(c.Object), Name: c.Ref, NameBefore: c.RefBefore, ID: string(c.ID),
		Origin: c.Origin, Mountpoint: c.Mountpoint, SizeBytes: c.SizeBytes, Remote: c.Remote,
	}
	if !c.Owner.IsZero() {
		ev.OwnerUID = &c.Owner.UID
	}
	if c.Lineage != c.ID {
		ev.Lineage = string(c.Lineage)
	}
	if !c.Until.IsZero() && c.Until.Before(driver.Forever) {
		ev.Until = &c.Until
	}
	return ev
}

// makers are the operations that make objects of a kind, each with its own verb in the history. What other operations
// make on the way, such as the snapshot of a push, has the verb of what it is.
var makers = map[driver.Kind][]string{
	driver.Volume:     {opClone, opFork, opImport, opAdopt, opRewind, opRebase, opFlatten, opPull, opFsck},
	driver.Snapshot:   {opSnapshot, opPull, opFsck},
	driver.Generation: {opImport, opPublish, opBuild, opPull, opFsck},
}

// ownVerb has the verb of what other operations make.
var ownVerb = map[driver.Kind]string{
	driver.Volume: opClone, driver.Snapshot: opSnapshot, driver.Generation: opPublish,
}

// verbs has the verbs of changes that are the same whatever made them.
var verbs = map[catalog.ChangeKind]string{
	catalog.Updated: opSet, catalog.Destroyed: "destroy", catalog.Renamed: opRename, catalog.Mounted: "mount",
	catalog.Unmounted: "umount", catalog.Pinned: opPin, catalog.Expires: opSet, catalog.Pushed: opPush,
}

// verbOf returns the verb of an event: the command that does this, where there is one.
func verbOf(c catalog.Change) string {
	switch {
	case c.Kind == catalog.Made && slices.Contains(makers[c.Object], c.Op):
		return c.Op
	case c.Kind == catalog.Made:
		return ownVerb[c.Object]
	case c.Kind == catalog.Destroyed && (c.Op == opPrune || c.Op == opExpire):
		return c.Op
	case c.Kind == catalog.Updated && c.Op != "":
		return c.Op
	case c.Kind == catalog.Pinned && c.Until.IsZero():
		return "unpin"
	}
	return verbs[c.Kind]
}
