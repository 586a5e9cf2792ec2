package engine_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/engine"
)

// historyOf returns the events that a request finds, as texts.
func historyOf(t *testing.T, e *engine.Engine, q engine.HistoryRequest) (out []string, last int64) {
	t.Helper()
	h, err := e.History(t.Context(), q)
	must(t, err)
	for _, v := range h.Events {
		out = append(out, strings.TrimSpace(fmt.Sprintf("%s %s %s %s %s", v.Event, v.Kind, v.Ref, v.Op, v.Detail)))
	}
	return out, h.Next
}

// TestHistory: each command writes its events, with who asked for it, and those of an object are found under all of its
// names.
func TestHistory(t *testing.T) {
	oneKind(t, func(t *testing.T, e *engine.Engine, top string) {
		_, last := historyOf(t, e, engine.HistoryRequest{})
		start := last
		happened := func(do string, err error, want ...string) {
			t.Helper()
			must(t, err)
			got, next := historyOf(t, e, engine.HistoryRequest{After: last})
			if !slices.Equal(got, want) {
				t.Errorf("%s: events\n%q, wanted\n%q", do, got, want)
			}
			last = max(last, next)
		}

		ctx := asUser(t, 1234)
		importTree(t, e, "g", source(t))
		happened("import", nil, "create golden g import", "create generation g@1 import")
		_, err := e.Clone(ctx, engine.CloneRequest{From: reference(t, "g"), Name: ref.MustName("v"), Mount: true})
		at := e.Dir() + "/mnt/v"
		happened("clone", err, "create volume v clone g@1", "mount volume v clone "+at)
		h, err := e.History(t.Context(), engine.HistoryRequest{Limit: 2})
		must(t, err)
		for _, v := range h.Events {
			if v.WhoUID != 1234 || v.ID == "" || time.Since(v.At) > time.Minute {
				t.Errorf("%+v", v)
			}
		}

		snapshot(t, e, "v", "s")
		happened("snapshot", nil, "create snapshot v@s snapshot v")
		_, err = e.Umount(ctx, engine.UmountRequest{Volume: ref.MustName("v")})
		happened("umount", err, "umount volume v umount "+at)
		_, err = e.Umount(ctx, engine.UmountRequest{Volume: ref.MustName("v")})
		happened("umount again", err)
		_, err = e.Clone(ctx, engine.CloneRequest{From: reference(t, "g"), Name: ref.MustName("v")})
		if !errs.Is(err, errs.Exists) {
			t.Error(err)
		}
		happened("refused clone", nil)

		rename := func(from, to string) error {
			_, err := e.Rename(ctx, engine.RenameRequest{Ref: reference(t, from), Name: ref.MustName(to)})
			return err
		}
		happened("rename", rename("v", "w"), "rename volume w rename v")
		happened("rename snapshot", rename("w@s", "s2"), "rename snapshot w@s2 rename w@s")
		happened("rename golden", rename("g", "h"), "rename golden h rename g")
		_, err = e.SetLabels(ctx, engine.LabelRequest{Ref: reference(t, "h"), Set: map[string]string{"a": "b"}})
		happened("label golden", err, `change golden h label labels={"a":"b"}`)
		_, err = e.Keep(ctx, engine.KeepRequest{Golden: ref.MustName("h"), Generations: 1})
		happened("keep", err, "change golden h keep keep=1")
		_, err = e.Publish(ctx, engine.PublishRequest{Volume: ref.MustName("w"), Golden: ref.MustName("h")})
		happened("publish", err, "create generation h@2 publish w", "change volume w publish base=h@2",
			"destroy generation h@1 publish not kept by the retention of its golden")
		out, err := e.Rewind(ctx, engine.RewindRequest{Volume: ref.MustName("w"), Snapshot: ref.MustName("s2")})
		must(t, err)
		happened("rewind", nil, "replace volume w rewind "+out.Before, "create snapshot "+out.Before+" rewind w",
			"change volume w rewind base=h@1")

		// What is destroyed keeps its history, and what has its name later does not inherit another one.
		_, err = e.Destroy(ctx, toDestroy("w"))
		happened("destroy", err, "destroy snapshot w@s2 destroy", "destroy snapshot "+out.Before+" destroy",
			"destroy volume w destroy")
		_, err = e.Clone(ctx, engine.CloneRequest{From: reference(t, "h"), Name: ref.MustName("v"), Ephemeral: true})
		happened("clone of the old name", err, "create volume v clone h@2")

		count := func(r string, want int, first, end string) {
			t.Helper()
			got, _ := historyOf(t, e, engine.HistoryRequest{Ref: reference(t, r)})
			if len(got) != want || !strings.HasPrefix(got[0], first) || !strings.HasPrefix(got[len(got)-1], end) {
				t.Errorf("history of %s: %d events, %q", r, len(got), got)
			}
		}
		count("w", 13, "create volume v clone", "destroy volume w")
		count("w@s2", 4, "create snapshot v@s ", "destroy snapshot w@s2")
		count("v", 6, "create volume v clone", "create volume v clone h@2")
		count("h", 7, "create golden g import", "destroy generation h@1")
		count("h@1", 3, "create generation g@1", "destroy generation h@1")
		if _, err := e.History(ctx, engine.HistoryRequest{Ref: reference(t, "none")}); !errs.Is(err, errs.NotFound) {
			t.Errorf("history of nothing: %v", err)
		}

		// A name on the way to the present one was another volume's before.
		for _, v := range []string{"x", "y"} {
			clone(t, e, "h", v, false)
			snapshot(t, e, v, "s")
			_, err = e.Destroy(ctx, toDestroy(v))
			must(t, err)
		}
		clone(t, e, "h", "x", false)
		snapshot(t, e, "x", "s")
		must(t, rename("x", "y"), rename("y", "z"))
		count("z", 4, "create volume x", "rename volume z rename y")
		count("z@s", 3, "create snapshot x@s", "rename volume z rename y")

		trail, last := historyOf(t, e, engine.HistoryRequest{Ref: reference(t, "z"), Limit: 3})
		next, _ := historyOf(t, e, engine.HistoryRequest{Ref: reference(t, "z"), After: last - 1, Limit: 2})
		some, _ := historyOf(t, e, engine.HistoryRequest{Ref: reference(t, "z"), After: start, Limit: 2})
		if !slices.Equal(trail[2:], next) || !slices.Equal(some, []string{"create volume x clone h@2", trail[0]}) {
			t.Errorf("the last of z %q, those after the one before it %q, the first ones %q", trail, next, some)
		}

		// Pages, forward and of the newest events.
		all, _ := historyOf(t, e, engine.HistoryRequest{})
		var pages []string
		for after := int64(1); ; {
			page, next := historyOf(t, e, engine.HistoryRequest{After: after, Limit: 5})
			if after == 1 {
				page = page[1:] // the gap: 1 is no number of this catalogue
			}
			if len(page) == 0 {
				break
			}
			pages, after = append(pages, page...), next
		}
		for limit, more := range map[int]bool{1: true, len(all) - 1: true, len(all): false, len(all) + 1: false, 0: false} {
			h, err := e.History(t.Context(), engine.HistoryRequest{Limit: limit})
			must(t, err)
			if h.More != more || limit > 0 && len(h.Events) != min(limit, len(all)) {
				t.Errorf("the last %d of %d events: %d, more: %v", limit, len(all), len(h.Events), h.More)
			}
		}
		newest, _ := historyOf(t, e, engine.HistoryRequest{Limit: 5})
		if !slices.Equal(pages, all) || !slices.Equal(newest, all[len(all)-5:]) {
			t.Errorf("pages %q, newest %q, wanted %q", pages, newest, all)
		}
	})
}

// TestHistoryGap: a reader of a catalogue that was rebuilt, or that is older than what it has read, learns that events
// are missing.
func TestHistoryGap(t *testing.T) {
	oneKind(t, func(t *testing.T, e *engine.Engine, top string) {
		importTree(t, e, "g", source(t))
		all, last := historyOf(t, e, engine.HistoryRequest{})
		want := []string{"init   init", "create golden g import", "create generation g@1 import"}
		if !slices.Equal(all, want) {
			t.Errorf("%q", all)
		}
		if got, _ := historyOf(t, e, engine.HistoryRequest{After: last}); len(got) > 0 {
			t.Errorf("after the last event: %q", got)
		}
		if got, next := historyOf(t, e, engine.HistoryRequest{After: last + 1}); !slices.Equal(got, []string{"gap"}) ||
			next != last {
			t.Errorf("after a number that does not exist yet: %q, %d", got, next-last)
		}

		_, err := engine.Rebuild(context.Background(), e.Dir(), drivers)
		must(t, err)
		again, err := engine.Open(t.Context(), e.Dir(), drivers)
		must(t, err)
		defer again.Close()
		got, _ := historyOf(t, again, engine.HistoryRequest{After: last})
		if !slices.Equal(got, []string{"gap", "rebuild   rebuild"}) {
			t.Errorf("after a rebuild: %q", got)
		}
	})
}

// TestDestroyRenamed: what got another name since a user chose it is not destroyed.
func TestDestroyRenamed(t *testing.T) {
	oneKind(t, func(t *testing.T, e *engine.Engine, top string) {
		importTree(t, e, "g", source(t))
		for _, v := range []string{"v", "other"} {
			clone(t, e, "g", v, false)
			snapshot(t, e, v, "s")
		}
		for _, what := range []string{"v", "other@s"} {
			destroyer, err := engine.Open(t.Context(), e.Dir(), drivers)
			must(t, err)
			chosen := make(chan bool, 9)
			destroyer.SetPolicy(func(a engine.Access) error { chosen <- true; return nil })
			ended := make(chan error, 1)

			// It cannot be destroyed while it is cloned, but renamed.
			from := reference(t, what)
			q := engine.CloneRequest{From: from, Name: ref.MustName("of-" + from.Name)}
			_, err = e.CloneAndPrepare(t.Context(), q, func(context.Context, string, string) error {
				go func() {
					r, err := destroyer.Destroy(asUser(t, 0), toDestroy(what))
					ended <- errors.Join(append(r.Failed, err)...)
				}()
				<-chosen
				_, err := e.Rename(t.Context(), engine.RenameRequest{Ref: ref.Ref{Name: from.Name},
					Name: ref.MustName("now-" + from.Name)})
				return err
			})
			must(t, err)
			if err := <-ended; !errs.Is(err, errs.Conflict) || errs.HintOf(err) == "" {
				t.Errorf("destroying what was %s: %v", what, err)
			}
			if _, err := e.Show(t.Context(), ref.Ref{Name: "now-" + from.Name, At: from.At}); err != nil {
				t.Error(err)
			}
			destroyer.Close()
		}
	})
}
