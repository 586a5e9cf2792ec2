package gcs

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"regexp"
	"strings"
	"sync"
	"time"

	"pando/internal/base/errs"
	"pando/internal/remote/objstore"
	"pando/internal/remote/objstore/web"

	"golang.org/x/oauth2"
	"golang.org/x/oauth2/google"
)

// scope is the permission of a token: to read and write objects.
const scope = "https://www.googleapis.com/auth/devstorage.read_write"

// location is a parsed URL.
type location struct {
	bucket   string
	prefix   string // "" or with a slash at the end
	base     string // of the URLs of requests
	emulator bool   // wants no credentials
	options  web.Options
	text     string // for people
}

// bucketName matches bucket names, including domain names. It keeps anything else out of
// the URLs of requests.
var bucketName = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`^[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]$`)
})

// Open opens the store at u: see the package comment. It makes no request, and does not check
// that the bucket exists. Settings that are not in the URL come from access, under the names of
// Google's variables. Invalid: the URL is not valid.
func Open(ctx context.Context, u *url.URL, access objstore.Access) (objstore.Store, error) {
	if err := objstore.Ended(ctx, "open remote", web.Name(u)); err != nil {
		return nil, err
	}

	l, err := parse(u, access)
	if err != nil {
		return nil, err
	}

	client, err := web.New(l.options)
	if err != nil {
		return nil, err
	}

	return &Store{l: l, web: client, access: access}, nil
}

func parse(u *url.URL, access objstore.Access) (location, error) {
	l := location{base: "https://storage.googleapis.com"}
	l.options.Proxy = access.Proxy
	if host := access.Get("STORAGE_EMULATOR_HOST"); host != "" {
		if !strings.Contains(host, "://") {
			host = "http://" + host
		}
		l.base, l.emulator = strings.TrimRight(host, "/"), true
	}

	at, err := web.Scheme{
		Name: "gs", Of: "Google Cloud Storage", Write: "write it as gs://BUCKET/PREFIX",
		Credentials: "set GOOGLE_APPLICATION_CREDENTIALS, or run `gcloud auth application-default login`",
		Bucket: func(name string) error {
			if !bucketName().MatchString(name) {
				return errors.New("it must have 3 to 222 characters of a-z 0-9 . _ -")
			}
			return nil
		},
		Set: func(name, value string) (known bool, wrong string) {
			if name != "endpoint" {
				return l.options.Set(name, value)
			}
			host, secure, wrong := web.Endpoint(value)
			if !l.emulator {
				l.base = web.BaseURL(host, secure)
			}
			return true, wrong
		},
	}.Parse(u)

	l.bucket, l.prefix, l.text = at.Bucket, at.Prefix, at.Text
	return l, err
}

// authorizedClient returns the client for requests. It looks for credentials at the first
// request, and again as long as there are none: as a last resort this asks the network
// whether this is a machine of Google's.
func (s *Store) authorizedClient(ctx context.Context) (*http.Client, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.http != nil {
		return s.http, nil
	}

	client := &http.Client{Transport: s.web, CheckRedirect: noRedirect}
	if !s.l.emulator {
		// Tokens are also fetched long after this request.
		ctx := context.WithValue(context.WithoutCancel(ctx), oauth2.HTTPClient,
			&http.Client{Transport: s.web, Timeout: tokenWait})
		found, err := findCredentials(ctx, s.access)
		if err != nil {
			return nil, errs.New(errs.Permission, "find credentials", s.access.Get(keyFile), "%w", err).
				WithHint("set GOOGLE_APPLICATION_CREDENTIALS to a key file, or run `gcloud auth application-default " +
					"login`; with sudo, do so as the user that pando runs as")
		}
		client.Transport = &oauth2.Transport{Source: found.TokenSource, Base: s.web}
	}

	s.http = client
	return client, nil
}

// keyFile is the setting that names the file of a key.
const keyFile = "GOOGLE_APPLICATION_CREDENTIALS"

// findCredentials looks for credentials where Google's own programs do, if access allows ambient
// ones, and otherwise only in the key file that is set.
func findCredentials(ctx context.Context, access objstore.Access) (*google.Credentials, error) {
	path := access.Get(keyFile)
	switch {
	case access.Ambient:
		return google.FindDefaultCredentials(ctx, scope)
	case path == "":
		return nil, errors.New("no key file is set, and this program reads credentials from nowhere else")
	}

	key, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}

	// Refuse other types of keys: they name programs and addresses that the library would use.
	var kind struct {
		Type google.CredentialsType `json:"type"`
	}
	if err := json.Unmarshal(key, &kind); err != nil {
		return nil, err
	}

	if kind.Type != google.ServiceAccount && kind.Type != google.AuthorizedUser {
		return nil, fmt.Errorf("the key has type %q: it must belong to a service account or a user", string(kind.Type))
	}

	return google.CredentialsFromJSONWithType(ctx, key, kind.Type, scope)
}

// tokenWait is how long fetching a token may take.
const tokenWait = 30 * time.Second

// noRedirect refuses redirects: this API has none, and tokens must not be sent to other servers.
func noRedirect(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }

// server returns the name of the server for people.
func (l location) server() string {
	_, host, _ := strings.Cut(l.base, "://")
	return cmp.Or(host, l.base)
}
