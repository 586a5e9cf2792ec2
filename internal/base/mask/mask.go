// Package mask removes passwords and tokens from URLs, for texts that are printed or stored. Servers such as GitHub
// accept a token as the user name of a URL, so all of what precedes the host counts as secret, except with ssh, where
// it only names an account.
package mask

import (
	"net/url"
	"regexp"
	"strings"
	"sync"
)

// hidden replaces what is secret.
const hidden = "***"

// userPart matches a URL in a text up to its host: the scheme, and what precedes the host.
var userPart = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`([A-Za-z][A-Za-z0-9+.-]*)://([^\s/?#"'<>]*)@`)
})

// secretParameter matches a parameter of a URL whose name says that its value is secret.
var secretParameter = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`(?i)([?&;](?:[^=&;\s"']*(?:token|secret|passw|signature|credential|api[-_]?key|` +
		`access[-_]?key)[^=&;\s"']*|auth|key|pat|pwd|sig)=)[^&;#\s"'<>]*[^&;#\s"'<>:,.]`)
})

// Text returns a text in which the URLs have neither credentials nor secret parameters.
func Text(text string) string {
	if !strings.Contains(text, "://") && !strings.ContainsAny(text, "?&") {
		return text
	}

	text = userPart().ReplaceAllStringFunc(text, func(match string) string {
		scheme, user, _ := strings.Cut(strings.TrimSuffix(match, "@"), "://")
		return scheme + "://" + maskUser(scheme, user) + "@"
	})
	return secretParameter().ReplaceAllString(text, "${1}"+hidden)
}

// scpPassword matches USER:PASSWORD@HOST:PATH, which looks like the USER@HOST:PATH of ssh.
var scpPassword = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^([^/:@]*:)[^/]*(@[^/@]*:)`) })

// URL is Text for one URL, which need not be valid: everything up to the last "@" counts as its user part. It may also
// have the form USER@HOST:PATH.
func URL(raw string) string {
	if !strings.Contains(raw, "://") {
		return Text(scpPassword().ReplaceAllString(raw, "${1}"+hidden+"${2}"))
	}

	scheme, rest, is := strings.Cut(raw, "://")
	if at := strings.LastIndexByte(rest, '@'); is && at >= 0 && !validURL(raw) {
		raw = scheme + "://" + hidden + rest[at:]
	}
	return Text(raw)
}

// HasSecret reports whether a URL has credentials or a secret parameter. An ssh URL may name a user.
func HasSecret(raw string) bool { return URL(raw) != raw }

func validURL(raw string) bool {
	_, err := url.Parse(raw)
	return err == nil
}

// maskUser masks the user part of a URL. The user of ssh is an account, not a secret.
func maskUser(scheme, user string) string {
	name, _, password := strings.Cut(user, ":")
	switch ssh := strings.Contains(strings.ToLower(scheme), "ssh"); {
	case user == "":
		return ""
	case ssh && password:
		return name + ":" + hidden
	case ssh:
		return name
	}
	return hidden
}
