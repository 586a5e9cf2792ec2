package viaservice

import (
	"context"
	"net/http"

	"pando/internal/engine/check"
	"pando/internal/observe/doctor"
)

// Fsck is as engine.Fsck.
func (p *Pool) Fsck(ctx context.Context, q check.Request) (*check.Report, error) {
	body := map[string]any{"repair": q.Repair}
	if len(q.Refs) > 0 {
		refs := make([]string, len(q.Refs))
		for i, r := range q.Refs {
			refs[i] = r.String()
		}
		body["refs"] = refs
	}
	return operate[*check.Report](ctx, p, q.Tracker, request{method: http.MethodPost, path: []string{"fsck"}, body: body})
}

// Doctor is as doctor.Examine, with the facts of this pool.
func (p *Pool) Doctor(ctx context.Context, q doctor.HostRequest) (*doctor.Examination, error) {
	body := map[string]any{"limit_seconds": q.PatienceEach.Seconds()}
	if len(q.Only) > 0 {
		body["only"] = q.Only
	}
	return operate[*doctor.Examination](ctx, p, q.Tracker, request{method: http.MethodPost, path: []string{"doctor"},
		body: body})
}
