// Package s3 keeps objects in a bucket of S3, of Amazon or of any other server that
// speaks its protocol.
//
// # URL
//
//	s3://BUCKET/PREFIX?endpoint=https://HOST:PORT&region=REGION
//
// The default endpoint is AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, or Amazon's. Without a region, the server is asked.
// Further parameters: profile=NAME is the section of the credentials files; path-style=true|false says whether the
// bucket is in the path of requests or in the host name, if the default for this server is wrong; ca-file=FILE has
// certificates to trust besides those of the system; insecure-skip-verify=true trusts any. Credentials are never in the
// URL: see credentials.go.
//
// # What is asked of the server
//
// Strong consistency, and conditions of PUT: If-None-Match: * and If-Match. Amazon
// has both since November 2024. The versions of objects are their ETags. An object is
// always written by one PUT, never in parts, so that its condition holds for all of
// it. Each request is signed with the hash (SHA-256) of its body, also over TLS: every
// server checks it, while the newer headers with checksums are refused by some.
//
// # Trying again
//
// This package tries each request once, and disables the retries of its library: the
// second attempt at a conditional PUT whose first answer was lost gets 412, and the
// caller would not know that the object was written. See objstore.Retry.
package s3

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"iter"
	"net/http"
	"strings"
	"sync"

	"pando/internal/base/errs"
	"pando/internal/remote/objstore"
	"pando/internal/remote/objstore/web"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"
)

// Store is a part of a bucket. It may be used by several goroutines at once.
type Store struct {
	l     location
	web   *web.Client
	creds *credentials.Credentials

	mu     sync.Mutex
	client *minio.Core // for region
	region string
	sure   bool // the region was given, or the server named it
}

var _ objstore.Store = (*Store)(nil)

func (s *Store) String() string { return s.l.String() }

// Close implements io.Closer. It closes idle connections.
func (s *Store) Close() error {
	s.web.Close()
	return nil
}

// init sets the longest pause of the library after a failed attempt to 0: it would pause
// even after the only attempt.
func init() { minio.DefaultRetryUnit = 0 }

// currentClient returns the client, and the region it is for.
func (s *Store) currentClient() (*minio.Core, string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.client, s.region
}

// connect creates the client for a region. The caller holds s.mu, or has just created s.
func (s *Store) connect(region string) error {
	c, err := minio.NewCore(s.l.host, &minio.Options{
		Creds:        s.creds,
		Secure:       s.l.secure,
		Transport:    s.web,
		Region:       region,
		BucketLookup: s.l.lookup,
		MaxRetries:   1,
	})
	if err != nil {
		return errs.New(errs.Invalid, "open remote", s.l.String(), "%w", err)
	}

	s.client, s.region = c, region
	return nil
}

// followRegion switches to the region that the server named in its answer. It reports whether
// the client is now for another region than used.
func (s *Store) followRegion(used string, answer minio.ErrorResponse) bool {
	wrongRegion := answer.Code == "AuthorizationHeaderMalformed" || answer.Code == "InvalidRegion" ||
		answer.Code == "PermanentRedirect" || answer.Code == "TemporaryRedirect" ||
		answer.StatusCode == http.StatusMovedPermanently || answer.StatusCode == http.StatusTemporaryRedirect ||
		answer.StatusCode == http.StatusBadRequest // of HEAD, whose answer has no code
	if !wrongRegion || answer.Region == "" || answer.Region == used {
		return false
	}

	s.mu.Lock()
	defer s.mu.Unlock()
	if s.region != used {
		return true // another request was faster
	}
	if s.sure {
		return false // the region was given, or the server keeps naming others
	}
	if s.connect(answer.Region) != nil {
		return false
	}

	s.sure = true
	return true
}

// withRegion makes a request, and repeats it if the server refused it because of a wrong region:
// then it had no effect. It returns the error of the library.
func (s *Store) withRegion(request func(*minio.Core) error) error {
	for {
		c, region := s.currentClient()
		err := request(c)
		var answer minio.ErrorResponse
		if err == nil || !errors.As(err, &answer) || !s.followRegion(region, answer) {
			return err
		}
	}
}

// Put implements objstore.Store.
func (s *Store) Put(ctx context.Context, key string, data []byte, c objstore.Condition) (objstore.Version, error) {
	const op = "write object"
	if err := objstore.CheckPut(key, data); err != nil {
		return "", err
	}

	sum := sha256.Sum256(data)
	options := minio.PutObjectOptions{DisableContentSha256: true} // the hash of the whole body is given
	switch {
	case c.Absent():
		options.SetMatchETagExcept("*")
	case c.Version() != "":
		options.SetMatchETag(string(c.Version()))
	}

	var info minio.UploadInfo
	err := s.withRegion(func(client *minio.Core) (err error) {
		body := objstore.PacedReader(ctx, bytes.NewReader(data))
		info, err = client.PutObject(ctx, s.l.bucket, s.l.prefix+key, body, int64(len(data)), "", hex.EncodeToString(sum[:]),
			options)
		return err
	})

	var answer minio.ErrorResponse
	if c.Version() != "" && errors.As(err, &answer) && answer.Code == minio.NoSuchKey {
		return "", s.conflictError(op, key) // Amazon's answer if nothing is there
	}
	if err != nil {
		return "", s.wrapError(ctx, op, key, err)
	}
	if info.ETag == "" {
		return "", s.noETagError(op, key)
	}

	return objstore.Version(info.ETag), nil
}

// Get implements objstore.Store.
func (s *Store) Get(ctx context.Context, key string, offset, length int64) ([]byte, objstore.Info, error) {
	const op = "read object"
	if err := objstore.CheckGet(key, offset); err != nil {
		return nil, objstore.Info{}, err
	}

	if length == 0 {
		return s.getNothing(ctx, key)
	}

	// Ask for the range, and read the answer.
	var data []byte
	var info objstore.Info
	err := s.withRegion(func(client *minio.Core) error {
		var options minio.GetObjectOptions
		if r := web.Range(offset, length); r != "" {
			options.Set("Range", r)
		}

		body, stat, header, err := client.GetObject(ctx, s.l.bucket, s.l.prefix+key, options)
		if err != nil {
			return err
		}

		defer body.Close()

		span, err := web.SpanOf(header, offset, length)
		if err != nil {
			return err
		}

		if data, err = web.ReadBody(ctx, body, span.Length); err != nil {
			return err
		}

		if span.Total < 0 {
			span.Total = int64(len(data))
		}

		data = span.Cut(data, offset, length)
		info = objstore.Info{Key: key, Bytes: span.Total, Version: objstore.Version(stat.ETag)}
		return nil
	})

	// A range that begins at or past the end of the object has no bytes.
	var answer minio.ErrorResponse
	if errors.As(err, &answer) && (answer.Code == minio.InvalidRange ||
		answer.StatusCode == http.StatusRequestedRangeNotSatisfiable) {
		return s.getNothing(ctx, key)
	}

	if err != nil {
		return nil, objstore.Info{}, s.wrapError(ctx, op, key, err)
	}
	if info.Version == "" {
		return nil, objstore.Info{}, s.noETagError(op, key)
	}

	return data, info, nil
}

// getNothing is Get for a range without bytes.
func (s *Store) getNothing(ctx context.Context, key string) ([]byte, objstore.Info, error) {
	info, err := s.Stat(ctx, key)
	return nil, info, err
}

// Stat implements objstore.Store.
func (s *Store) Stat(ctx context.Context, key string) (objstore.Info, error) {
	const op = "find object"
	if err := objstore.CheckKey(key); err != nil {
		return objstore.Info{}, err
	}

	var stat minio.ObjectInfo
	err := s.withRegion(func(client *minio.Core) (err error) {
		stat, err = client.StatObject(ctx, s.l.bucket, s.l.prefix+key, minio.StatObjectOptions{})
		return err
	})
	switch {
	case err != nil:
		return objstore.Info{}, s.wrapError(ctx, op, key, err)
	case stat.ETag == "":
		return objstore.Info{}, s.noETagError(op, key)
	}

	return objstore.Info{Key: key, Bytes: stat.Size, Version: objstore.Version(stat.ETag)}, nil
}

// Delete implements objstore.Store.
func (s *Store) Delete(ctx context.Context, key string) error {
	if err := objstore.CheckKey(key); err != nil {
		return err
	}

	err := s.withRegion(func(client *minio.Core) error {
		return client.RemoveObject(ctx, s.l.bucket, s.l.prefix+key, minio.RemoveObjectOptions{})
	})
	var answer minio.ErrorResponse
	if errors.As(err, &answer) && (answer.Code == minio.NoSuchKey || answer.StatusCode == http.StatusOK) {
		return nil // the answer of some servers where Amazon's is 204
	}
	if err != nil {
		return s.wrapError(ctx, "remove object", key, err)
	}

	return nil
}

// List implements objstore.Store. It asks for a thousand objects at a time.
func (s *Store) List(ctx context.Context, prefix string) iter.Seq2[objstore.Info, error] {
	const op = "list objects"
	return func(yield func(objstore.Info, error) bool) {
		if err := objstore.CheckPrefix(prefix); err != nil {
			yield(objstore.Info{}, err)
			return
		}

		last, any, stopped := "", false, false
		err := s.withRegion(func(client *minio.Core) error {
			for o := range client.ListObjectsIter(ctx, s.l.bucket,
				minio.ListObjectsOptions{Prefix: s.l.prefix + prefix, Recursive: true}) {
				if o.Err != nil {
					return o.Err
				}

				key, ours := strings.CutPrefix(o.Key, s.l.prefix)
				if !ours || !strings.HasPrefix(key, prefix) {
					return fmt.Errorf("the server lists %q, which was not requested", o.Key)
				}
				if key == "" || strings.HasSuffix(key, "/") {
					continue // a "directory" that another program created
				}

				// A prune relies on complete listings.
				if any && key <= last {
					return fmt.Errorf("the server lists %q after %q, which is out of order", key, last)
				}

				last, any = key, true
				if !yield(objstore.Info{Key: key, Bytes: o.Size, Version: objstore.Version(o.ETag)}, nil) {
					stopped = true
					return nil
				}
			}

			return ctx.Err() // the library does not report it
		})
		if err != nil && !stopped {
			yield(objstore.Info{}, s.wrapError(ctx, op, prefix, err))
		}
	}
}
