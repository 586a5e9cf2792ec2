package s3

import (
	"os"
	"path/filepath"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/remote/objstore"

	"github.com/minio/minio-go/v7/pkg/credentials"
)

// What the process has in its environment and in files is used only if the front end says so.
func TestOnlyWhatIsGiven(t *testing.T) {
	file := filepath.Join(t.TempDir(), "credentials")
	if err := os.WriteFile(file, []byte("[default]\naws_access_key_id=FILE\naws_secret_access_key=S\n"),
		0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("AWS_CONFIG_FILE", os.DevNull)
	t.Setenv("AWS_SHARED_CREDENTIALS_FILE", file)
	t.Setenv("AWS_ACCESS_KEY_ID", "ENV")
	t.Setenv("AWS_SECRET_ACCESS_KEY", "S")
	given := map[string]string{"AWS_ACCESS_KEY_ID": "GIVEN", "AWS_SECRET_ACCESS_KEY": "S"}
	for _, c := range []struct {
		name   string
		access objstore.Access
		want   string // "": none
	}{
		{"nothing", objstore.Access{}, ""},
		{"settings", objstore.Access{Setting: func(name string) string { return given[name] }}, "GIVEN"},
		{"environment", objstore.Access{Setting: os.Getenv}, "ENV"},
		{"files", objstore.Access{Ambient: true}, "FILE"},
	} {
		v, err := newCredentials("", c.access).GetWithContext(&credentials.CredContext{})
		if v.AccessKeyID != c.want || (err == nil) != (c.want != "") {
			t.Errorf("%s: %q, %v; want %q", c.name, v.AccessKeyID, err, c.want)
		}
		if c.want == "" && (!errs.Is(err, errs.Permission) || errs.HintOf(err) == "") {
			t.Errorf("%s: %v (hint %q)", c.name, err, errs.HintOf(err))
		}
	}
}
