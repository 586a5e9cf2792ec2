package s3

import (
	"cmp"
	"context"
	"errors"
	"os"
	"strings"
	"time"

	"pando/internal/base/errs"
	"pando/internal/remote/objstore"

	"github.com/minio/minio-go/v7/pkg/credentials"
)

// roleWait is how long to wait for credentials of a role of this host. A host without
// a role does not answer.
const roleWait = 3 * time.Second

const opFind = "find credentials"

var (
	errNoneFound     = errors.New("no credentials for S3 found")
	errNoneInProfile = errors.New("the profile has no credentials")
	errNoneInAnswer  = errors.New("the answer contains no credentials")
)

// chain finds credentials where the programs of Amazon look for them, in this order:
//
//   - the settings AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN;
//   - if what is ambient may be used, a section of ~/.aws/credentials and ~/.aws/config (or of the files that
//     AWS_SHARED_CREDENTIALS_FILE and AWS_CONFIG_FILE name), or the program that it names: that of the URL's profile,
//     that of AWS_PROFILE, or "default";
//   - the role of a container, of a web identity, or of the machine (EC2).
//
// If the URL names a profile, only that is used. The library's own chain continues when
// one of these places fails, and ends without credentials: then the error would say
// that access to the bucket is denied, although a name in a file is wrong.
type chain struct {
	profile string // of the URL, or ""
	access  objstore.Access
	machine string // URL of a machine's service for roles, "" for the usual one
	source  credentials.Provider
}

func newCredentials(profile string, access objstore.Access) *credentials.Credentials {
	return credentials.New(&chain{profile: profile, access: access})
}

// RetrieveWithCredContext implements credentials.Provider. The library calls it with a
// lock held, and again when the credentials have expired.
func (c *chain) RetrieveWithCredContext(cc *credentials.CredContext) (credentials.Value, error) {
	c.source = nil
	profile := c.profile

	// Settings come first, unless the URL names a profile.
	if profile == "" {
		if v, err := c.fromSettings(); err != nil || c.source != nil {
			return v, err
		}
		profile = c.access.Get("AWS_PROFILE")
	}

	if !c.access.Ambient {
		return credentials.Value{}, errs.New(errs.Permission, opFind, profile, "no credentials for S3 are set").
			WithHint("set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY: files and roles are not used here")
	}

	// Then the section of a file, or the program that it names.
	v, err := c.fromFile(cc, cmp.Or(profile, "default"))
	if c.source != nil {
		return v, nil
	}

	if profile != "" { // requested explicitly
		return v, errs.New(errs.Permission, opFind, profile, "%w", cmp.Or(err, errNoneInProfile)).
			WithHint("check this section of ~/.aws/credentials and ~/.aws/config")
	}

	// Then a role. A file without credentials is not an error.
	fileErr := err
	if os.IsNotExist(fileErr) || noSection(fileErr) {
		fileErr = nil
	}

	if fileErr == nil && !strings.EqualFold(c.access.Get("AWS_EC2_METADATA_DISABLED"), "true") || c.hasRole() {
		if v, err := c.fromRole(cc); err != nil || c.source != nil {
			return v, err
		}
	}

	if cc.Context != nil && cc.Context.Err() != nil {
		return credentials.Value{}, errs.Wrap(opFind, "", cc.Context.Err())
	}

	return credentials.Value{}, errs.New(errs.Permission, opFind, "", "%w", cmp.Or(fileErr, errNoneFound)).
		WithHint("set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or write them to ~/.aws/credentials; with sudo, " +
			"do so for the user that pando runs as")
}

// fromSettings returns the credentials in settings, and sets c.source if there are any.
func (c *chain) fromSettings() (credentials.Value, error) {
	v := credentials.Value{
		AccessKeyID:     cmp.Or(c.access.Get("AWS_ACCESS_KEY_ID"), c.access.Get("AWS_ACCESS_KEY")),
		SecretAccessKey: cmp.Or(c.access.Get("AWS_SECRET_ACCESS_KEY"), c.access.Get("AWS_SECRET_KEY")),
		SessionToken:    c.access.Get("AWS_SESSION_TOKEN"),
		SignerType:      credentials.SignatureV4,
	}

	switch {
	case isComplete(v):
		c.source = &credentials.Static{Value: v}
		return v, nil
	case v.AccessKeyID != "" || v.SecretAccessKey != "":
		return credentials.Value{}, errs.New(errs.Permission, opFind, "",
			"only one of AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY is set").
			WithHint("set both or neither")
	}

	return credentials.Value{}, nil
}

// fromFile returns the credentials of a section of a file, or of the program that it names, and sets c.source if there
// are any.
func (c *chain) fromFile(cc *credentials.CredContext, section string) (credentials.Value, error) {
	var file credentials.Provider = &credentials.FileAWSCredentials{Profile: section}
	if p := newProcess(c.access.Get, section); p != nil {
		file = p
	}

	v, err := file.RetrieveWithCredContext(cc)
	if err == nil && isComplete(v) {
		c.source = file
	}

	return v, err
}

// fromRole returns the credentials of a role, and sets c.source if there are any. It is an error if a role that a
// setting names has none.
func (c *chain) fromRole(cc *credentials.CredContext) (credentials.Value, error) {
	ctx := cc.Context
	if ctx == nil {
		ctx = context.Background()
	}

	ctx, cancel := context.WithTimeout(ctx, roleWait)
	defer cancel()

	role := &credentials.IAM{Endpoint: c.machine}
	asked := *cc
	asked.Context = ctx
	v, err := role.RetrieveWithCredContext(&asked)
	switch {
	case err == nil && isComplete(v):
		c.source = role
		return v, nil
	case c.hasRole():
		return v, errs.New(errs.Permission, opFind, "", "the role of this container or web identity gave none: %w",
			cmp.Or(err, errNoneInAnswer)).
			WithHint("check the variables AWS_CONTAINER_CREDENTIALS_*, AWS_WEB_IDENTITY_TOKEN_FILE and AWS_ROLE_ARN")
	}

	return credentials.Value{}, nil
}

// isComplete reports whether v has both keys.
func isComplete(v credentials.Value) bool { return v.AccessKeyID != "" && v.SecretAccessKey != "" }

// Retrieve implements credentials.Provider.
func (c *chain) Retrieve() (credentials.Value, error) {
	return c.RetrieveWithCredContext(&credentials.CredContext{})
}

// IsExpired implements credentials.Provider.
func (c *chain) IsExpired() bool { return c.source == nil || c.source.IsExpired() }

// hasRole reports whether a setting names a role.
func (c *chain) hasRole() bool {
	for _, name := range []string{"AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI",
		"AWS_WEB_IDENTITY_TOKEN_FILE"} {
		if c.access.Get(name) != "" {
			return true
		}
	}
	return false
}

// noSection reports whether err says that a file has no section "default".
func noSection(err error) bool {
	return err != nil && strings.Contains(err.Error(), "does not exist")
}
