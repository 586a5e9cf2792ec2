package s3

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/minio/minio-go/v7/pkg/credentials"
	"gopkg.in/ini.v1"
)

// process gets credentials from the program that a section of ~/.aws/config or ~/.aws/credentials names with
// credential_process. Like Amazon's own programs it runs the program in a shell, so that quotes work and arguments are
// optional; the library refuses a program without arguments.
type process struct {
	credentials.Expiry
	command string
}

// newProcess returns the process of a profile, or nil if the profile has none, or has keys, which take precedence.
func newProcess(get func(string) string, profile string) *process {
	home := get("HOME")
	merged := map[string]string{}
	for _, f := range []struct{ path, section string }{
		{cmp.Or(get("AWS_CONFIG_FILE"), filepath.Join(home, ".aws", "config")), "profile " + profile},
		{cmp.Or(get("AWS_SHARED_CREDENTIALS_FILE"), filepath.Join(home, ".aws", "credentials")), profile},
	} {
		file, err := ini.LoadSources(ini.LoadOptions{SkipUnrecognizableLines: true}, f.path)
		if err != nil {
			continue // the library reports what is wrong with it
		}
		section := f.section
		if profile == "default" && !file.HasSection(section) {
			section = profile
		}
		if file.HasSection(section) {
			for _, k := range file.Section(section).Keys() {
				merged[k.Name()] = k.String()
			}
		}
	}

	if merged["aws_access_key_id"] != "" || merged["aws_secret_access_key"] != "" || merged["sso_role_name"] != "" {
		return nil
	}

	if command := strings.TrimSpace(merged["credential_process"]); command != "" {
		return &process{command: command}
	}

	return nil
}

// RetrieveWithCredContext implements credentials.Provider.
func (p *process) RetrieveWithCredContext(cc *credentials.CredContext) (credentials.Value, error) {
	ctx := cc.Context
	if ctx == nil {
		ctx = context.Background()
	}

	var said bytes.Buffer
	cmd := exec.CommandContext(ctx, "/bin/sh", "-c", p.command)
	cmd.Stderr = &said
	cmd.WaitDelay = time.Second
	out, err := cmd.Output()
	if err != nil {
		if line, _, _ := strings.Cut(strings.TrimSpace(said.String()), "\n"); line != "" {
			err = fmt.Errorf("%w: %s", err, line)
		}
		return credentials.Value{}, fmt.Errorf("its credential_process failed: %w", err)
	}

	var got struct {
		Version                                    int
		AccessKeyId, SecretAccessKey, SessionToken string
		Expiration                                 time.Time
	}

	// The output may be secret: errors must not contain it.
	if err := json.Unmarshal(out, &got); err != nil {
		return credentials.Value{}, errors.New("its credential_process did not print credentials as JSON")
	}

	if got.Version != 1 || got.AccessKeyId == "" || got.SecretAccessKey == "" {
		return credentials.Value{},
			errors.New("the output of its credential_process lacks Version 1, AccessKeyId or SecretAccessKey")
	}

	expires := got.Expiration
	if expires.IsZero() {
		expires = time.Now().AddDate(100, 0, 0) // never
	}

	p.SetExpiration(expires, credentials.DefaultExpiryWindow)
	return credentials.Value{
		AccessKeyID: got.AccessKeyId, SecretAccessKey: got.SecretAccessKey, SessionToken: got.SessionToken,
		Expiration: expires, SignerType: credentials.SignatureV4,
	}, nil
}

// Retrieve implements credentials.Provider.
func (p *process) Retrieve() (credentials.Value, error) {
	return p.RetrieveWithCredContext(&credentials.CredContext{})
}
