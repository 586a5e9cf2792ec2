package engine_test

import (
	"fmt"
	"strings"
	"testing"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/engine"
)

var allKinds = []api.Kind{api.KindVolume, api.KindSnapshot, api.KindGolden, api.KindGeneration}

// TestMatch: references must exist and be of the right kind, globs match names of the right kinds, and what may not be
// seen is neither matched nor suggested.
func TestMatch(t *testing.T) {
	oneKind(t, func(t *testing.T, e *engine.Engine, _ string) {
		importTree(t, e, "web", source(t))
		importTree(t, e, "work", source(t))
		for _, v := range []string{"job-1", "job-2", "worker"} {
			clone(t, e, "web", v, false)
			snapshot(t, e, v, "before")
		}
		snapshot(t, e, "job-1", "after")
		publish(t, e, "web", "worker")

		volumes, destroys := allKinds[:1], allKinds[:2]
		goldens := allKinds[2:]
		for _, c := range []struct {
			kinds []api.Kind
			what  string // separated by blanks
			want  string // separated by blanks, or the kind of the error and a part of its hint
		}{
			{volumes, "job-1", "job-1"},
			{volumes, "job-* job-1 w*", "job-1 job-2 worker"},
			{volumes, "[jk]ob-?", "job-1 job-2"},
			{destroys, "job-*@b* job-1@after", "job-1@before job-2@before job-1@after"},
			{destroys, "worker*", "worker"},
			{goldens, "w*", "web work"},
			{goldens, "web@*", "web@1 web@2"},
			{goldens, "web web@1", "web web@1"},
			{allKinds, "w*", "worker web work"},
			{allKinds, "w*@*", "worker@before web@1 web@2 work@1"},

			{volumes, "job-1 nosuch", `not_found "ls"`},
			{volumes, "wroker", "not_found did you mean worker?"},
			{volumes, "wbe", `not_found "ls"`},
			{goldens, "wbe", "not_found did you mean web?"},
			{allKinds, "wbe", "not_found did you mean web?"},
			{destroys, "job-1@befor", "not_found did you mean job-1@before?"},
			{volumes, "x*", `not_found "ls"`},
			{destroys, "worker@x*", `not_found "ls"`},
			{goldens, "worker*", `not_found "golden ls"`},
			{volumes, "web", `invalid "clone" of web, VOLUME`},
			{volumes, "web@1", `invalid "clone" of web@1, VOLUME`},
			{volumes, "job-1@before", `invalid "clone" of job-1@before, VOLUME`},
			{goldens, "worker", `invalid "golden ls"`},
			{allKinds[2:3], "web@1", "invalid web"},
			{volumes, "job-1@never", `not_found "show" of job-1`},
			{volumes, "nosuch@v1", `not_found "ls"`},
			{volumes, "[j", "invalid *"},
			{destroys, "j*@[", "invalid *"},
			{destroys, "job*@", "invalid job*@*"},
			{volumes, "job*@*", `not_found "ls"`},
		} {
			what, err := ref.ParsePatterns("test", strings.Fields(c.what)...)
			if err == nil {
				var got []ref.Ref
				if got, err = e.Match(t.Context(), engine.MatchRequest{Op: "test", What: what, Kinds: c.kinds}); err == nil {
					if s := strings.Trim(fmt.Sprint(got), "[]"); s != c.want {
						t.Errorf("%s: %s, wanted %s", c.what, s, c.want)
					}
					continue
				}
			}
			kind, hint, _ := strings.Cut(c.want, " ")
			if !errs.Is(err, errs.Kind(kind)) || !strings.Contains(errs.HintOf(err), hint) {
				t.Errorf("%s: %v (%s), wanted %s", c.what, err, errs.HintOf(err), c.want)
			}
		}

		// Hide one of them.
		e.SetPolicy(func(a engine.Access) error {
			if a.Ref == "worker" || a.Ref == "job-1@after" {
				return errs.New(errs.NotFound, a.Op, a.Ref, "hidden")
			}
			return nil
		})
		ctx := asUser(t, 1)
		what, err := ref.ParsePatterns("test", "*", "*@*")
		must(t, err)
		got, err := e.Match(ctx, engine.MatchRequest{Op: "test", What: what, Kinds: destroys})
		if err != nil || fmt.Sprint(got) != "[job-1 job-2 job-1@before job-2@before]" {
			t.Errorf("%v, %v", got, err)
		}
		for _, s := range []string{"wroker", "job-1@aftr"} {
			what, err := ref.ParsePatterns("test", s)
			must(t, err)
			_, err = e.Match(ctx, engine.MatchRequest{Op: "test", What: what, Kinds: destroys})
			if !errs.Is(err, errs.NotFound) || strings.Contains(errs.HintOf(err), "mean") {
				t.Errorf("%s: %v (%s)", s, err, errs.HintOf(err))
			}
		}
	})
}
