package cli

import (
	"context"
	"net/http"
	"os"
	"strconv"

	"pando/internal/base/errs"
	"pando/internal/remote/replicate"
)

// attemptsVariable says how often requests to a remote are tried.
const attemptsVariable = "PANDO_REMOTE_ATTEMPTS"

// remoteAccess is how this process reaches the stores of remotes: by what its environment says,
// and what the user that it runs as has in files for other programs. Invalid.
func (a *App) remoteAccess() (replicate.Access, error) {
	access := replicate.Access{
		Setting: os.Getenv, Ambient: true, Proxy: http.ProxyFromEnvironment,
		OnRetry: func(w replicate.Waiting) { a.outage.showRetry(a, w) }, OnAnswer: a.outage.endRetry,
	}
	if v := os.Getenv(attemptsVariable); v != "" {
		n, err := strconv.Atoi(v)
		if err != nil || n < 1 {
			return access, errs.New(errs.Invalid, "open remote", attemptsVariable, "must be a number of at least 1 (got %q)", v).
				WithHint("unset it: the default, %d attempts, covers outages of about 45 s", replicate.DefaultAttempts)
		}
		access.Attempts = n
	}

	return access, nil
}

// findRemote reads what the pool has of a remote; name "" stands for the only one. It returns the kinds of
// replicate.Find, and Invalid.
func (a *App) findRemote(op, name string) (*replicate.Remote, error) {
	access, err := a.remoteAccess()
	if err != nil {
		return nil, err
	}

	r, err := replicate.Find(op, a.poolDir(), name, access)
	if err != nil {
		return nil, err
	}

	r.KnowNames(func(ctx context.Context) ([]string, error) {
		e, err := a.openPool(ctx)
		if err != nil {
			return nil, err
		}
		defer e.Close()
		return replicate.NamesOf(ctx, e, r)
	})

	return r, nil
}
