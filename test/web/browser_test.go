package web

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"pando/internal/testing/servertest"
)

// browser is a headless Chromium: see test/browser.
type browser struct {
	t   *testing.T
	in  *json.Encoder
	out *json.Decoder
}

// evil is the name of a host that the browser finds here, as the one of an attacker would be.
const evil = "evil.test"

// shared is the browser of all tests: it takes seconds to start.
var shared struct {
	*browser
	end func() error
}

// newBrowser returns the browser as it is after its start, without cookies.
func newBrowser(t *testing.T) *browser {
	t.Helper()
	if shared.browser == nil {
		startBrowser(t)
	}
	b := shared.browser
	b.t = t
	b.do("fresh", true)
	b.do("script", true)
	b.do("dark", false)
	b.do("size", []int{1280, 800})
	b.open("about:blank")
	b.do("requests", true)
	t.Cleanup(func() {
		b.t = t
		b.open("about:blank") // its streams end before the service does
	})
	return b
}

// restartedBrowser returns a browser that has shown nothing yet.
func restartedBrowser(t *testing.T) *browser {
	t.Helper()
	if shared.browser != nil {
		must(t, shared.end())
		shared.browser = nil
	}
	return newBrowser(t)
}

func startBrowser(t *testing.T) {
	t.Helper()
	if _, err := exec.LookPath("chromium"); err != nil {
		t.Skip("SKIPPED: there is no chromium: run make deps")
	}
	driver := servertest.Tool(t, "browser", "browser")
	home, err := os.MkdirTemp("", "browser-")
	must(t, err)
	cmd := exec.Command(driver, filepath.Join(home, "profile"), evil+"=127.0.0.1")
	cmd.Env = append(os.Environ(), "HOME="+home, "TMPDIR="+home, "DBUS_SESSION_BUS_ADDRESS=/dev/null")
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	must(t, err)
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())

	b := &browser{t: t, in: json.NewEncoder(in), out: json.NewDecoder(out)}
	shared.end = func() error {
		_ = in.Close()
		_, _ = io.Copy(io.Discard, out)
		return errors.Join(cmd.Wait(), os.RemoveAll(home))
	}
	if b.read() != "ready" {
		t.Fatal("the browser does not start")
	}
	shared.browser = b
}

// do sends a command, and returns its value.
func (b *browser) do(name string, value any) any {
	b.t.Helper()
	must(b.t, b.in.Encode(map[string]any{name: value}))
	return b.read()
}

func (b *browser) read() any {
	b.t.Helper()
	var a struct {
		Value any
		Error string
	}
	must(b.t, b.out.Decode(&a))
	if a.Error != "" {
		b.t.Fatalf("the browser: %s", a.Error)
	}
	return a.Value
}

func (b *browser) open(url string)    { b.t.Helper(); b.do("open", url) }
func (b *browser) click(css string)   { b.t.Helper(); b.do("click", css) }
func (b *browser) keys(text string)   { b.t.Helper(); b.do("keys", text) }
func (b *browser) eval(js string) any { b.t.Helper(); return b.do("eval", js) }

// text returns the text of the page.
func (b *browser) text() string { b.t.Helper(); return fmt.Sprint(b.eval("document.body.innerText")) }

// patience is how long tests wait for what should be there at once.
const patience = 20 * time.Second

// until waits until an expression is true, and returns how long that took.
func (b *browser) until(js string) time.Duration {
	b.t.Helper()
	begun := time.Now()
	for time.Since(begun) < patience {
		if b.eval("!!("+js+")") == true {
			return time.Since(begun)
		}
		time.Sleep(20 * time.Millisecond) // the page tells nobody
	}
	b.t.Fatalf("it never became true: %s\n%s\n%s", js, b.eval("location.href"), b.text())
	return 0
}

// says waits until the page has a text.
func (b *browser) says(text string) {
	b.t.Helper()
	b.until(fmt.Sprintf("document.body && document.body.innerText.includes(%q)", text))
}

// checkQuiet checks that the browser asked for nothing but this origin since the last time, and complained about
// nothing.
func (b *browser) checkQuiet(origin string, allowed ...string) {
	b.t.Helper()
	all := b.do("requests", true).(map[string]any)
	requests, _ := all["requests"].([]any)
	for _, r := range requests {
		if url := r.(string); !strings.HasPrefix(url, origin+"/") {
			b.t.Errorf("it asked for %s", url)
		}
	}
	problems, _ := all["problems"].([]any)
next:
	for _, p := range problems {
		for _, a := range allowed {
			if strings.Contains(p.(string), a) {
				continue next
			}
		}
		b.t.Errorf("the console: %s", p)
	}
}
