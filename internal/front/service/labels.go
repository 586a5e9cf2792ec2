package service

import (
	"context"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine"
)

// LabelRequest changes labels. Those that it does not name stay.
type LabelRequest struct {
	Set    map[string]string `json:"set,omitempty"`
	Remove []string          `json:"remove,omitempty" doc:"Keys; those that it does not have are ignored"`
}

// Labels are the labels of an object.
type Labels struct {
	Ref    string        `json:"ref"`
	Labels driver.Labels `json:"labels"`
}

// PinRequest says for how long an object is pinned.
type PinRequest struct {
	Seconds float64 `json:"seconds,omitempty" minimum:"0" maximum:"3e9" doc:"Default: until it is unpinned"`
}

// RenameRequest gives an object another name.
type RenameRequest struct {
	Ref  string `json:"ref" minLength:"1" doc:"VOLUME, GOLDEN or VOLUME@SNAPSHOT"`
	Name string `json:"name" minLength:"1" doc:"Its new name; of a snapshot: within its volume"`
}

// RenamedObject is an object that was renamed.
type RenamedObject struct {
	engine.Renamed
	Warnings []errs.Message `json:"warnings,omitempty"`
}

func (s *Service) addLabelRoutes() {
	add(s, route{id: "show-object", access: reads, method: "GET", path: "/v1/objects/{ref}", tag: "labels",
		summary: "Show a volume, snapshot or generation, measured now, whatever a reference names"},
		func(ctx context.Context, in *Object) (*detailsAnswer, error) {
			r, err := ref.Parse("show", in.Ref)
			if err != nil {
				return nil, err
			}
			return s.show(ctx, r)
		})

	add(s, route{id: "show-labels", access: reads, method: "GET", path: "/v1/labels/{ref}", tag: "labels",
		summary: "Show the labels of a volume, snapshot or golden"},
		func(ctx context.Context, in *Object) (*struct{ Body Labels }, error) {
			r, err := ref.Parse("label", in.Ref)
			if err != nil {
				return nil, err
			}
			l, err := s.e.Labels(ctx, r)
			return &struct{ Body Labels }{Labels{r.String(), l}}, err
		})

	add(s, route{id: "change-labels", access: changes, method: "PATCH", path: "/v1/labels/{ref}", tag: "labels",
		summary: "Change labels of a volume, snapshot or golden, all at once"},
		func(ctx context.Context, in *struct {
			Object
			Condition
			Body LabelRequest
		}) (*volumeAnswer, error) {
			r, err := ref.Parse("label", in.Ref)
			if err != nil {
				return nil, err
			}
			for _, k := range in.Body.Remove {
				if err := driver.CheckLabelKey("label", k); err != nil {
					return nil, err
				}
			}
			i, err := s.e.SetLabels(in.in(ctx), engine.LabelRequest{Ref: r, Set: in.Body.Set, Remove: in.Body.Remove})
			return answerVolume(ctx, i, err)
		})

	add(s, route{id: "pin", access: changes, method: "PUT", path: "/v1/pins/{ref}", tag: "labels",
		summary: "Keep a volume, snapshot or generation from being destroyed"},
		func(ctx context.Context, in *struct {
			Object
			Condition
			Body *PinRequest
		}) (*volumeAnswer, error) {
			r, err := ref.Parse("pin", in.Ref)
			if err != nil {
				return nil, err
			}
			var body PinRequest
			if in.Body != nil {
				body = *in.Body
			}
			if err := grantOf(ctx).mayPin(r); err != nil {
				return nil, err
			}
			i, err := s.e.Pin(in.in(ctx), r, seconds(body.Seconds))
			return answerVolume(ctx, i, err)
		})

	add(s, route{id: "unpin", access: changes, method: "DELETE", path: "/v1/pins/{ref}",
		tag: "labels", summary: "Undo a pin"},
		func(ctx context.Context, in *struct {
			Object
			Condition
		}) (*volumeAnswer, error) {
			r, err := ref.Parse("unpin", in.Ref)
			if err != nil {
				return nil, err
			}
			i, err := s.e.Unpin(in.in(ctx), r)
			return answerVolume(ctx, i, err)
		})

	add(s, route{id: "rename", access: changes, method: "POST", path: "/v1/rename", tag: "labels",
		summary: "Give a volume, snapshot or golden another name", about: "A volume may be mounted, and stays where it is."},
		s.rename)
}

func (s *Service) rename(ctx context.Context, in *struct {
	Condition
	Body RenameRequest
}) (*struct {
	ETag string `header:"ETag"`
	Body RenamedObject
}, error) {
	r, err := ref.Parse("rename", in.Body.Ref)
	if err != nil {
		return nil, err
	}
	name, err := ref.ParseName("rename", in.Body.Name)
	if err != nil {
		return nil, err
	}
	out, err := s.e.Rename(in.in(ctx), engine.RenameRequest{Ref: r, Name: name})
	return &struct {
		ETag string `header:"ETag"`
		Body RenamedObject
	}{etag(out.Info), RenamedObject{out, warned(ctx)}}, err
}
