package web_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/http/cookiejar"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/driver/plain"
	"pando/internal/engine"
	"pando/internal/front/policy"
	"pando/internal/front/service"
	"pando/internal/front/web"
	"pando/internal/remote/replicate"
)

var drivers = engine.Drivers{plain.Name: plain.Open}

func must(t testing.TB, all ...error) {
	t.Helper()
	if err := errors.Join(all...); err != nil {
		t.Fatal(err)
	}
}

// site is a service with a page, in this process.
type site struct {
	*web.Web
	t       *testing.T
	e       *engine.Engine
	service *service.Service
	address string

	mu  sync.Mutex
	log []string
}

// serve serves a pool with the goldens web and secret until the end of the test.
func serve(t *testing.T) *site {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "pool")
	_, err := engine.Init(t.Context(), engine.InitRequest{Dir: dir, Driver: plain.Name}, drivers)
	must(t, err)
	e, err := engine.Open(context.Background(), dir, drivers)
	must(t, err)
	s := &site{t: t, e: e}
	s.service, err = service.New(e, service.Options{Version: "test", Drivers: drivers, Grace: 5 * time.Second, Log: s.note,
		Access: func() (replicate.Access, error) { return replicate.Access{}, nil }})
	must(t, err)

	l, err := service.ListenWeb("127.0.0.1:0")
	must(t, err)
	s.address = l.Addr().String()
	s.Web = web.New(s.service, web.Options{Address: s.address, Log: s.note})
	s.service.SetWeb(s.Web)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error)
	go func() { ended <- s.service.Serve(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		must(t, <-ended)
		e.Close()
	})

	for _, name := range []string{"web", "secret"} {
		source := filepath.Join(t.TempDir(), name)
		must(t, os.Mkdir(source, 0o755), os.WriteFile(filepath.Join(source, "file"), []byte(name), 0o644))
		_, err := e.Import(t.Context(), engine.ImportRequest{Name: ref.MustName(name), Source: source})
		must(t, err)
	}
	return s
}

func (s *site) note(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.log = append(s.log, fmt.Sprintf(format, args...))
}

// clone makes a volume of a user; uid 0: of root.
func (s *site) clone(from, name string, uid uint32, labels map[string]string) {
	s.t.Helper()
	l, err := driver.NewLabels("test", labels)
	must(s.t, err)
	q := engine.CloneRequest{From: ref.Ref{Name: from}, Name: ref.MustName(name), Labels: l}
	if uid != 0 {
		q.Owner = driver.Owner{UID: uid, GID: uid}
	}
	_, err = s.e.Clone(s.t.Context(), q)
	must(s.t, err)
}

// visitor is a browser: it keeps cookies for the host of its session, and sends what browsers send.
type visitor struct {
	t    *testing.T
	c    *http.Client
	base string
	url  string // that signed it in
}

// visitor returns a browser that has the URL of a caller.
func (s *site) visitor(c service.Caller) *visitor {
	s.t.Helper()
	address, _ := s.Login(c)
	u, err := url.Parse(address)
	must(s.t, err)
	jar, err := cookiejar.New(nil)
	must(s.t, err)
	transport := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "tcp", s.address)
	}}
	s.t.Cleanup(transport.CloseIdleConnections)
	return &visitor{t: s.t, c: &http.Client{Transport: transport, Jar: jar, Timeout: time.Minute},
		base: u.Scheme + "://" + u.Host, url: address}
}

// signedIn returns a browser that has used its URL.
func (s *site) signedIn(c service.Caller) *visitor {
	s.t.Helper()
	v := s.visitor(c)
	if status, _ := v.get(strings.TrimPrefix(v.url, v.base)); status != http.StatusOK {
		s.t.Fatalf("signing in: %d", status)
	}
	return v
}

// send sends a request with headers, given as NAME: VALUE; Host is one of them.
func (v *visitor) send(method, path, body string, headers ...string) (int, http.Header, string) {
	v.t.Helper()
	r, err := http.NewRequest(method, v.base+path, strings.NewReader(body))
	must(v.t, err)
	if method == http.MethodPost {
		r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	}
	for _, h := range headers {
		name, value, _ := strings.Cut(h, ": ")
		if r.Header.Set(name, value); name == "Host" {
			r.Host = value
		}
	}
	resp, err := v.c.Do(r)
	must(v.t, err)
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	must(v.t, err)
	return resp.StatusCode, resp.Header, string(b)
}

func (v *visitor) get(path string, headers ...string) (int, string) {
	v.t.Helper()
	status, _, body := v.send(http.MethodGet, path, "", headers...)
	return status, body
}

// post sends a form as the page does.
func (v *visitor) post(path, form string, headers ...string) (int, string) {
	v.t.Helper()
	status, _, body := v.send(http.MethodPost, path, form, append([]string{"Origin: " + v.base,
		"Sec-Fetch-Site: same-origin"}, headers...)...)
	return status, body
}

var root = service.LocalCaller(0, 0, 1)

// views are all views.
var views = []string{"/", "/volumes", "/volumes/job", "/goldens/web", "/lineage?open=web,web%401,job", "/operations",
	"/activity"}

// TestLogin: a URL works once, for the host that it names, and for a minute.
func TestLogin(t *testing.T) {
	s := serve(t)
	v := s.visitor(root)
	token := strings.TrimPrefix(v.url, v.base)
	if status, _ := v.get("/"); status != http.StatusUnauthorized {
		t.Errorf("before it was used: %d", status)
	}
	if status, _ := v.get(token, "Sec-Purpose: prefetch"); status != http.StatusServiceUnavailable {
		t.Errorf("a browser that looks ahead: %d", status)
	}
	if status, _, _ := v.send(http.MethodHead, token, ""); status == http.StatusOK {
		t.Errorf("a request for the header: %d", status)
	}
	if status, _ := v.get("/open/" + strings.Repeat("0", 64)); status != http.StatusForbidden {
		t.Errorf("another token: %d", status)
	}
	status, header, _ := v.send(http.MethodGet, token, "")
	cookie := header.Get("Set-Cookie")
	if status != http.StatusOK || !strings.Contains(cookie, "SameSite=Strict") || !strings.Contains(cookie, "HttpOnly") ||
		strings.Contains(cookie, "Domain") {
		t.Errorf("%d, cookie %q", status, cookie)
	}
	if status, _ := v.get("/"); status != http.StatusOK {
		t.Errorf("signed in: %d", status)
	}
	if status, _ := v.get(token); status != http.StatusOK { // a redirect to the page
		t.Errorf("the same browser again: %d", status)
	}

	// Another session's cookie is of no use at this one's host.
	other := s.signedIn(root)
	u, err := url.Parse(other.base)
	must(t, err)
	stolen := other.c.Jar.Cookies(u)[0].String()
	third := s.visitor(root)
	if status, _ := third.get("/", "Cookie: "+stolen); status != http.StatusUnauthorized {
		t.Errorf("the cookie of another session: %d", status)
	}

	// Signing out ends it.
	if _, body := v.post("/leave", ""); !strings.Contains(body, "signed out") {
		t.Errorf("signing out: %s", body)
	}
	if status, _ := v.get("/"); status != http.StatusMisdirectedRequest {
		t.Errorf("signed out: %d", status)
	}
}

// TestStolenToken: the second use of a URL ends the session that the first began, whoever came first.
func TestStolenToken(t *testing.T) {
	s := serve(t)
	user := s.signedIn(root)
	thief := &visitor{t: t, c: &http.Client{Transport: user.c.Transport}, base: user.base}
	if status, body := thief.get(strings.TrimPrefix(user.url, user.base)); status != http.StatusForbidden ||
		!strings.Contains(body, "has been used") {
		t.Errorf("the thief: %d %s", status, body)
	}
	if status, _ := user.get("/"); status != http.StatusMisdirectedRequest {
		t.Errorf("the user afterwards: %d", status)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.log) != 1 || !strings.Contains(s.log[0], "used twice") || strings.Contains(s.log[0], user.url) {
		t.Errorf("log: %q", s.log)
	}
}

// TestOtherSites: requests that a page of another site made, or that reach the service by a name of the attacker's, are
// refused, though they have the cookie.
func TestOtherSites(t *testing.T) {
	s := serve(t)
	s.clone("web", "job", 0, nil)
	v := s.signedIn(root)
	host := strings.TrimPrefix(v.base, "http://")
	form := "action=pin&ref=job"
	for name, headers := range map[string][]string{
		"no origin":         {"Origin: "},
		"another origin":    {"Origin: http://evil.test"},
		"null":              {"Origin: null"},
		"another port":      {"Origin: http://" + strings.Split(host, ":")[0] + ":1"},
		"another scheme":    {"Origin: https://" + host},
		"cross-site":        {"Sec-Fetch-Site: cross-site"},
		"same-site":         {"Sec-Fetch-Site: same-site"},
		"rebinding":         {"Host: evil.test", "Origin: http://evil.test"},
		"loopback":          {"Host: " + s.address, "Origin: http://" + s.address},
		"localhost":         {"Host: localhost:1", "Origin: http://localhost:1"},
		"suffix":            {"Host: " + strings.Split(host, ".")[0] + ".localhost.evil.test"},
		"another session's": {"Host: pando-00000000000000000000.localhost"},
	} {
		if status, body := v.post("/do", form, headers...); status != 403 && status != 421 {
			t.Errorf("%s: %d %s", name, status, body)
		}
	}
	for name, headers := range map[string][]string{
		"a script of another site": {"Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: no-cors", "Sec-Fetch-Dest: script"},
		"a frame of another site":  {"Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: navigate", "Sec-Fetch-Dest: iframe"},
		"a neighbour's request":    {"Sec-Fetch-Site: same-site", "Sec-Fetch-Mode: cors", "Sec-Fetch-Dest: empty"},
		"rebinding":                {"Host: evil.test"},
	} {
		for _, path := range append(views, "/live", "/volumes/job/io") {
			if status, _ := v.get(path, headers...); status != 403 && status != 421 {
				t.Errorf("%s: %s: %d", name, path, status)
			}
		}
	}

	job, err := s.e.Show(t.Context(), ref.Ref{Name: "job"})
	if err != nil || job.PinnedUntil != nil {
		t.Errorf("it was pinned: %+v, %v", job.PinnedUntil, err)
	}
	if status, _ := v.post("/do", form); status != http.StatusOK {
		t.Errorf("the page's own form: %d", status)
	}
	if job, err = s.e.Show(t.Context(), ref.Ref{Name: "job"}); err != nil || job.PinnedUntil == nil {
		t.Errorf("it was not pinned: %v", err)
	}
}

// TestScriptInWords: what people write is text, wherever it is shown.
func TestScriptInWords(t *testing.T) {
	s := serve(t)
	const bad = `"><script>alert(1)</script><img src=x onerror=alert(1)>{{.}}`
	s.clone("web", "job", 0, map[string]string{"note": bad})
	v := s.signedIn(root)
	escaped := url.QueryEscape(bad)
	for _, path := range append(views, "/volumes?name="+escaped+"&golden="+escaped+"&label="+escaped+"&after="+escaped,
		"/activity?ref="+escaped, "/lineage?golden="+escaped+"&open="+escaped, "/volumes/"+url.PathEscape(bad),
		"/goldens/"+url.PathEscape(bad), "/volumes?state="+escaped, "/volumes?select="+escaped, "/?note="+escaped) {
		_, header, body := v.send(http.MethodGet, path, "")
		if strings.Contains(body, "<script>") || strings.Contains(body, "<img") {
			t.Errorf("%s: %s", path, body)
		}
		if p := header.Get("Content-Security-Policy"); !strings.Contains(p, "default-src 'none'") ||
			strings.Contains(p, "unsafe") || strings.Contains(p, "*") {
			t.Errorf("%s: policy %q", path, p)
		}
	}
	for _, form := range []string{"action=rename&ref=job&name=" + escaped, "action=destroy&ref=" + escaped,
		"action=clone&ref=job&name=" + escaped, "action=" + escaped + "&ref=job", "action=label&ref=job&set=" + escaped} {
		if _, body := v.post("/do", form); strings.Contains(body, "<script>") || strings.Contains(body, "<img") {
			t.Errorf("%s: %s", form, body)
		}
	}
}

const rules = `
[[rule]]
users = ["*"]
goldens = ["web"]
max_volumes = 5
mounts = []
`

// TestRights: a user sees and does what the API allows that user, and no more.
func TestRights(t *testing.T) {
	s := serve(t)
	const alice, bob = 64_711, 64_721
	s.clone("web", "job", alice, nil)
	s.clone("web", "bobs", bob, map[string]string{"team": "bobs-team"})
	s.clone("secret", "roots", 0, nil)
	file := filepath.Join(t.TempDir(), "policy.toml")
	must(t, os.WriteFile(file, []byte(rules), 0o600))
	p, err := policy.Read(file)
	must(t, err)
	s.service.SetPolicy(p)

	v := s.signedIn(service.LocalCaller(alice, alice, 1))
	hidden := []string{"bobs", "secret", "roots", "bobs-team"}
	for _, path := range append(views, "/volumes/bobs", "/volumes/roots", "/goldens/secret", "/lineage?golden=secret",
		"/activity?ref=bobs", "/activity?limit=5000", "/volumes?golden=secret", "/lineage?open=secret,secret%401,roots") {
		status, body := v.get(path)
		asked := strings.NewReplacer("/volumes/bobs", "", "/volumes/roots", "", "/goldens/secret", "")
		for _, name := range hidden {
			// The page repeats what it was asked for, and nothing else.
			if strings.Contains(asked.Replace(path), name) || status == http.StatusNotFound {
				continue
			}
			if strings.Contains(body, name) {
				t.Errorf("%s shows %s: %s", path, name, body)
			}
		}
	}
	for path, want := range map[string]int{"/": 200, "/volumes/job": 200, "/volumes/bobs": 404, "/volumes/roots": 404,
		"/goldens/web": 200, "/goldens/secret": 404, "/volumes/bobs/io": 404} {
		if status, _ := v.get(path); status != want {
			t.Errorf("%s: %d, wanted %d", path, status, want)
		}
	}

	// Reasons are given before the API refuses, and it refuses in any case.
	for path, reason := range map[string]string{"/goldens/web": "Only root can do this.",
		"/operations": "Only root can do this.", "/": "Only root can do this."} {
		if _, body := v.get(path); !strings.Contains(body, reason) {
			t.Errorf("%s: no reason", path)
		}
	}
	for _, form := range []string{"action=destroy&ref=bobs&confirmed=yes", "action=pin&ref=roots", "action=gc&ref=",
		"action=remove-golden&ref=web&confirmed=yes", "action=clone&ref=secret&name=mine", "action=label&ref=web&set=a%3Db",
		"action=destroy&ref=bobs&ref=roots&confirmed=yes"} {
		if _, body := v.post("/do", form); !strings.Contains(body, `<li class="bad">`) {
			t.Errorf("%s: it was not refused: %s", form, body)
		}
	}
	if _, body := v.post("/do", "action=clone&ref=web&name=mine"); !strings.Contains(body, "cloned as mine") {
		t.Errorf("an own clone: %s", body)
	}
	mine, err := s.e.Show(t.Context(), ref.Ref{Name: "mine"})
	if err != nil || mine.Owner == nil || mine.Owner.UID != alice {
		t.Errorf("the clone belongs to %+v, %v", mine.Owner, err)
	}

	// A policy that no longer names the user holds from the next request.
	s.service.SetPolicy(nil)
	if status, body := v.get("/"); status != http.StatusForbidden || strings.Contains(body, "job") {
		t.Errorf("without rights: %d %s", status, body)
	}
}

// TestBack: an action returns to the page, and never to another host.
func TestBack(t *testing.T) {
	s := serve(t)
	s.clone("web", "job", 0, nil)
	v := s.signedIn(root)
	v.c.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	for back, want := range map[string]string{"/volumes?name=j": "/volumes?name=j&note=", "//evil.test/": "/?note=",
		"http://evil.test/": "/?note=", `/\evil.test`: "/?note=", "evil": "/?note=", "": "/?note=",
		"/volumes/../../x": "/x?note=", "javascript:alert(1)": "/?note=", "/%2f/evil.test": "/?note="} {
		_, header, _ := v.send(http.MethodPost, "/do", url.Values{"action": {"pin"}, "ref": {"job"}, "back": {back}}.Encode(),
			"Origin: "+v.base)
		if to := header.Get("Location"); !strings.HasPrefix(to, want) {
			t.Errorf("%q: %q, wanted %q", back, to, want)
		}
	}
}

// TestFiles: all that a browser gets of this program is small, and has nothing inline and nothing from elsewhere.
func TestFiles(t *testing.T) {
	inline := regexp.MustCompile(`(?i)<script(>| [^s])|<style|\bstyle=|\bon[a-z]+=|javascript:|<iframe|<object`)
	elsewhere := regexp.MustCompile(`https?://|//[a-z]+\.`)
	total := int64(0)
	must(t, filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || strings.HasSuffix(path, ".go") {
			return err
		}
		b, err := os.ReadFile(path)
		must(t, err)
		if strings.HasPrefix(path, "static/") {
			total += int64(len(b))
		}
		text := strings.ReplaceAll(string(b), "http://www.w3.org/2000/svg", "")
		if found := elsewhere.FindString(text); found != "" {
			t.Errorf("%s has %q", path, found)
		}
		if found := inline.FindString(text); found != "" && strings.HasSuffix(path, ".html") {
			t.Errorf("%s has %q", path, found)
		}
		return nil
	}))
	t.Logf("script and style have %d bytes", total)
	if total == 0 || total > 150<<10 {
		t.Errorf("script and style have %d bytes", total)
	}
}
