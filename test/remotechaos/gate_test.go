//go:build linux && (amd64 || arm64)

package remotechaos

import (
	"fmt"
	"net/http"
	"strings"
	"sync"
	"time"

	"pando/internal/testing/servertest"
)

// moment is when a command is held: at the n-th request of a kind.
type moment struct {
	kind   string // "PUT heads", "LIST segments"
	nth    int    // from 1
	answer bool   // the server has done it, and its answer is late; else it hears of it late
}

// gate holds one request of a command. Methods may be called concurrently.
type gate struct {
	moment
	kill bool // then the command is killed

	reached chan struct{} // closed when the request is held
	release chan struct{} // closed when it may go on
	ended   chan struct{} // closed when what a host does with it has ended
	opening sync.Once

	mu      sync.Mutex
	seen    int       // requests of this kind so far
	commits int       // heads that the command wrote before
	held    time.Time // since when the request is; zero: it is not
	killed  func()
	proxy   *servertest.Proxy
}

func newGate(kind string, nth int, answer, kill bool) *gate {
	return &gate{
		moment: moment{kind, nth, answer}, kill: kill,
		reached: make(chan struct{}), release: make(chan struct{}), ended: make(chan struct{}),
	}
}

func (g *gate) String() string {
	what, end := "", ""
	if g.answer {
		what = "answer to "
	}
	if g.kill {
		end = ", then killed"
	}
	return fmt.Sprintf("%s%s %d held%s", what, g.kind, g.nth, end)
}

// kindOf says what a request is about: its method, or LIST, and the kind of the object.
func kindOf(r *http.Request) string {
	method, key := r.Method, strings.TrimPrefix(r.URL.Path, "/"+servertest.Bucket+"/chaos/")
	if list := r.URL.Query().Get("prefix"); list != "" {
		method, key = "LIST", strings.TrimPrefix(list, "chaos/")
	}
	return method + " " + prefix(key)
}

// begin waits for the request of a command that has been started, which kill kills.
func (g *gate) begin(proxy *servertest.Proxy, kill func()) {
	g.killed, g.proxy = kill, proxy
	f := &servertest.Fault{Times: 1, Match: g.match}
	if g.answer {
		f.After = g.hold
	} else {
		f.Before = g.hold
	}
	proxy.Add(f)
}

// match reports whether a request is the one to be held.
func (g *gate) match(r *http.Request) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	kind := kindOf(r)
	if kind == g.kind {
		if g.seen++; g.seen == g.nth {
			g.held = time.Now()
			return true
		}
	}
	if kind == "PUT heads" {
		g.commits++
	}
	return false
}

func (g *gate) hold() {
	close(g.reached)
	<-g.release
}

// open lets the request go on, or kills its command. Idempotent.
func (g *gate) open() {
	g.opening.Do(func() {
		if g.kill && g.isHeld() {
			g.killed()
		}
		close(g.release)
	})
}

// isHeld reports whether the request was made.
func (g *gate) isHeld() bool {
	select {
	case <-g.reached:
		return true
	default:
		return false
	}
}

// end is called when the command has ended.
func (g *gate) end() { g.proxy.Heal() }

// beforeCommit reports whether a command is held before it has written any head. Of nil: false.
func (g *gate) beforeCommit() bool {
	if g == nil {
		return false
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	return !g.held.IsZero() && g.commits == 0 && !(g.answer && g.kind == "PUT heads")
}
