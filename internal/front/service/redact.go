package service

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine"
)

// What users get about objects that they may see can name others that they may not: an origin is a volume of somebody
// else if root has cloned it for the user. Such names are removed from answers right before they are sent, whatever
// request they answer, so that no handler can forget it.

// redacted returns an answer without what a user may not see. Answers to callers who may see everything stay as they
// are.
func (s *Service) redacted(ctx context.Context, v any) (any, error) {
	if _, isError := v.(*Problem); isError || grantOf(ctx) == nil {
		return v, nil
	}
	text, err := json.Marshal(v)
	if err != nil {
		return nil, errs.Wrap("answer", "", err)
	}

	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	var tree any
	if err := d.Decode(&tree); err != nil {
		return nil, errs.Wrap("answer", "", err)
	}

	// If the client has gone away, huma would panic here, and the log get its stack.
	r := redactor{ctx: context.WithoutCancel(ctx), s: s, known: map[string]bool{}}
	if err := r.redact(tree); err != nil {
		return nil, err
	}
	return tree, nil
}

// redactor removes names from an answer.
type redactor struct {
	ctx   context.Context
	s     *Service
	known map[string]bool // whether the user may see what has a name
}

func (r *redactor) redact(v any) error {
	switch v := v.(type) {
	case []any:
		for _, item := range v {
			if err := r.redact(item); err != nil {
				return err
			}
		}
	case map[string]any:
		if err := r.object(v); err != nil {
			return err
		}
		for key, item := range v {
			if key == "labels" {
				continue // the user's own words
			}
			if err := r.redact(item); err != nil {
				return err
			}
		}
	}
	return nil
}

// object removes names from what describes an object or an event.
func (r *redactor) object(o map[string]any) error {
	kind, _ := o["kind"].(string)
	if kind == "" {
		return nil
	}
	delete(o, "source") // of a golden: paths and addresses that root works with
	delete(o, "remote")
	r.hideGolden(o)

	origin, _ := o["origin"].(string)
	if origin == "" {
		return nil
	}
	shows, err := r.shows(origin)
	if err == nil && !shows {
		o["origin"] = ""
		if _, has := o["origin_id"]; has {
			o["origin_id"] = ""
		}
	}
	return err
}

// hideGolden removes the golden of a volume from its description, if the volume belongs to somebody else and the policy
// does not show the golden. Only with see_all are there such volumes.
func (r *redactor) hideGolden(o map[string]any) {
	g := grantOf(r.ctx)
	golden, _ := o["golden"].(string)
	if !g.SeeAll || golden == "" || g.Sees(golden) {
		return
	}
	if owner, ok := o["owner"].(map[string]any); ok && fmt.Sprint(owner["uid"]) == fmt.Sprint(g.UID) {
		return
	}
	o["golden"], o["generation"] = "", 0
	if _, has := o["base"]; has {
		o["base"] = ""
	}
}

// shows reports whether the user may see what has a name.
func (r *redactor) shows(name string) (bool, error) {
	if shows, ok := r.known[name]; ok {
		return shows, nil
	}
	parsed, err := ref.Parse("", name)
	if err != nil {
		return false, nil // no name that leads to anything
	}
	shows, err := r.s.e.Finds(r.ctx, parsed)
	r.known[name] = shows
	return shows, err
}

// keepsEvent returns which events the caller of a request may see: those of own volumes, and of goldens that the policy
// shows. nil: all.
func keepsEvent(ctx context.Context) func(engine.HistoryEvent) bool {
	g := grantOf(ctx)
	if g == nil {
		return nil
	}
	return g.keepsEvent
}

func (g *grant) keepsEvent(e engine.HistoryEvent) bool {
	switch e.Kind {
	case string(driver.Volume), string(driver.Snapshot):
		return g.SeeAll || e.OwnerUID != nil && *e.OwnerUID == g.UID
	case string(driver.Generation), "golden":
		return g.seesRef(e.Name) && (e.NameBefore == "" || g.seesRef(e.NameBefore))
	}
	return false
}

// seesRef reports whether a reference is to a golden that the policy shows.
func (g *grant) seesRef(name string) bool {
	r, err := ref.Parse("", name)
	return err == nil && g.Sees(r.Name)
}
