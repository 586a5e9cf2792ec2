package viaservice

import (
	"context"
	"encoding/json"
	"net/http"
	"time"

	"pando/client"
	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/base/warnings"
)

// operation is long work of the service. Its messages are in the words that header asks for.
type operation struct {
	client.Operation
	Warnings []errs.Message `json:"warnings"`
}

// Of the requests that wait for an operation.
const (
	waitSeconds  = "1"  // so that progress is shown
	quietSeconds = "60" // without progress
)

// operate begins an operation, shows its progress in t, and returns its result when it has ended. When ctx ends, the
// operation is canceled, and operate waits until it has undone what it did. After an error there may be a result, too,
// which explains it. If the service was restarted, an operation with a key begins again.
func operate[T any](ctx context.Context, p *Pool, t *progress.Tracker, q request) (out T, err error) {
	deadline := time.Now().Add(patience)
	for {
		op, err := call[operation](ctx, p, q)
		if err != nil {
			return out, err
		}

		begun := op.ID
		op, err = p.follow(ctx, begun, t)
		forgotten := errs.Is(err, errs.NotFound) && op.ID == ""
		if forgotten && q.repeat == withAKey && time.Now().Before(deadline) {
			continue
		}
		if forgotten {
			return out, errs.New(errs.IO, q.op(), p.socket, "the service ended before it had finished this").
				WithHint("repeat the command: what it had done is undone or finished by now")
		}
		if err != nil {
			return out, err
		}

		return resultOf[T](ctx, p, op)
	}
}

// resultOf returns the result of an operation that has ended, and its error.
func resultOf[T any](ctx context.Context, p *Pool, op operation) (out T, err error) {
	for _, w := range op.Warnings {
		warnings.AddEach(ctx, "%s", w)
	}
	if len(op.Result) > 0 {
		if err := json.Unmarshal(op.Result, &out); err != nil {
			return out, p.errorOf(ctx, err)
		}
	}
	switch {
	case op.Error == nil:
		return out, nil
	case ctx.Err() != nil && op.Error.Kind == client.Canceled:
		return out, ctx.Err()
	}
	return out, p.errorIn(op.Error)
}

// op is the last word of the path, for errors.
func (q request) op() string { return q.path[len(q.path)-1] }

// follow waits for the end of an operation. The operation is zero if there is none with this ID.
func (p *Pool) follow(ctx context.Context, id string, t *progress.Tracker) (op operation, err error) {
	seconds := waitSeconds
	if t == nil {
		seconds = quietSeconds
	}
	wait := request{method: http.MethodGet, path: []string{"operations", id, "wait"}, repeat: harmless,
		query: map[string][]string{"timeout_seconds": {seconds}}}

	alive := ctx
	stage := ""
	for {
		op, err := call[operation](alive, p, wait)
		if err != nil && ctx.Err() != nil && alive.Err() != nil {
			// Cancel it, and wait on.
			alive = context.WithoutCancel(ctx)
			if _, err := call[operation](alive, p, request{method: http.MethodDelete, path: []string{"operations", id},
				repeat: harmless}); err != nil {
				return operation{}, err
			}
			continue
		}
		if err != nil || !op.Running() {
			return op, err
		}

		s := op.Progress
		if s.Stage != stage {
			stage = s.Stage
			t.Start(stage, s.TotalFiles, s.TotalBytes)
		}
		t.Expect(s.TotalFiles, s.TotalBytes)
		t.Set(s.Files, s.Bytes, s.TotalBytes)
	}
}
