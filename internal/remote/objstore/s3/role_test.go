package s3

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/remote/objstore"

	"github.com/minio/minio-go/v7/pkg/credentials"
)

// ambient is the access of a program that reads its environment.
var ambient = objstore.Access{Setting: os.Getenv, Ambient: true}

// TestRoleOfTheMachine: the service that machines of EC2 have, version 2, at another
// place than 169.254.169.254, which tests do not have.
func TestRoleOfTheMachine(t *testing.T) {
	for _, name := range []string{"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_EC2_METADATA_DISABLED",
		"AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_WEB_IDENTITY_TOKEN_FILE"} {
		t.Setenv(name, "")
	}
	t.Setenv("AWS_CONFIG_FILE", os.DevNull)
	t.Setenv("AWS_SHARED_CREDENTIALS_FILE", os.DevNull)
	service := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.Method == http.MethodPut && r.URL.Path == "/latest/api/token":
			_, _ = w.Write([]byte("session"))
		case r.Header.Get("X-aws-ec2-metadata-token") != "session":
			w.WriteHeader(http.StatusUnauthorized)
		case r.URL.Path == "/latest/meta-data/iam/security-credentials/":
			_, _ = w.Write([]byte("the-role"))
		case r.URL.Path == "/latest/meta-data/iam/security-credentials/the-role":
			_ = json.NewEncoder(w).Encode(map[string]any{"Code": "Success", "AccessKeyId": "A", "SecretAccessKey": "S",
				"Token": "T", "Expiration": time.Now().Add(time.Hour)})
		default:
			w.WriteHeader(http.StatusNotFound)
		}
	}))
	defer service.Close()
	c := &chain{machine: service.URL, access: ambient}
	v, err := c.RetrieveWithCredContext(&credentials.CredContext{Client: http.DefaultClient})
	if err != nil || v.AccessKeyID != "A" || v.SecretAccessKey != "S" || v.SessionToken != "T" || c.IsExpired() {
		t.Errorf("%+v, %v, expired %v", v, err, c.IsExpired())
	}

	t.Setenv("AWS_EC2_METADATA_DISABLED", "true")
	if _, err := c.RetrieveWithCredContext(&credentials.CredContext{Client: http.DefaultClient}); !errs.Is(err,
		errs.Permission) {
		t.Errorf("asked although it is switched off: %v", err)
	}
	t.Setenv("AWS_EC2_METADATA_DISABLED", "")

	// Elsewhere nothing answers, or packets go nowhere.
	hang := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }))
	defer hang.Close()
	begin := time.Now()
	_, err = (&chain{machine: hang.URL,
		access: ambient}).RetrieveWithCredContext(&credentials.CredContext{Client: http.DefaultClient})
	if !errs.Is(err, errs.Permission) || errs.HintOf(err) == "" {
		t.Errorf("%v, hint %q", err, errs.HintOf(err))
	}
	if took := time.Since(begin); took > 2*roleWait {
		t.Errorf("it took %s to find that this is no such machine", took)
	}
}
