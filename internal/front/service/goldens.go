package service

import (
	"context"
	"net/http"
	"slices"
	"strconv"

	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/base/ref"
	"pando/internal/engine"
)

// GoldenList lists goldens.
type GoldenList struct {
	Items []engine.GoldenInfo `json:"items" nullable:"false"`
}

// GoldenSetRequest changes properties of a golden. Those that are missing stay.
type GoldenSetRequest struct {
	Keep    *int   `json:"keep,omitempty" minimum:"0" doc:"Keep the newest generations, this many; 0: all"`
	Overlay string `json:"overlay,omitempty" enum:"never,default,allowed" doc:"Whether clones are overlays"`
}

// GoldenSet is the answer to a change of properties.
type GoldenSet struct {
	Golden        string         `json:"golden"`
	Keep          int            `json:"keep"`
	OverlayPolicy string         `json:"overlay_policy"`
	Removed       []string       `json:"removed" nullable:"false" doc:"Generations that the golden no longer keeps"`
	Warnings      []errs.Message `json:"warnings,omitempty"`
}

// PublishRequest says which volume becomes the next generation of a golden.
type PublishRequest struct {
	Volume  string            `json:"volume" minLength:"1"`
	Force   bool              `json:"force,omitempty" doc:"Publish even if the volume is based on an older generation"`
	Keep    *int              `json:"keep,omitempty" minimum:"0" doc:"From now on, newest generations to keep; 0: all"`
	Overlay string            `json:"overlay,omitempty" enum:"never,default,allowed" doc:"Whether clones are overlays"`
	Preset  string            `json:"preset,omitempty" pattern:"^[a-z0-9-]+$" doc:"Name of rules for what to leave out"`
	Labels  map[string]string `json:"labels,omitempty" doc:"Of the golden, in addition to those that it has"`
	Freeze  string            `json:"freeze,omitempty" enum:"if_needed,always,never" doc:"Stop writes to a volume in use"`
}

func (s *Service) addGoldenRoutes() {
	add(s, route{id: "list-goldens", access: reads, method: "GET", path: "/v1/goldens", tag: "goldens",
		summary: "List goldens, each with its current generation"},
		func(ctx context.Context, _ *struct{}) (*struct{ Body GoldenList }, error) {
			all, err := s.e.Goldens(ctx)
			if g := grantOf(ctx); g != nil {
				all = slices.DeleteFunc(all, func(i engine.GoldenInfo) bool { return !g.Sees(i.Golden) })
			}
			return &struct{ Body GoldenList }{GoldenList{append([]engine.GoldenInfo{}, all...)}}, err
		})

	add(s, route{id: "show-golden", access: reads, method: "GET", path: "/v1/goldens/{golden}", tag: "goldens",
		summary: "Show a golden with its generations"},
		func(ctx context.Context, in *InGolden) (*detailsAnswer, error) {
			name, err := in.name("golden show")
			if err != nil {
				return nil, err
			}
			out, err := s.show(ctx, name.Ref())
			if err == nil && out.Body.Kind != "golden" {
				err = notA(in.Golden, "golden", "show")
			}
			return out, err
		})

	add(s, route{id: "set-golden", access: rootOnly, method: "PATCH", path: "/v1/goldens/{golden}", tag: "goldens",
		summary: "Set properties of a golden"}, s.setGolden)

	add(s, route{id: "remove-golden", access: rootOnly, method: "DELETE", path: "/v1/goldens/{golden}", tag: "goldens",
		status: http.StatusNoContent, summary: "Remove a golden with all its generations",
		about: "Volumes that were cloned from it are not affected."},
		func(ctx context.Context, in *struct {
			InGolden
			Condition
		}) (*noContent, error) {
			name, err := in.name("golden rm")
			if err != nil {
				return nil, err
			}
			return &noContent{}, only(s.e.RemoveGolden(in.in(ctx), name.Ref()))
		})

	add(s, route{id: "remove-generation", access: rootOnly, method: "DELETE",
		path: "/v1/goldens/{golden}/generations/{number}",
		tag:  "goldens", status: http.StatusNoContent, summary: "Remove a generation that is not the current one"},
		func(ctx context.Context, in *struct {
			InGolden
			Number int `path:"number" minimum:"1"`
			Condition
		}) (*noContent, error) {
			name, err := in.name("golden rm")
			if err != nil {
				return nil, err
			}
			return &noContent{}, only(s.e.RemoveGolden(in.in(ctx), ref.Ref{Name: name.String(), At: strconv.Itoa(in.Number)}))
		})

	add(s, route{id: "publish-golden", access: makes, method: "POST", path: "/v1/goldens/{golden}/publish", tag: "goldens",
		status: accepted, summary: "Make the next generation of a golden from a volume",
		about: "The golden is created if it does not exist. The volume stays, and may be in use."}, s.publish)
}

func (s *Service) setGolden(ctx context.Context, in *struct {
	InGolden
	Condition
	Body GoldenSetRequest
}) (*struct{ Body GoldenSet }, error) {
	const op = "golden set"
	name, err := in.name(op)
	if err != nil {
		return nil, err
	}
	q := engine.SetRequest{Golden: name, Keep: in.Body.Keep}
	if q.Overlay, err = overlayPolicy(op, in.Body.Overlay); err != nil {
		return nil, err
	}

	removed, err := s.e.SetGolden(in.in(ctx), q)
	if err != nil {
		return nil, err
	}
	d, err := s.e.Show(ctx, name.Ref())
	if err != nil {
		return nil, err
	}
	return &struct{ Body GoldenSet }{GoldenSet{in.Golden, d.Keep, d.OverlayPolicy, append([]string{}, removed...),
		warned(ctx)}}, nil
}

func (s *Service) publish(ctx context.Context, in *struct {
	InGolden
	Repeatable
	Body PublishRequest
}) (*operationAnswer, error) {
	const op = "golden publish"
	q := engine.PublishRequest{Force: in.Body.Force, Keep: in.Body.Keep, Preset: in.Body.Preset, Labels: in.Body.Labels,
		Freeze: freezes[in.Body.Freeze]}
	var err error
	if q.Golden, err = in.name(op); err != nil {
		return nil, err
	}
	if q.Volume, err = ref.ParseName(op, in.Body.Volume); err != nil {
		return nil, err
	}
	if q.Overlay, err = overlayPolicy(op, in.Body.Overlay); err != nil {
		return nil, err
	}
	if err := grantOf(ctx).mayMake(op, in.Golden, map[string]bool{"keep": q.Keep != nil, "overlay": q.Overlay != nil,
		"labels": len(q.Labels) > 0}); err != nil {
		return nil, err
	}

	what := "publish " + in.Golden
	work := func(ctx context.Context, t *progress.Tracker) (any, error) {
		q.Tracker = t
		var out engine.Published
		made, repeated, err := s.makeOnce(ctx, in.Repeatable, what, in.Body,
			func(ctx context.Context) (_ []engine.Info, err error) {
				out, err = s.e.Publish(ctx, q)
				return []engine.Info{out.Info}, err
			})
		if repeated && err == nil {
			out.Info = made[0]
		}
		return out, err
	}
	return s.startOnce(ctx, in.Repeatable, what, in.Body, func() (*operationAnswer, error) {
		return s.start(ctx, "publish", in.Golden, work)
	})
}
