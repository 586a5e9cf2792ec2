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
	const op = "find credentials"
	c.source = nil
	profile := c.profile

	// Settings come first, unless the URL names a profile.
	if profile == "" {
		v := credentials.Value{
			AccessKeyID:     cmp.Or(c.access.Get("AWS_ACCESS_KEY_ID"), c.access.Get("AWS_ACCESS_KEY")),
			SecretAccessKey: cmp.Or(c.access.Get("AWS_SECRET_ACCESS_KEY"), c.access.Get("AWS_SECRET_KEY")),
			SessionToken:    c.access.Get("AWS_SESSION_TOKEN"),
			SignerType:      credentials.SignatureV4,
		}

		switch {
		case v.AccessKeyID != "" && v.SecretAccessKey != "":
			c.source = &credentials.Static{Value: v}
			return v, nil
		case v.AccessKeyID != "" || v.SecretAccessKey != "":
			return credentials.Value{}, errs.New(errs.Permission, op, "",
				"only one of AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY is set").
				WithHint("set both or neither")
		}

		profile = c.access.Get("AWS_PROFILE")
	}

	if !c.access.Ambient {
		return credentials.Value{}, errs.New(errs.Permission, op, profile, "no credentials for S3 are set").
			WithHint("set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY: files and roles are not used here")
	}

	// Then the section of a file, or the program that it names.
	var file credentials.Provider = &credentials.FileAWSCredentials{Profile: cmp.Or(profile, "default")}
	if p := newProcess(c.access.Get, cmp.Or(profile, "default")); p != nil {
		file = p
	}

	v, err := file.RetrieveWithCredContext(cc)
	if err == nil && v.AccessKeyID != "" && v.SecretAccessKey != "" {
		c.source = file
		return v, nil
	}

	if profile != "" { // requested explicitly
		if err == nil {
			err = errors.New("the profile has no credentials")
		}
		return v, errs.New(errs.Permission, op, profile, "%w", err).
			WithHint("check this section of ~/.aws/credentials and ~/.aws/config")
	}

	// Then a role. A file without credentials is not an error.
	fileErr := err
	if os.IsNotExist(fileErr) || noSection(fileErr) {
		fileErr = nil
	}

	if fileErr == nil && !strings.EqualFold(c.access.Get("AWS_EC2_METADATA_DISABLED"), "true") || c.hasRole() {
		role := &credentials.IAM{Endpoint: c.machine}
		asked := *cc
		ctx := cc.Context
		if ctx == nil {
			ctx = context.Background()
		}

		ctx, cancel := context.WithTimeout(ctx, roleWait)
		defer cancel()
		asked.Context = ctx
		v, err := role.RetrieveWithCredContext(&asked)
		if err == nil && v.AccessKeyID != "" && v.SecretAccessKey != "" {
			c.source = role
			return v, nil
		}

		if c.hasRole() {
			if err == nil {
				err = errors.New("the answer contains no credentials")
			}
			return v, errs.New(errs.Permission, op, "", "the role of this container or web identity gave none: %w", err).
				WithHint("check the variables AWS_CONTAINER_CREDENTIALS_*, AWS_WEB_IDENTITY_TOKEN_FILE and AWS_ROLE_ARN")
		}
	}

	if cc.Context != nil && cc.Context.Err() != nil {
		return credentials.Value{}, errs.Wrap(op, "", cc.Context.Err())
	}

	e := errs.New(errs.Permission, op, "", "no credentials for S3 found")
	if fileErr != nil {
		e = errs.New(errs.Permission, op, "", "%w", fileErr)
	}

	return credentials.Value{},
		e.WithHint("set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or write them to ~/.aws/credentials; with sudo, " +
			"do so for the user that pando runs as")
}

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
