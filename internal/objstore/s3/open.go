package s3

import (
	"cmp"
	"context"
	"net/url"
	"os"
	"strconv"
	"strings"

	"pando/internal/errs"
	"pando/internal/objstore"
	"pando/internal/objstore/web"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/s3utils"
)

// Amazon's own server, and the region that it begins with.
const (
	amazonHost    = "s3.amazonaws.com"
	defaultRegion = "us-east-1"
)

// location is what a URL says.
type location struct {
	bucket  string
	prefix  string // "" or with a slash at the end
	host    string // with a port, if that is not the usual one
	secure  bool
	lookup  minio.BucketLookupType
	region  string // "" if it does not say
	profile string
	options web.Options
	text    string // for people
}

func (l location) String() string { return l.text }

// Open opens the store that u, as above, names. It asks nobody: not even whether the
// bucket is there. Errors: Invalid for a URL that is none.
func Open(ctx context.Context, u *url.URL) (objstore.Store, error) {
	if err := objstore.Ended(ctx, "open remote", web.Name(u)); err != nil {
		return nil, err
	}
	l, err := parse(u)
	if err != nil {
		return nil, err
	}
	client, err := web.New(l.options)
	if err != nil {
		return nil, err
	}
	s := &Store{l: l, web: client, creds: newCredentials(l.profile), sure: l.region != ""}
	if err := s.connect(cmp.Or(l.region, os.Getenv("AWS_REGION"), os.Getenv("AWS_DEFAULT_REGION"), defaultRegion)); err != nil {
		return nil, err
	}
	return s, nil
}

func parse(u *url.URL) (location, error) {
	l := location{host: amazonHost, secure: true}
	invalid := func(format string, args ...any) (location, error) {
		return location{}, errs.New(errs.Invalid, "open remote", web.Name(u), format, args...).
			WithHint("write it as s3://BUCKET/PREFIX or s3://BUCKET/PREFIX?endpoint=https://HOST&region=REGION")
	}
	switch {
	case u.Scheme != "s3":
		return invalid("it is not a URL of S3")
	case u.User != nil:
		return location{}, errs.New(errs.Invalid, "open remote", web.Name(u), "credentials do not belong into the URL").
			WithHint("set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or write them to ~/.aws/credentials")
	case u.Opaque != "" || u.Host == "":
		return invalid("it names no bucket")
	case u.Fragment != "" || u.RawFragment != "":
		return invalid("it has a part after #")
	}
	l.bucket = u.Host
	if err := s3utils.CheckValidBucketNameStrict(l.bucket); err != nil {
		return invalid("%q is no name of a bucket: %w", l.bucket, err)
	}
	prefix, why := web.Prefix(u.Path)
	if why != "" {
		return invalid("%s", why)
	}
	l.prefix = prefix
	query, err := url.ParseQuery(u.RawQuery)
	if err != nil {
		return invalid("%w", err)
	}
	for name, values := range query {
		if len(values) != 1 {
			return invalid("it has the parameter %s more than once", name)
		}
		v := values[0]
		bad := ""
		switch name {
		case "endpoint":
			l.host, l.secure, bad = web.Endpoint(v)
		case "region":
			if l.region = v; v == "" || strings.ContainsFunc(v, func(r rune) bool { return r <= ' ' || r == '/' || r > '~' }) {
				bad = "it is no name of a region"
			}
		case "profile":
			if l.profile = v; v == "" {
				bad = "it is empty"
			}
		case "path-style":
			yes, err := strconv.ParseBool(v)
			l.lookup = minio.BucketLookupDNS
			if yes {
				l.lookup = minio.BucketLookupPath
			}
			if err != nil {
				bad = "it must be true or false"
			}
		default:
			known, wrong := l.options.Set(name, v)
			if bad = wrong; !known {
				return invalid("there is no parameter %q", name)
			}
		}
		if bad != "" {
			return invalid("its parameter %s: %s", name, bad)
		}
	}
	if bundle := os.Getenv("AWS_CA_BUNDLE"); bundle != "" && l.options.CAFile == "" {
		l.options.CAFile = bundle
	}
	text := url.URL{Scheme: "s3", Host: l.bucket, RawQuery: u.RawQuery}
	if l.prefix != "" {
		text.Path = "/" + strings.TrimSuffix(l.prefix, "/")
	}
	l.text = text.String()
	return l, nil
}
