package web

import (
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"pando/client"
)

// TestAttacks tries in a real browser, which is signed in, what pages of others could do to it.
func TestAttacks(t *testing.T) {
	s := newPool(t)
	s.withVolumes()
	s.serve()
	b := newBrowser(t)
	origin := s.signIn(b)
	host := strings.TrimPrefix(origin, "http://")

	// The attacker has a server on this host, which browsers find by another name, and knows even the name of the
	// session, which is secret.
	var cookies []string
	attacker := attackerOf(t, origin, &cookies)

	t.Run("another site", func(t *testing.T) {
		b.t = t
		b.open("http://" + evil + ":" + attacker + "/post")
		b.says("Forbidden")
		b.open("http://" + evil + ":" + attacker + "/")
		for _, how := range []string{`{mode: 'no-cors', credentials: 'include'}`, `{mode: 'cors', credentials: 'include'}`,
			`{mode: 'no-cors', credentials: 'include', method: 'POST', body: 'action=unmount&ref=orders'}`} {
			got := b.eval(fmt.Sprintf(`fetch(%q, %s).then((r) => r.type + r.status, () => 'failed')`, origin+"/do", how))
			if got != "failed" && got != "opaque0" {
				t.Errorf("%s: %v", how, got)
			}
		}
		framed := b.eval(fmt.Sprintf(`new Promise((done) => {
			const f = document.createElement('iframe');
			f.onload = () => { try { done(f.contentDocument ? 'readable' : 'not readable') } catch { done('not readable') } };
			f.src = %q; document.body.append(f) })`, origin+"/"))
		if framed != "not readable" {
			t.Errorf("a frame is %v", framed)
		}
		script := b.eval(fmt.Sprintf(`new Promise((done) => { const e = document.createElement('script');
			e.onload = () => done('loaded'); e.onerror = () => done('refused'); e.src = %q; document.body.append(e) })`,
			origin+"/static/pando.js"))
		if script != "refused" {
			t.Errorf("a script was %v", script)
		}
	})

	t.Run("another port", func(t *testing.T) {
		b.t = t
		b.open("http://localhost:" + attacker + "/")
		b.open(fmt.Sprintf("http://%s/post", strings.Replace(host, s.port, attacker, 1))) // same site, other origin
		b.says("Forbidden")

		// Only who knows the secret name of the session gets its cookie, which is for all ports of a host.
		b.open("http://localhost:" + attacker + "/")
		b.open("http://pando-0000.localhost:" + attacker + "/")
		for _, c := range cookies {
			if strings.HasPrefix(c, "localhost") || strings.HasPrefix(c, evil) || strings.HasPrefix(c, "pando-0000") {
				t.Errorf("the attacker got a cookie: %s", c)
			}
		}
	})

	t.Run("rebinding", func(t *testing.T) {
		b.t = t
		for _, name := range []string{evil, "localhost", "127.0.0.1", "pando-0000.localhost"} {
			b.open("http://" + name + ":" + s.port + "/")
			b.says("Misdirected Request")
			if got := b.eval("fetch('/volumes').then((r) => r.status)"); got != 421.0 {
				t.Errorf("%s: %v", name, got)
			}
		}
	})

	t.Run("stolen URL", func(t *testing.T) { b.t = t; s.testStolen(b) })

	b.t = t
	v, err := s.c.Volume(t.Context(), "orders")
	if err != nil || v.State != "mounted" {
		t.Errorf("an attack had success: %+v, %v", v, err)
	}
}

// attackerOf serves pages that send requests to origin, and returns the port. It notes the cookies that it gets, each
// after the host.
func attackerOf(t *testing.T, origin string, cookies *[]string) string {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		for _, c := range r.Cookies() {
			*cookies = append(*cookies, r.Host+" "+c.String())
		}
		w.Header().Set("Content-Type", "text/html")
		if r.URL.Path == "/post" {
			fmt.Fprintf(w, `<form method=post action="%s/do"><input name=action value=unmount><input name=ref value=orders>
				</form><script>document.forms[0].submit()</script>`, origin)
			return
		}
		fmt.Fprint(w, "<p>nothing to see")
	}))
	t.Cleanup(server.Close)
	_, port, err := net.SplitHostPort(strings.TrimPrefix(server.URL, "http://"))
	must(t, err)
	return port
}

// testStolen: a URL works once. Its second use ends what the first has begun, as one of the two was not by its user.
func (s *site) testStolen(b *browser) {
	t := b.t
	url := s.login()
	origin := url[:strings.Index(url, "/open/")]
	thief := func() int {
		r, err := http.NewRequest(http.MethodGet, strings.Replace(url, origin, "http://127.0.0.1:"+s.port, 1), nil)
		must(t, err)
		r.Host = strings.TrimPrefix(origin, "http://")
		resp, err := http.DefaultClient.Do(r)
		must(t, err)
		defer resp.Body.Close()
		return resp.StatusCode
	}

	// The user is first, and the thief ends the session, and gets nothing.
	b.open(url)
	b.until(`document.querySelector('#facts')`)
	if status := thief(); status != http.StatusForbidden {
		t.Errorf("the thief got %d", status)
	}
	b.open(origin + "/")
	b.says("Misdirected Request")

	// The thief is first: the user sees that, and the thief's session has ended.
	url = s.login()
	origin = url[:strings.Index(url, "/open/")]
	if status := thief(); status != http.StatusOK {
		t.Errorf("the first use: %d", status)
	}
	b.open(url)
	b.says("This URL has been used, or is too old.")
	b.open(origin + "/")
	b.says("Misdirected Request")
	if _, err := s.c.Service(t.Context()); client.IsKind(err, client.Internal) {
		t.Error(err)
	}
}
