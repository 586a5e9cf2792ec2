package errs

import (
	"net/url"
	"regexp"
	"strings"
	"sync"
)

// masked is what stands for a secret.
const masked = "***"

// urls finds URLs in a text, and what follows them up to a space or quote.
var urls = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile("\\b([A-Za-z][A-Za-z0-9+.-]*)://[^\\s'\"`<>]+")
})

// secretParameter finds parameters of URLs that hold secrets, by their names.
var secretParameter = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`(?i)([?&;][^=&;]*(?:key|secret|token|passw|pwd|sig|cred|auth)[^=&;]*=)[^&;#]*`)
})

// scpPassword finds USER:PASSWORD@HOST:PATH, which looks like the USER@HOST:PATH of ssh. A reference such as v@s before
// a colon and a space is none.
var scpPassword = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile("(^|[\\s'\"`=(])([^\\s'\"`=(/:@]+):[^\\s'\"`/][^\\s'\"`]*@" +
		"([^\\s'\"`/:@]+|\\[[^\\s\\]]+\\]):(\\S)")
})

// MaskURLs returns a text in which passwords, tokens and other secrets in URLs are replaced by three asterisks. All of
// what stands before the host is one, as tokens are often used as user names; in ssh URLs and in the form
// USER@HOST:PATH, only a password is.
func MaskURLs(text string) string {
	if strings.Contains(text, "@") {
		text = scpPassword().ReplaceAllString(text, "${1}${2}:"+masked+"@${3}:${4}")
	}
	if !strings.Contains(text, "://") {
		return text
	}
	return urls().ReplaceAllStringFunc(text, func(u string) string {
		scheme, rest, _ := strings.Cut(u, "://")
		user, host := cutUser(rest)
		if name, _, has := strings.Cut(user, ":"); user != "" && (has || !strings.HasSuffix(scheme, "ssh")) {
			user = masked
			if strings.HasSuffix(scheme, "ssh") {
				user = name + ":" + masked
			}
		}
		if user != "" {
			user += "@"
		}
		return scheme + "://" + user + secretParameter().ReplaceAllString(MaskURLs(host), "${1}"+masked)
	})
}

// cutUser splits what follows the scheme of a URL before its host, without the @. A slash in a password, which should
// be escaped, does not end it: what stands before it would be no host.
func cutUser(rest string) (user, host string) {
	authority, _, _ := strings.Cut(rest, "/")
	at := strings.LastIndexByte(authority, '@')
	_, err := url.Parse("x://" + authority)
	if at < 0 && (err != nil || strings.HasSuffix(authority, ":")) {
		at = strings.LastIndexByte(rest, '@') // as in https://user:pass/word@host
	}
	if at < 0 {
		return "", rest
	}
	return rest[:at], rest[at+1:]
}
