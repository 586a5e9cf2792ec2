package web

import (
	"net/http"
	"net/url"
	"strings"
)

// policy allows a page what is in this program, and nothing else: no inline script or style, no other host.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; " +
	"form-action 'self'; base-uri 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; " +
	"trusted-types pando"

func setHeaders(h http.Header) {
	h.Set("Content-Security-Policy", policy)
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("X-Frame-Options", "DENY")
	h.Set("Referrer-Policy", "same-origin") // no-referrer would also hide the origin of our own forms
	h.Set("Cross-Origin-Opener-Policy", "same-origin")
	h.Set("Cross-Origin-Resource-Policy", "same-origin")
	h.Set("Permissions-Policy", "camera=(), geolocation=(), microphone=()")
	h.Set("Cache-Control", "no-store")
}

// guard returns a status if a request must not be answered, and why. The cookie of a session is no proof that its user
// wanted the request: a page of another site may have made the browser send it.
func (w *Web) guard(r *http.Request) (status int, why string) {
	// A name that leads here by DNS is not ours: a page with that name would be of our origin (DNS rebinding). Style and
	// script are no secret, and the answer to such a request uses them.
	public := strings.HasPrefix(r.URL.Path, "/static/")
	if !public && w.sessions.at(r) == nil {
		return http.StatusMisdirectedRequest, "This address belongs to no session, or its session has ended."
	}

	site := r.Header.Get("Sec-Fetch-Site")
	reads := r.Method == http.MethodGet || r.Method == http.MethodHead
	if reads {
		opens := r.Header.Get("Sec-Fetch-Mode") == "navigate" && r.Header.Get("Sec-Fetch-Dest") == "document"
		if site != "" && site != "same-origin" && site != "none" && !opens {
			return http.StatusForbidden, "Another site sent this request."
		}
		return 0, ""
	}

	// Browsers send the origin with everything that changes something; nobody else has a cookie.
	if site != "same-origin" && site != "" || !isOwnOrigin(r) {
		return http.StatusForbidden, "Another site sent this request."
	}
	return 0, ""
}

// isOwnOrigin reports whether a request says that a page of this host sent it.
func isOwnOrigin(r *http.Request) bool {
	u, err := url.Parse(r.Header.Get("Origin"))
	return err == nil && u.Scheme == "http" && u.Host != "" && strings.EqualFold(u.Host, r.Host)
}

// refuse answers a request of a browser that is not signed in.
func (w *Web) refuse(out http.ResponseWriter, r *http.Request, status int, why string) {
	out.Header().Set("Content-Type", "text/html; charset=utf-8")
	out.WriteHeader(status)
	if r.Method != http.MethodHead {
		p := page{Title: http.StatusText(status), View: why}
		_ = templates().pages["refused"].ExecuteTemplate(out, "bare", p) // a browser that went away
	}
}
