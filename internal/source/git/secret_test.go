package git

import (
	"strings"
	"testing"

	"pando/internal/base/errs"
)

// TestSecretsInURLs: a URL with a secret is refused, and not repeated. One that only names an account of ssh is not.
func TestSecretsInURLs(t *testing.T) {
	for url, refused := range map[string]bool{
		"https://SECRET@github.com/a/b.git":       true,
		"HTTP://user:SECRET@host/b.git":           true,
		"https://user:SEC%zzSECRET@host/b.git":    true,
		"https://host/b.git?private_token=SECRET": true,
		"ssh://git:SECRET@host/b.git":             true,
		"user:SECRET@host:b.git":                  true,
		"ssh://git@github.com/a/b.git":            false,
		"git@github.com:a/b.git":                  false,
		"https://host/a@b.git":                    false,
		"git@host:a@b/c.git":                      false,
		"file:///srv/b.git":                       false,
	} {
		err := Source{URL: url}.check()
		if errs.Is(err, errs.Invalid) != refused {
			t.Errorf("%s: %v", url, err)
		}
		if refused && (!strings.Contains(err.Error(), "credential") || strings.Contains(err.Error(), "SECRET")) {
			t.Errorf("%s: %v", url, err)
		}
		if text := Describe([]byte(`{"git":{"url":"` + url + `"}}`)); strings.Contains(text, "://SECRET") {
			t.Errorf("described as %s", text)
		}
	}
}
