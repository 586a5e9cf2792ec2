package service

import (
	"bytes"
	"context"
	"io"
	"net"
	"net/http"
	"time"

	"pando/internal/base/errs"
)

// webRoute is the name of requests of browsers in the metrics.
const webRoute = "web"

// Web is a page for browsers. It reaches the pool only through the API, in the name of the caller who asked for it: see
// Service.As.
type Web interface {
	http.Handler

	// Login returns a URL that gives one browser the rights of a caller, once, until expiresAt.
	Login(c Caller) (url string, expiresAt time.Time)
}

// SetWeb sets the page that listeners of ListenWeb serve. It must be called before Serve.
func (s *Service) SetWeb(w Web) { s.web = w }

// WebLogin is the answer to a request for the web page.
type WebLogin struct {
	URL       string    `json:"url" doc:"Signs one browser in, once, with the rights of the caller"`
	ExpiresAt time.Time `json:"expires_at"`
}

func (s *Service) addWebRoutes() {
	add(s, route{id: "open-web", access: anyUser, method: "POST", path: "/v1/web/logins", tag: "service",
		summary: "Get a URL of the web page that works once, with the rights of the caller"},
		func(ctx context.Context, _ *struct{}) (*struct{ Body WebLogin }, error) {
			if s.web == nil {
				return nil, errs.New(errs.Unsupported, "open web page", "", "this service has no web page").
					WithHint("start it with %s", errs.Run("serve", errs.Param("web")))
			}
			url, expiresAt := s.web.Login(callerOf(ctx))
			return &struct{ Body WebLogin }{WebLogin{url, expiresAt}}, nil
		})
}

// As returns the API as a caller sees it. Requests need no connection of their own; nothing else about them differs.
func (s *Service) As(c Caller) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if c.Token != "" && (s.Tokens == nil || !s.Tokens.has(c.Token)) {
			sendProblem(w, r, problemOf(permission("authenticate", "", "the token %s was revoked", c.Token).
				WithHint("ask for a new URL of the web page, with another token")))
			return
		}

		// The metrics count it as a request of a browser, not of a route.
		ctx := context.WithValue(withWords(r.Context(), r), callerKey{}, c)
		ctx = context.WithValue(context.WithValue(ctx, routeKey{}, new(string)), writerKey{}, w)
		s.handler.ServeHTTP(w, r.WithContext(ctx))
	})
}

// LocalCaller returns the caller that a process of this host with these credentials is.
func LocalCaller(uid, gid uint32, pid int) Caller {
	return Caller{Local: true, UID: uid, GID: gid, PID: int32(pid), Groups: []uint32{gid}}
}

// Closing is closed when the service begins to end.
func (s *Service) Closing() <-chan struct{} { return s.closing }

// webOnly serves the web page.
func (s *Service) webOnly() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		setRoute(r.Context(), webRoute)
		w = &deadlineWriter{ResponseWriter: w}
		if err := readBody(w, r); err != nil {
			http.Error(w, "the request cannot be read", http.StatusBadRequest)
			return
		}
		s.web.ServeHTTP(w, r)
	})
}

// readBody reads the body of a request before it is answered, within the limits of the API.
func readBody(w http.ResponseWriter, r *http.Request) error {
	if r.ContentLength == 0 {
		return nil
	}
	c := http.NewResponseController(w)
	_ = c.SetReadDeadline(time.Now().Add(bodyTimeout))
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBodyBytes))
	_ = c.SetReadDeadline(time.Time{}) // what follows takes as long as it takes
	r.Body = io.NopCloser(bytes.NewReader(body))
	return err
}

// ListenWeb listens on a loopback address for browsers, which come with a URL of Web.Login. Invalid, InUse, Permission.
func ListenWeb(address string) (*Listener, error) {
	tcp, loopback, err := openTCP(address, "web")
	if err != nil {
		return nil, err
	}
	if !loopback {
		_ = tcp.Close()
		return nil, errs.New(errs.Invalid, "serve", address, "the web page is for browsers of this host only").
			WithHint("listen on 127.0.0.1, and forward the port with `ssh -L %s:127.0.0.1:%s HOST`", portOf(tcp), portOf(tcp))
	}
	return &Listener{Listener: tcp, web: true}, nil
}

func portOf(l net.Listener) string {
	_, port, _ := net.SplitHostPort(l.Addr().String())
	return port
}
