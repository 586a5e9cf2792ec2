package web

import (
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"pando/internal/front/service"
)

// Limits of sessions. Tests use others.
var (
	loginFor     = time.Minute    // how long a URL of Login works
	sessionFor   = 12 * time.Hour // how long a browser stays signed in, at most
	sessionIdle  = 2 * time.Hour  // and without a request
	mostSessions = 1000
	mostOfCaller = 20 // sessions and logins of one caller; the oldest give way
)

// cookieName is the name of the cookie that holds the secret of a session.
const cookieName = "pando_session"

// hostSuffix ends the names of hosts of sessions. Browsers resolve them to the loopback address without asking anybody.
const hostSuffix = ".localhost"

// session is a browser that is or may be signed in. Each has a host name of its own: cookies do not tell ports apart,
// so other servers on localhost would otherwise get the cookie.
type session struct {
	host    string // random, and needed to reach the session at all
	caller  service.Caller
	by      string // caller, for limits
	token   [sha256.Size]byte
	secret  [sha256.Size]byte // of the cookie
	used    bool              // the token
	begunAt time.Time
	seenAt  time.Time

	mu    sync.Mutex
	notes map[string][]note // what came of actions, by number
	order []string          // of notes
}

// sessions are all sessions. They are kept in memory only: a restart signs everybody out.
type sessions struct {
	log    func(format string, args ...any)
	mu     sync.Mutex
	byHost map[string]*session
}

// randomText returns n random bytes as text.
func randomText(n int) string {
	b := make([]byte, n)
	_, _ = rand.Read(b) // never fails
	return hex.EncodeToString(b)
}

// Login returns a URL that signs one browser in. See service.Web.
func (w *Web) Login(c service.Caller) (url string, expiresAt time.Time) {
	_, port, _ := net.SplitHostPort(w.Address)
	token := randomText(32)
	now := time.Now()
	s := &session{host: "pando-" + randomText(10), caller: c, by: c.Identity(), token: sha256.Sum256([]byte(token)),
		begunAt: now, seenAt: now, notes: map[string][]note{}}
	w.sessions.add(s)
	return "http://" + s.host + hostSuffix + ":" + port + "/open/" + token, now.Add(loginFor)
}

// add adds a session, in place of the oldest if there are too many.
func (all *sessions) add(s *session) {
	all.mu.Lock()
	defer all.mu.Unlock()
	if all.byHost == nil {
		all.byHost = map[string]*session{}
	}
	all.forgetOld()

	own := func(o *session) bool { return o.by == s.by }
	for all.count(own) >= mostOfCaller {
		all.dropOldest(own)
	}
	any := func(*session) bool { return true }
	for len(all.byHost) >= mostSessions {
		all.dropOldest(any)
	}
	all.byHost[s.host] = s
}

func (all *sessions) count(is func(*session) bool) (n int) {
	for _, s := range all.byHost {
		if is(s) {
			n++
		}
	}
	return n
}

func (all *sessions) dropOldest(is func(*session) bool) {
	var oldest *session
	for _, s := range all.byHost {
		if is(s) && (oldest == nil || s.seenAt.Before(oldest.seenAt)) {
			oldest = s
		}
	}
	if oldest != nil {
		delete(all.byHost, oldest.host)
	}
}

// forgetOld forgets sessions that have ended. The mutex is held.
func (all *sessions) forgetOld() {
	for host, s := range all.byHost {
		if s.ended(time.Now()) {
			delete(all.byHost, host)
		}
	}
}

// ended reports whether a session, or the URL that would begin it, is too old.
func (s *session) ended(now time.Time) bool {
	if !s.used {
		return now.Sub(s.begunAt) > loginFor
	}
	return now.Sub(s.begunAt) > sessionFor || now.Sub(s.seenAt) > sessionIdle
}

// hostOf returns the name of the session that a request addresses; "" for other hosts. The port does not matter: it may
// have been forwarded.
func hostOf(r *http.Request) string {
	host := r.Host
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	name, ok := strings.CutSuffix(strings.ToLower(host), hostSuffix)
	if !ok {
		return ""
	}
	return name
}

// at returns the session that a request addresses, whoever sends it; nil: none.
func (all *sessions) at(r *http.Request) *session {
	all.mu.Lock()
	defer all.mu.Unlock()
	s := all.byHost[hostOf(r)]
	if s == nil || s.ended(time.Now()) {
		return nil
	}
	return s
}

// of returns the session of the browser that sends a request; nil: it is not signed in.
func (all *sessions) of(r *http.Request) *session {
	s := all.at(r)
	cookie, err := r.Cookie(cookieName)
	if s == nil || err != nil {
		return nil
	}

	all.mu.Lock()
	defer all.mu.Unlock()
	sum := sha256.Sum256([]byte(cookie.Value))
	if !s.used || subtle.ConstantTimeCompare(sum[:], s.secret[:]) != 1 {
		return nil
	}
	s.seenAt = time.Now()
	return s
}

// begin uses the token of a login. Whoever uses it again ends the session: one of the two is not its user.
func (all *sessions) begin(r *http.Request, token string) (secret string, ok bool) {
	s := all.at(r)
	sum := sha256.Sum256([]byte(token))
	if s == nil || subtle.ConstantTimeCompare(sum[:], s.token[:]) != 1 {
		return "", false
	}

	all.mu.Lock()
	defer all.mu.Unlock()
	if s.used {
		delete(all.byHost, s.host)
		all.log("a URL of the web page was used twice: ended the session of %s", s.caller)
		return "", false
	}
	secret = randomText(32)
	s.used, s.secret, s.begunAt, s.seenAt = true, sha256.Sum256([]byte(secret)), time.Now(), time.Now()
	return secret, true
}

// end signs a browser out.
func (all *sessions) end(s *session) {
	all.mu.Lock()
	defer all.mu.Unlock()
	delete(all.byHost, s.host)
}

// open signs a browser in.
func (w *Web) open(out http.ResponseWriter, r *http.Request) {
	if w.sessions.of(r) != nil { // the same browser again
		http.Redirect(out, r, "/", http.StatusSeeOther)
		return
	}
	if r.Method != http.MethodGet || r.Header.Get("Sec-Purpose") != "" {
		w.refuse(out, r, http.StatusServiceUnavailable, "This URL works once, and is not for looking ahead.")
		return
	}

	secret, ok := w.sessions.begin(r, r.PathValue("token"))
	if !ok {
		w.refuse(out, r, http.StatusForbidden, "This URL has been used, or is too old.")
		return
	}
	http.SetCookie(out, &http.Cookie{Name: cookieName, Value: secret, Path: "/", HttpOnly: true,
		SameSite: http.SameSiteStrictMode})

	// A redirect would be part of the navigation that led here, perhaps from another site, and have no cookie.
	out.Header().Set("Content-Type", "text/html; charset=utf-8")
	_ = templates().pages["opened"].ExecuteTemplate(out, "bare", page{Title: "Signed in"}) // a browser that went away
}

// leave signs a browser out on request.
func (w *Web) leave(out http.ResponseWriter, v *visit) error {
	w.sessions.end(v.session)
	http.SetCookie(out, &http.Cookie{Name: cookieName, Path: "/", MaxAge: -1, HttpOnly: true,
		SameSite: http.SameSiteStrictMode})
	w.refuse(out, v.Request, http.StatusOK, "This browser is signed out.")
	return nil
}

// mostNotes limits the results of actions that a session remembers.
const mostNotes = 20

// addNotes remembers what came of an action, and returns its number.
func (s *session) addNotes(notes []note) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	number := randomText(4)
	s.notes[number] = notes
	if s.order = append(s.order, number); len(s.order) > mostNotes {
		delete(s.notes, s.order[0])
		s.order = s.order[1:]
	}
	return number
}

// notesOf returns what came of an action.
func (s *session) notesOf(number string) []note {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.notes[number]
}
