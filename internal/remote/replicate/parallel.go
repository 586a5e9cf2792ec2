package replicate

import (
	"context"
	"sync"

	"pando/internal/remote/repo"

	"golang.org/x/sync/errgroup"
)

// requests is how many requests for small objects run at once: stores answer each request slowly, but serve many at
// a time.
const requests = 8

// eachOf calls fn for every item, several at once, until one call fails. It returns the first error.
func eachOf[T any](ctx context.Context, items []T, fn func(context.Context, T) error) error {
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(requests)
	for _, x := range items {
		if gctx.Err() != nil {
			break
		}
		g.Go(func() error {
			if err := gctx.Err(); err != nil {
				return err
			}
			return fn(gctx, x)
		})
	}

	if err := g.Wait(); err != nil {
		return err
	}

	return ctx.Err()
}

// readManifests reads manifests, several at once, and passes each to fn, one at a time and in any order. It passes read
// errors to failed; an error that failed returns ends readManifests.
func readManifests(
	ctx context.Context, r *repo.Repo, ids []repo.ID, fn func(repo.Manifest), failed func(repo.ID, error) error,
) error {
	var mu sync.Mutex
	return eachOf(ctx, ids, func(ctx context.Context, id repo.ID) error {
		m, err := r.Manifest(ctx, id)
		if err != nil && ctx.Err() != nil {
			return err
		}
		mu.Lock()
		defer mu.Unlock()
		if err != nil {
			return failed(id, err)
		}
		fn(m)
		return nil
	})
}
