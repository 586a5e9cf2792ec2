package service

import (
	"context"
	"strings"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine"
)

// Object names an object in the path of a request.
type Object struct {
	Ref string `path:"ref" doc:"VOLUME, VOLUME@SNAPSHOT, GOLDEN or GOLDEN@N"`
}

// InVolume names a volume in the path of a request.
type InVolume struct {
	Volume string `path:"volume" doc:"Name of a volume"`
}

func (v InVolume) name(op string) (ref.Name, error) { return ref.ParseName(op, v.Volume) }

// InGolden names a golden in the path of a request.
type InGolden struct {
	Golden string `path:"golden" doc:"Name of a golden"`
}

func (g InGolden) name(op string) (ref.Name, error) { return ref.ParseName(op, g.Golden) }

// Condition makes a change conditional: see engine.IfUnchanged.
type Condition struct {
	IfMatch string `header:"If-Match" doc:"ETag of the object as it was read: if it has changed, nothing is done (412)"`
}

// in returns the context of the change.
func (c Condition) in(ctx context.Context) context.Context {
	if c.IfMatch == "" || strings.TrimSpace(c.IfMatch) == "*" {
		return ctx
	}

	var tags []string
	for t := range strings.SplitSeq(c.IfMatch, ",") {
		tags = append(tags, strings.Trim(strings.TrimSpace(t), `"`))
	}
	return engine.IfUnchanged(ctx, tags...)
}

// etag returns the tag of an object as a header has it.
func etag(i engine.Info) string { return `"` + i.Tag() + `"` }

// Volume is a volume, snapshot or generation of a golden.
type Volume struct {
	engine.Info
	Warnings []errs.Message `json:"warnings,omitempty" doc:"Problems that did not prevent this"`
}

// volumeAnswer is the answer with one of them.
type volumeAnswer struct {
	ETag string `header:"ETag"`
	Body Volume
}

func answerVolume(ctx context.Context, i engine.Info, err error) (*volumeAnswer, error) {
	if err != nil {
		return nil, err
	}
	return &volumeAnswer{ETag: etag(i), Body: Volume{i, warned(ctx)}}, nil
}

// Details is all that is known of an object.
type Details struct {
	engine.Detail
}

// detailsAnswer is the answer with them.
type detailsAnswer struct {
	ETag string `header:"ETag"`
	Body Details
}

func (s *Service) show(ctx context.Context, r ref.Ref) (*detailsAnswer, error) {
	d, err := s.e.Show(ctx, r)
	if err != nil {
		return nil, err
	}
	return &detailsAnswer{etag(d.Info), Details{d}}, nil
}

// seconds converts a field in seconds.
func seconds(n float64) time.Duration { return time.Duration(n * float64(time.Second)) }

// optionalName parses a name that may be missing.
func optionalName(op, s string) (ref.Name, error) {
	if s == "" {
		return ref.Name{}, nil
	}
	return ref.ParseName(op, s)
}

// freezes are the values of the field freeze.
var freezes = map[string]engine.Freeze{
	"": engine.FreezeIfNeeded, "if_needed": engine.FreezeIfNeeded, "always": engine.FreezeAlways,
	"never": engine.FreezeNever,
}

// overlayPolicy parses a policy that may be missing.
func overlayPolicy(op, s string) (*driver.OverlayPolicy, error) {
	if s == "" {
		return nil, nil
	}
	p, err := driver.ParseOverlayPolicy(op, s)
	return &p, err
}

// only returns the one failure of a report about one object.
func only(report *engine.DestroyReport, err error) error {
	if err == nil && len(report.Failed) > 0 {
		err = report.Failed[0]
	}
	return err
}

// noContent is the answer of what has no result.
type noContent struct{}
