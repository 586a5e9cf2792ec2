// Package gcs keeps objects in a bucket of Google Cloud Storage.
//
// # URL
//
//	gs://BUCKET/PREFIX
//
// Parameters: endpoint=https://HOST is another way to the same service (Private
// Service Connect); ca-file=FILE has certificates to trust besides those of the system;
// insecure-skip-verify=true trusts any. Credentials are the application default
// credentials: the file that GOOGLE_APPLICATION_CREDENTIALS names, that of `gcloud auth
// application-default login`, or the service account of the machine. If
// STORAGE_EMULATOR_HOST is set, that server is used, without credentials.
//
// # What is asked of the server
//
// Google's own conditions: ifGenerationMatch, which 0 makes "only if absent". The
// version of an object is its generation. An object is written by one request, with
// its CRC32C, which the server checks; what is read whole is checked against it, too.
// One object can be written about once a second: faster gets 429, which is temporary.
//
// # Why there is no library of Google's here
//
// Every start of every command would pay for it. Measured on two cores, `pando
// version` 200 times, median, and the size of the program, which has minio-go for
// internal/remote/objstore/s3 in any case:
//
//	neither                                6.4 ms   13.0 MB
//	minio-go                               8.5 ms   16.3 MB
//	and golang.org/x/oauth2/google         8.2 ms   16.7 MB
//	and cloud.google.com/go/auth          10.9 ms   25.2 MB
//	and google.golang.org/api/storage/v1  10.5 ms   25.7 MB
//
// cloud.google.com/go/storage has google.golang.org/api and gRPC in it. What is
// needed are five requests of the JSON API; tokens are left to x/oauth2.
package gcs

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"iter"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"

	"pando/internal/base/errs"
	"pando/internal/remote/objstore"
	"pando/internal/remote/objstore/web"
)

// Store is a part of a bucket. It may be used by several goroutines at once.
type Store struct {
	access objstore.Access
	l      location
	web    *web.Client

	mu   sync.Mutex
	http *http.Client // with credentials; nil before the first request
}

var _ objstore.Store = (*Store)(nil)

func (s *Store) String() string { return s.l.text }

// Close implements io.Closer. It closes idle connections.
func (s *Store) Close() error {
	s.web.Close()
	return nil
}

// resource is the server's description of an object. Numbers are strings.
type resource struct {
	Name       string `json:"name"`
	Size       string `json:"size"`
	Generation string `json:"generation"`
}

func (r resource) info(key string) (objstore.Info, error) {
	size, err := strconv.ParseInt(r.Size, 10, 64)
	if err != nil || size < 0 || r.Generation == "" {
		return objstore.Info{}, fmt.Errorf("the server described the object incorrectly: size %q, generation %q", r.Size,
			r.Generation)
	}
	return objstore.Info{Key: key, Bytes: size, Version: objstore.Version(r.Generation)}, nil
}

// objectURL returns the URL of an object.
func (s *Store) objectURL(key string) string {
	return s.l.base + "/storage/v1/b/" + s.l.bucket + "/o/" + url.PathEscape(s.l.prefix+key)
}

// send makes a request and returns its answer if it succeeded. The caller closes the body.
func (s *Store) send(
	ctx context.Context, method, url string, header http.Header, body io.Reader, length int64,
) (*http.Response, error) {
	client, err := s.authorizedClient(ctx)
	if err != nil {
		return nil, err
	}

	r, err := http.NewRequestWithContext(ctx, method, url, body)
	if err != nil {
		return nil, err
	}

	for name, values := range header {
		r.Header[name] = values
	}

	r.Header.Set("User-Agent", "pando")
	if body != nil {
		r.ContentLength = length
	}

	answer, err := client.Do(r)
	if err != nil {
		return nil, err
	}

	if answer.StatusCode/100 != 2 {
		defer answer.Body.Close()
		return nil, readRefusal(answer)
	}

	return answer, nil
}

// decodeJSON reads and closes an answer in JSON.
func decodeJSON(answer *http.Response, v any) error {
	defer answer.Body.Close()
	text, err := io.ReadAll(io.LimitReader(answer.Body, maxAnswer))
	if err != nil {
		return err
	}
	if err := json.Unmarshal(text, v); err != nil {
		return fmt.Errorf("cannot parse the server's answer: %w", err)
	}
	return nil
}

// maxAnswer is far above the size of a page of a listing, in bytes.
const maxAnswer = 16 << 20

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// crc32cOf returns the CRC32C of data in Google's encoding.
func crc32cOf(data []byte) string {
	return base64.StdEncoding.EncodeToString(binary.BigEndian.AppendUint32(nil, crc32.Checksum(data, castagnoli)))
}

// Put implements objstore.Store.
func (s *Store) Put(ctx context.Context, key string, data []byte, c objstore.Condition) (objstore.Version, error) {
	const op = "write object"
	if err := objstore.CheckPut(key, data); err != nil {
		return "", err
	}

	// Set the condition.
	query := url.Values{"uploadType": {"multipart"}, "fields": {"name,size,generation"}}
	switch {
	case c.Absent():
		query.Set("ifGenerationMatch", "0")
	case c.Version() != "":
		if n, err := strconv.ParseInt(string(c.Version()), 10, 64); err != nil || n <= 0 {
			return "", errs.New(errs.Conflict, op, key, "%q is not a version of an object here", string(c.Version()))
		}
		query.Set("ifGenerationMatch", string(c.Version()))
	}

	// Send the description of the object and its data in one request.
	about, err := json.Marshal(map[string]string{"name": s.l.prefix + key, "crc32c": crc32cOf(data),
		"contentType": "application/octet-stream"})
	if err != nil {
		return "", &errs.Error{Kind: errs.Internal, Op: op, Ref: key, Err: err}
	}

	boundary := rand.Text()
	before := fmt.Sprintf("--%s\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n%s\r\n--%s\r\nContent-Type: "+
		"application/octet-stream\r\n\r\n", boundary, about, boundary)
	after := fmt.Sprintf("\r\n--%s--\r\n", boundary)
	body := io.MultiReader(strings.NewReader(before), objstore.PacedReader(ctx, bytes.NewReader(data)),
		strings.NewReader(after))
	header := http.Header{"Content-Type": {"multipart/related; boundary=" + boundary}}
	answer, err := s.send(ctx, http.MethodPost, s.l.base+"/upload/storage/v1/b/"+s.l.bucket+"/o?"+query.Encode(),
		header, body, int64(len(before)+len(data)+len(after)))
	if err != nil {
		return "", s.wrapError(ctx, op, key, true, err)
	}

	// Check the answer.
	var r resource
	if err := decodeJSON(answer, &r); err != nil {
		return "", s.wrapError(ctx, op, key, true, err)
	}

	info, err := r.info(key)
	if err == nil && info.Bytes != int64(len(data)) {
		err = fmt.Errorf("the server received %d of %d bytes", info.Bytes, len(data))
	}
	if err != nil {
		return "", s.wrapError(ctx, op, key, true, err)
	}

	return info.Version, nil
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

	header := http.Header{}
	if r := web.Range(offset, length); r != "" {
		header.Set("Range", r)
	}

	answer, err := s.send(ctx, http.MethodGet, s.objectURL(key)+"?alt=media", header, nil, 0)
	if err != nil {
		var no *refusal
		if errors.As(err, &no) && no.status == http.StatusRequestedRangeNotSatisfiable {
			return s.getNothing(ctx, key)
		}
		return nil, objstore.Info{}, s.wrapError(ctx, op, key, false, err)
	}

	defer answer.Body.Close()

	data, info, err := readRange(ctx, answer, key, offset, length)
	if err != nil {
		return nil, objstore.Info{}, s.wrapError(ctx, op, key, false, err)
	}

	return data, info, nil
}

// readRange reads the answer to a request for length bytes from offset.
func readRange(
	ctx context.Context, answer *http.Response, key string, offset, length int64,
) ([]byte, objstore.Info, error) {
	span, err := web.SpanOf(answer.Header, offset, length)
	if err != nil {
		return nil, objstore.Info{}, err
	}

	data, err := web.ReadBody(ctx, answer.Body, span.Length)
	if err != nil {
		return nil, objstore.Info{}, err
	}
	if span.Total < 0 {
		span.Total = int64(len(data))
	}

	generation := answer.Header.Get("X-Goog-Generation")
	if generation == "" {
		return nil, objstore.Info{}, errs.New(errs.Unsupported, "", "", "the server did not report its generation")
	}

	if int64(len(data)) == span.Total {
		for _, line := range answer.Header.Values("X-Goog-Hash") {
			for hash := range strings.SplitSeq(line, ",") {
				if want, is := strings.CutPrefix(strings.TrimSpace(hash), "crc32c="); is && want != crc32cOf(data) {
					return nil, objstore.Info{}, errors.New("the data was damaged on its way: its CRC32C differs from the server's")
				}
			}
		}
	}

	return span.Cut(data, offset, length), objstore.Info{Key: key, Bytes: span.Total,
		Version: objstore.Version(generation)}, nil
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

	answer, err := s.send(ctx, http.MethodGet, s.objectURL(key)+"?fields=name,size,generation", nil, nil, 0)
	if err != nil {
		return objstore.Info{}, s.wrapError(ctx, op, key, false, err)
	}

	var r resource
	if err := decodeJSON(answer, &r); err != nil {
		return objstore.Info{}, s.wrapError(ctx, op, key, false, err)
	}

	info, err := r.info(key)
	if err != nil {
		return objstore.Info{}, s.wrapError(ctx, op, key, false, err)
	}

	return info, nil
}

// Delete implements objstore.Store.
func (s *Store) Delete(ctx context.Context, key string) error {
	if err := objstore.CheckKey(key); err != nil {
		return err
	}

	answer, err := s.send(ctx, http.MethodDelete, s.objectURL(key), nil, nil, 0)
	if err == nil {
		answer.Body.Close()
		return nil
	}

	var no *refusal
	if errors.As(err, &no) && no.status == http.StatusNotFound && !no.ofBucket() {
		return nil
	}

	return s.wrapError(ctx, "remove object", key, false, err)
}

// List implements objstore.Store. It asks for a thousand objects at a time.
func (s *Store) List(ctx context.Context, prefix string) iter.Seq2[objstore.Info, error] {
	const op = "list objects"
	return func(yield func(objstore.Info, error) bool) {
		if err := objstore.CheckPrefix(prefix); err != nil {
			yield(objstore.Info{}, err)
			return
		}

		query := url.Values{"maxResults": {"1000"}, "fields": {"nextPageToken,items(name,size,generation)"},
			"prefix": {s.l.prefix + prefix}}
		for last, any := "", false; ; {
			var page struct {
				Items         []resource `json:"items"`
				NextPageToken string     `json:"nextPageToken"`
			}
			answer, err := s.send(ctx, http.MethodGet, s.l.base+"/storage/v1/b/"+s.l.bucket+"/o?"+query.Encode(), nil, nil, 0)
			if err == nil {
				err = decodeJSON(answer, &page)
			}
			if err != nil {
				yield(objstore.Info{}, s.wrapError(ctx, op, prefix, true, err))
				return
			}

			// Check the objects of this page, and yield them.
			for _, r := range page.Items {
				key, ours := strings.CutPrefix(r.Name, s.l.prefix)
				if ours && (key == "" || strings.HasSuffix(key, "/")) {
					continue // a "directory" that another program created
				}

				info, err := r.info(key)
				switch {
				case err != nil:
				case !ours || !strings.HasPrefix(key, prefix):
					err = fmt.Errorf("the server lists %q, which was not requested", r.Name)
				case any && key <= last: // a prune relies on complete listings
					err = fmt.Errorf("the server lists %q after %q, which is out of order", key, last)
				}
				if err != nil {
					yield(objstore.Info{}, s.wrapError(ctx, op, prefix, true, err))
					return
				}

				last, any = key, true
				if !yield(info, nil) {
					return
				}
			}

			if page.NextPageToken == "" {
				return
			}

			query.Set("pageToken", page.NextPageToken)
		}
	}
}
