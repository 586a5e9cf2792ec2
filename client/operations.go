package client

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
)

// begin begins an operation.
func (c *Client) begin(ctx context.Context, path string, body any, key string) (*Operation, error) {
	return call[Operation](ctx, c, request{method: http.MethodPost, path: path, body: body, header: headers(key, "")})
}

// Publish makes the next generation of a golden from a volume.
func (c *Client) Publish(ctx context.Context, golden string, q PublishRequest) (*Operation, error) {
	return c.begin(ctx, path("goldens", golden, "publish"), q, q.Key)
}

// Rebase moves a volume's own changes onto another generation of its golden. keep is the version to keep of paths that
// both have changed, ours or theirs; "": fail.
func (c *Client) Rebase(ctx context.Context, volume, onto, keep string) (*Operation, error) {
	body := map[string]string{"onto": onto}
	if keep != "" {
		body["keep"] = keep
	}
	return c.begin(ctx, path("volumes", volume, "rebase"), body, "")
}

// Flatten makes a volume independent of all others.
func (c *Client) Flatten(ctx context.Context, volume string) (*Operation, error) {
	return c.begin(ctx, path("volumes", volume, "flatten"), nil, "")
}

// Remotes lists the remotes of the pool.
func (c *Client) Remotes(ctx context.Context) ([]Remote, error) {
	return list[Remote](ctx, c, "/v1/remotes", nil)
}

// Push pushes volumes and goldens to a remote.
func (c *Client) Push(ctx context.Context, remote string, q PushRequest) (*Operation, error) {
	return c.begin(ctx, path("remotes", remote, "push"), q, "")
}

// Pull restores a volume or golden from a remote.
func (c *Client) Pull(ctx context.Context, remote string, q PullRequest) (*Operation, error) {
	return c.begin(ctx, path("remotes", remote, "pull"), q, "")
}

// Verify checks the data on a remote.
func (c *Client) Verify(ctx context.Context, remote string, q VerifyRequest) (*Operation, error) {
	return c.begin(ctx, path("remotes", remote, "verify"), q, "")
}

// RemoteVolumes lists the volumes and goldens on a remote.
func (c *Client) RemoteVolumes(ctx context.Context, remote string) ([]RemoteVolume, error) {
	return list[RemoteVolume](ctx, c, path("remotes", remote, "volumes"), nil)
}

// PruneRemote removes old points from a remote, and returns their space.
func (c *Client) PruneRemote(ctx context.Context, remote string, q RemotePruneRequest) (*Operation, error) {
	return c.begin(ctx, path("remotes", remote, "prune"), q, "")
}

// Bench measures the pool or a volume: which is clone, reclaim or sync, and body has the fields of the request in the
// OpenAPI document, or is nil.
func (c *Client) Bench(ctx context.Context, which string, body map[string]any) (*Operation, error) {
	if body == nil {
		body = map[string]any{}
	}
	return c.begin(ctx, path("benches", which), body, "")
}

// Prune removes volumes and generations that are no longer needed.
func (c *Client) Prune(ctx context.Context, q PruneRequest) (*Operation, error) {
	return c.begin(ctx, "/v1/prune", q, "")
}

// GC removes what is left of destroyed objects and interrupted operations.
func (c *Client) GC(ctx context.Context) (*Operation, error) { return c.begin(ctx, "/v1/gc", nil, "") }

// Fsck checks the pool, its catalogue, and the filesystems in images: of refs, or all.
func (c *Client) Fsck(ctx context.Context, refs []string, repair bool) (*Operation, error) {
	body := map[string]any{"repair": repair}
	if len(refs) > 0 {
		body["refs"] = refs
	}
	return c.begin(ctx, "/v1/fsck", body, "")
}

// Doctor finds causes of data loss, leaks and slow storage on the host. only names checks; none: all.
func (c *Client) Doctor(ctx context.Context, only ...string) (*Operation, error) {
	body := map[string]any{}
	if len(only) > 0 {
		body["only"] = only
	}
	return c.begin(ctx, "/v1/doctor", body, "")
}

// Operations lists operations that run or have ended, the newest first, without their results.
func (c *Client) Operations(ctx context.Context) ([]Operation, error) {
	return list[Operation](ctx, c, "/v1/operations", nil)
}

// Tasks lists what the service does by itself.
func (c *Client) Tasks(ctx context.Context) ([]Task, error) {
	return list[Task](ctx, c, "/v1/tasks", nil)
}

// Operation shows an operation.
func (c *Client) Operation(ctx context.Context, id string) (*Operation, error) {
	return call[Operation](ctx, c, request{method: http.MethodGet, path: path("operations", id)})
}

// Cancel asks an operation to undo what it did, and to end.
func (c *Client) Cancel(ctx context.Context, id string) error {
	_, err := call[Operation](ctx, c, request{method: http.MethodDelete, path: path("operations", id)})
	return err
}

// CancelRequest cancels a request with an Idempotency-Key that is running: it undoes what it did and returns an error
// of the kind Canceled, or, if it was done already, what it has made. To cancel the context of a request instead leaves
// open whether it was done.
func (c *Client) CancelRequest(ctx context.Context, key string) error {
	_, err := call[nothing](ctx, c, request{method: http.MethodDelete, path: path("requests", key)})
	return err
}

// Wait waits for the end of an operation. If it failed or was canceled, it is returned with its error. result, unless
// it is nil, gets the result of the operation: see the JSON of the command of its verb.
func (c *Client) Wait(ctx context.Context, id string, result any) (*Operation, error) {
	for {
		op, err := call[Operation](ctx, c, request{method: http.MethodGet, path: path("operations", id, "wait"),
			query: url.Values{"timeout_seconds": {"60"}}})
		switch {
		case err != nil:
			return nil, err
		case op.Running():
			continue
		case op.Error != nil:
			return op, op.Error
		case result != nil && len(op.Result) > 0:
			if err := json.Unmarshal(op.Result, result); err != nil {
				return op, fmt.Errorf("pando: %w", err)
			}
		}
		return op, nil
	}
}
