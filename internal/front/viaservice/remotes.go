package viaservice

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"

	"pando/client"
	"pando/internal/remote/replicate"
)

// Remotes returns the names of the remotes of the pool.
func (p *Pool) Remotes(ctx context.Context) (names []string, err error) {
	all, err := list[client.Remote](ctx, p, "remotes")
	for _, r := range all {
		names = append(names, r.Name)
	}
	return names, err
}

// OnRemote returns the names of the volumes and goldens on a remote.
func (p *Pool) OnRemote(ctx context.Context, remote string) (names []string, err error) {
	all, err := list[client.RemoteVolume](ctx, p, "remotes", remote, "volumes")
	for _, v := range all {
		names = append(names, v.Name)
	}
	return names, err
}

// Push is as replicate.Push. Warnings are in the notes of what was pushed.
func (p *Pool) Push(ctx context.Context, remote string, q replicate.PushRequest) ([]replicate.Pushed, error) {
	body := client.PushRequest{All: q.All, As: q.As.String(), LimitRate: q.LimitBytes, Freeze: freezes[q.Freeze],
		Full: q.Full, NoOrigin: q.NoOrigin, Portable: q.Portable, AcceptRollback: q.AcceptRollback}
	for _, r := range q.Refs {
		body.Refs = append(body.Refs, r.String())
	}

	// Of a push that failed, the result says what was pushed nevertheless.
	text, err := operate[json.RawMessage](ctx, p, q.Tracker, onRemote(remote, "push", body))
	if len(text) == 0 {
		return nil, err
	}
	if err == nil {
		var out []replicate.Pushed
		return out, p.errorOf(ctx, json.Unmarshal(text, &out))
	}
	var part struct {
		Pushed []replicate.Pushed `json:"pushed"`
		Failed []*client.Error    `json:"failed"`
	}
	if jerr := json.Unmarshal(text, &part); jerr != nil {
		return nil, p.errorOf(ctx, jerr)
	}
	if len(part.Failed) > 1 {
		var all []error
		for _, f := range part.Failed {
			all = append(all, p.errorIn(f))
		}
		err = errors.Join(all...)
	}
	return part.Pushed, err
}

// Pull is as replicate.Pull.
func (p *Pool) Pull(ctx context.Context, remote string, q replicate.PullRequest) (replicate.Pulled, error) {
	return operate[replicate.Pulled](ctx, p, q.Tracker, onRemote(remote, "pull", client.PullRequest{Ref: q.Ref.String(),
		As: q.As.String(), Update: q.Update, TakeOver: q.TakeOver, NoOrigin: q.NoOrigin, LimitRate: q.LimitBytes}))
}

// Verify is as replicate.Verify, or with repair as replicate.VerifyRepair.
func (p *Pool) Verify(
	ctx context.Context, remote string, q replicate.VerifyRequest, repair bool,
) (*replicate.Verified, error) {
	return operate[*replicate.Verified](ctx, p, q.Tracker, onRemote(remote, "verify",
		client.VerifyRequest{Names: q.Names, ReadPercent: q.ReadPercent, Repair: repair}))
}

// onRemote is a request about a remote.
func onRemote(remote, verb string, body any) request {
	return request{method: http.MethodPost, path: []string{"remotes", remote, verb}, body: body}
}
