package client

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/url"
	"time"
)

// Destroy destroys a volume with its snapshots. With ifMatch, an ETag, it does so only if the volume has it still. If
// the connection is lost, Destroy repeats the request, which never destroys another volume that has the name by then.
func (c *Client) Destroy(ctx context.Context, volume, ifMatch string) error {
	return c.destroy(ctx, volume, path("volumes", volume), ifMatch)
}

// DestroySnapshot destroys a snapshot. ifMatch and repetitions are as in Destroy.
func (c *Client) DestroySnapshot(ctx context.Context, volume, snapshot, ifMatch string) error {
	return c.destroy(ctx, volume+"@"+snapshot, path("volumes", volume, "snapshots", snapshot), ifMatch)
}

func (c *Client) destroy(ctx context.Context, ref, path, ifMatch string) error {
	found, err := c.toDestroy(ctx, DestroyRequest{What: []string{ref}})
	if err != nil {
		return err
	}
	_, err = repeat(ctx, func() (*nothing, error) {
		return call[nothing](ctx, c, request{method: http.MethodDelete, path: path, header: headers("", ifMatch),
			query: url.Values{"id": {found[0].ID}}})
	})
	return err
}

// DestroyMany destroys volumes by name or glob, and snapshots; with labels only those that have them, with labels alone
// all volumes that have them. Repetitions are as in Destroy; what an earlier attempt has destroyed is then missing in
// the report.
func (c *Client) DestroyMany(ctx context.Context, what, labels []string) (*DestroyReport, error) {
	found, err := c.toDestroy(ctx, DestroyRequest{What: what, Labels: labels})
	if err != nil {
		return nil, err
	}
	q := DestroyRequest{Labels: labels}
	for _, o := range found {
		q.What, q.IDs = append(q.What, o.Ref), append(q.IDs, o.ID)
	}
	return repeat(ctx, func() (*DestroyReport, error) {
		return call[DestroyReport](ctx, c, request{method: http.MethodPost, path: "/v1/destroy", body: q})
	})
}

// toDestroy finds what would be destroyed.
func (c *Client) toDestroy(ctx context.Context, q DestroyRequest) ([]Destroyed, error) {
	q.DryRun = true
	report, err := repeat(ctx, func() (*DestroyReport, error) {
		return call[DestroyReport](ctx, c, request{method: http.MethodPost, path: "/v1/destroy", body: q})
	})
	if err != nil {
		return nil, err
	}
	return report.Destroyed, nil
}

const (
	patience = 10 * time.Second       // how long a request is repeated
	pause    = 100 * time.Millisecond // between two attempts
)

// repeat sends a request that can be repeated again if its answer is lost, as when the service is restarted.
func repeat[T any](ctx context.Context, send func() (T, error)) (T, error) {
	deadline := time.Now().Add(patience)
	for sent := false; ; {
		out, err := send()
		answer := (*Error)(nil)
		if err == nil || errors.As(err, &answer) || ctx.Err() != nil {
			return out, err
		}
		sent = sent || !unreachable(err)
		if !sent || time.Now().After(deadline) {
			return out, err
		}

		select {
		case <-ctx.Done():
			return out, ctx.Err()
		case <-time.After(pause):
		}
	}
}

// unreachable reports whether a request was not sent, because nobody listened.
func unreachable(err error) bool {
	var op *net.OpError
	return errors.As(err, &op) && op.Op == "dial"
}
