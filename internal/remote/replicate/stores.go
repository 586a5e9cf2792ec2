package replicate

import (
	"context"
	"errors"
	"net/url"
	"strings"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/mask"
	"pando/internal/remote/objstore"
	"pando/internal/remote/objstore/file"
	"pando/internal/remote/objstore/gcs"
	"pando/internal/remote/objstore/s3"
)

// Access is what reaching the store of a remote takes besides its URL: credentials, a proxy, the number of attempts.
// Front ends provide it.
type Access = objstore.Access

// Waiting is a pause before a request to a store is retried.
type Waiting = objstore.Waiting

// reach limits how long requests are retried to a server that has never answered: its address may be wrong.
const reach = 8 * time.Second

// Outage reports whether a command, or a part of it, failed because the store does not answer properly. The same
// command may succeed later.
func Outage(err error) bool { return objstore.Temporary(err) }

// DefaultAttempts is the number of attempts for a request if Access does not set one.
const DefaultAttempts = objstore.DefaultAttempts

// storeSchemes lists the forms of URLs, for messages.
const storeSchemes = "file:/DIR, s3://BUCKET/PREFIX or gs://BUCKET/PREFIX"

// OpenStore opens the object store of a URL: file:/DIR, s3://BUCKET/PREFIX or gs://BUCKET/PREFIX. The store makes one
// attempt per request and has no rate limit; see objstore.Retry and objstore.Limit. access has the credentials of
// buckets. With create, OpenStore makes a directory that does not exist; it never creates buckets.
//
// Errors: Invalid for a malformed URL, and the kinds of the store.
func OpenStore(ctx context.Context, raw string, access Access, create bool) (objstore.Store, error) {
	u, err := parseURL(raw)
	if err != nil {
		return nil, err
	}

	switch {
	case u.Scheme == "s3":
		return s3.Open(ctx, u, access)
	case u.Scheme == "gs":
		return gcs.Open(ctx, u, access)
	case create:
		return file.Create(ctx, u)
	}

	return file.Open(ctx, u)
}

// parseURL parses the URL of a store. Errors: Invalid.
func parseURL(raw string) (*url.URL, error) {
	bad := func(format string, args ...any) error {
		return errs.New(errs.Invalid, "open remote", mask.URL(raw), format, args...).
			WithHint("use a URL of the form %s", storeSchemes)
	}
	u, err := url.Parse(raw)
	if err != nil {
		return nil, bad("not a URL: %w", errors.Unwrap(err)) // without the URL
	}

	if u.User != nil {
		u.User = nil
		raw = u.String()
		return nil, bad("a URL must not contain a user or a password: pando prints URLs").(*errs.Error).
			WithHint("set credentials in the environment or in the configuration files of the store's own tools")
	}

	// Check each part of the URL.
	switch {
	case mask.HasSecret(raw):
		return nil, bad("a URL must not contain a password or a token: pando stores and prints URLs").(*errs.Error).
			WithHint("set credentials in the environment or in the configuration files of the store's own tools")
	case u.Scheme == "":
		return nil, bad("the URL has no scheme")
	case u.Fragment != "":
		return nil, bad("the URL must not have a fragment (%q)", u.Fragment)
	case u.Scheme == "file":
		path := u.Path
		if u.Opaque != "" {
			path = u.Opaque
		}
		if u.Host != "" && u.Host != "localhost" || !strings.HasPrefix(path, "/") {
			return nil, bad("the path of a directory must be absolute")
		}
	case u.Scheme == "s3" || u.Scheme == "gs":
		if u.Host == "" {
			return nil, bad("the URL names no bucket")
		}
	default:
		return nil, bad("unknown scheme %q", u.Scheme)
	}

	return u, nil
}
