package viaservice

import (
	"context"
	"net/http"
	"slices"

	"pando/client"
	"pando/internal/engine"
)

// destroyed is the answer to a request to destroy something.
type destroyed struct {
	Destroyed []engine.Destroyed `json:"destroyed"`
	Failed    []*client.Error    `json:"failed"`
}

// Destroy is as that of the engine. It finds the IDs of what the names stand for first: a request that is repeated
// after its answer was lost does not destroy what has one of the names by then.
func (p *Pool) Destroy(ctx context.Context, q engine.DestroyRequest) (*engine.DestroyReport, error) {
	body := client.DestroyRequest{Labels: q.Labels.Words(), DryRun: true}
	for _, w := range q.What {
		body.What = append(body.What, w.String())
	}
	found, err := change[destroyed](ctx, p, request{method: http.MethodPost, path: []string{"destroy"}, body: body,
		repeat: harmless})
	if err != nil || q.DryRun {
		return &engine.DestroyReport{Destroyed: found.Destroyed}, err
	}
	return p.destroyFound(ctx, found.Destroyed, body.Labels)
}

// destroyFound destroys objects that have these IDs, and still the labels. If the request was repeated, what is gone
// counts as destroyed, too.
func (p *Pool) destroyFound(
	ctx context.Context, found []engine.Destroyed, labels []string,
) (*engine.DestroyReport, error) {
	body := client.DestroyRequest{Labels: labels}
	for _, o := range found {
		body.What, body.IDs = append(body.What, o.Ref), append(body.IDs, o.ID)
	}
	repeated := false
	answer, err := change[destroyed](ctx, p, request{method: http.MethodPost, path: []string{"destroy"}, body: body,
		repeat: harmless, repeated: &repeated})
	if err != nil {
		return nil, err
	}

	report := &engine.DestroyReport{Destroyed: answer.Destroyed}
	for _, f := range answer.Failed {
		report.Failed = append(report.Failed, p.errorIn(f))
	}
	if !repeated || len(labels) > 0 { // what has lost its label stays, and is not in the answer either
		return report, nil
	}
	for _, o := range found {
		isIt := func(d engine.Destroyed) bool { return d.ID == o.ID || d.Ref == o.Ref }
		failed := func(f *client.Error) bool { return f.Ref == o.Ref }
		if !slices.ContainsFunc(report.Destroyed, isIt) && !slices.ContainsFunc(answer.Failed, failed) {
			o.Reclaimed = true
			report.Destroyed = append(report.Destroyed, o)
		}
	}
	return report, nil
}

// destroyMade destroys what this process has made.
func (p *Pool) destroyMade(ctx context.Context, made ...engine.Info) error {
	var found []engine.Destroyed
	for _, v := range made {
		found = append(found, engine.Destroyed{Ref: v.Name, ID: v.ID, Kind: v.Kind})
	}
	report, err := p.destroyFound(ctx, found, nil)
	if err == nil && len(report.Failed) > 0 {
		err = report.Failed[0]
	}
	return err
}
