package s3

import (
	"cmp"
	"context"
	"net/url"
	"strconv"
	"strings"

	"pando/internal/base/errs"
	"pando/internal/remote/objstore"
	"pando/internal/remote/objstore/web"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/s3utils"
)

// Amazon's own server, and the region to begin with.
const (
	amazonHost    = "s3.amazonaws.com"
	defaultRegion = "us-east-1"
)

// location is a parsed URL.
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

// Open opens the store at u: see the package comment. It makes no request, and does not check
// that the bucket exists. Settings that are not in the URL come from access, under the names of
// Amazon's variables. Invalid: the URL is not valid.
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

	s := &Store{l: l, web: client, creds: newCredentials(l.profile, access), sure: l.region != ""}
	if err := s.connect(cmp.Or(l.region, access.Get("AWS_REGION"), access.Get("AWS_DEFAULT_REGION"),
		defaultRegion)); err != nil {
		return nil, err
	}

	return s, nil
}

func parse(u *url.URL, access objstore.Access) (location, error) {
	l := location{host: amazonHost, secure: true}
	l.options.Proxy = access.Proxy
	at, err := web.Scheme{
		Name: "s3", Of: "S3", Write: "write it as s3://BUCKET/PREFIX or " +
			"s3://BUCKET/PREFIX?endpoint=https://HOST&region=REGION",
		Credentials: "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or write them to ~/.aws/credentials",
		Bucket:      s3utils.CheckValidBucketNameStrict,
		Set:         l.setParameter,
	}.Parse(u)

	if text, name := endpointOf(access); text != "" && err == nil && !u.Query().Has("endpoint") {
		var wrong string
		if l.host, l.secure, wrong = web.Endpoint(text); wrong != "" {
			return l, errs.New(errs.Invalid, "open remote", name, "%s: %s", text, wrong).
				WithHint("write it as https://HOST:PORT, or unset it and add endpoint= to the remote's URL")
		}
	}

	if bundle := access.Get("AWS_CA_BUNDLE"); bundle != "" && l.options.CAFile == "" {
		l.options.CAFile = bundle
	}

	l.bucket, l.prefix, l.text = at.Bucket, at.Prefix, at.Text
	return l, err
}

// endpointOf returns the endpoint that is set for Amazon's own programs, and the name of that setting, or "" if none
// is.
func endpointOf(access objstore.Access) (text, name string) {
	if strings.EqualFold(access.Get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS"), "true") {
		return "", ""
	}
	for _, name := range []string{"AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"} {
		if text := access.Get(name); text != "" {
			return text, name
		}
	}
	return "", ""
}

// setParameter sets a parameter of a URL.
func (l *location) setParameter(name, value string) (known bool, wrong string) {
	switch name {
	case "endpoint":
		l.host, l.secure, wrong = web.Endpoint(value)
	case "region":
		if l.region = value; value == "" || strings.ContainsFunc(value, func(r rune) bool {
			return r <= ' ' || r == '/' || r > '~'
		}) {
			wrong = "it is not a region name"
		}
	case "profile":
		if l.profile = value; value == "" {
			wrong = "it is empty"
		}
	case "path-style":
		yes, err := strconv.ParseBool(value)
		l.lookup = minio.BucketLookupDNS
		if yes {
			l.lookup = minio.BucketLookupPath
		}
		if err != nil {
			wrong = "it must be true or false"
		}
	default:
		return l.options.Set(name, value)
	}

	return true, wrong
}
