// Package web is the web page of the service: rendered by the server, live, and usable without script. It reaches the
// pool only through the API, in the name of the user who asked for the page: what the API refuses to that user, the
// page neither shows nor does.
//
// A request passes these steps: guard refuses what does not come from this page in a browser that was signed in,
// session finds who it is, and a view asks the API and renders a template.
package web

import (
	"bytes"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"errors"
	"html/template"
	"net/http"
	"net/url"
	"path"
	"strings"
	"sync"

	"pando/client"
	"pando/internal/front/service"
)

// API is the service whose pool the page shows.
type API interface {
	As(service.Caller) http.Handler // the API as a caller sees it
	Closing() <-chan struct{}       // closed when the service begins to end
}

// Options are what a page needs besides the API.
type Options struct {
	Address string                           // HOST:PORT of its listener, for URLs
	Log     func(format string, args ...any) // gets what belongs to no request; safe for concurrent use
}

// Web is the page. It implements service.Web.
type Web struct {
	Options
	api      API
	mux      *http.ServeMux
	sessions sessions
}

//go:embed templates static
var files embed.FS

// New returns the page of a service.
func New(api API, o Options) *Web {
	w := &Web{Options: o, api: api, mux: http.NewServeMux()}
	w.sessions.log = o.Log

	w.mux.HandleFunc("GET /static/{file}", serveStatic)
	w.mux.HandleFunc("GET /open/{token}", w.open)
	w.view("GET /{$}", w.overview)
	w.view("GET /volumes", w.volumes)
	w.view("GET /volumes/{name}", w.volume)
	w.view("GET /goldens/{name}", w.golden)
	w.view("GET /lineage", w.lineage)
	w.view("GET /operations", w.operationsView)
	w.view("GET /activity", w.activity)
	w.signedIn("GET /live", w.live)
	w.signedIn("GET /volumes/{name}/io", w.io)
	w.signedIn("POST /do", w.do)
	w.signedIn("POST /leave", w.leave)
	return w
}

// ServeHTTP answers a request of a browser.
func (w *Web) ServeHTTP(out http.ResponseWriter, r *http.Request) {
	setHeaders(out.Header())
	if status, why := w.guard(r); status != 0 {
		w.refuse(out, r, status, why)
		return
	}
	w.mux.ServeHTTP(out, r)
}

// visit is a request of a browser that is signed in.
type visit struct {
	*http.Request
	session *session
	c       *client.Client // the API, with the rights of the session
	who     *client.Service
}

// signedIn adds a route for browsers that are signed in.
func (w *Web) signedIn(pattern string, fn func(http.ResponseWriter, *visit) error) {
	w.mux.HandleFunc(pattern, func(out http.ResponseWriter, r *http.Request) {
		s := w.sessions.of(r)
		if s == nil {
			w.refuse(out, r, http.StatusUnauthorized, "This browser is not signed in, or its session has ended.")
			return
		}
		c, err := client.New(client.Options{Transport: inProcess{w.api.As(s.caller)}})
		v := &visit{Request: r, session: s, c: c}
		if err == nil {
			v.who, err = c.Service(r.Context())
		}
		if err == nil {
			err = fn(out, v)
		}
		if err != nil {
			w.fail(out, v, err)
		}
	})
}

// page is what all views have.
type page struct {
	Title, Here string // Here is the path of the entry of the navigation
	Back        string // where forms return to: this page with its filter
	Who         *client.Service
	Notes       []note // what came of the last action
	View        any
}

// view adds a view: fn asks the API, and its template has the name that it returns.
func (w *Web) view(pattern string, fn func(*visit) (name, title string, view any, err error)) {
	w.signedIn(pattern, func(out http.ResponseWriter, v *visit) error {
		name, title, view, err := fn(v)
		if err != nil {
			return err
		}
		return w.render(out, v, http.StatusOK, name, title, view)
	})
}

// render writes a page. It is complete before the first byte is sent.
func (w *Web) render(out http.ResponseWriter, v *visit, status int, name, title string, view any) error {
	p := page{Title: title, Here: v.URL.Path, Who: v.who, View: view, Back: withoutNote(v.URL)}
	if v.session != nil {
		p.Notes = v.session.notesOf(v.URL.Query().Get("note"))
	}
	var b bytes.Buffer
	if err := templates().pages[name].ExecuteTemplate(&b, "page", p); err != nil {
		return err
	}
	out.Header().Set("Content-Type", "text/html; charset=utf-8")
	out.WriteHeader(status)
	_, _ = out.Write(b.Bytes()) // a browser that went away
	return nil
}

// problem is what the page says about an error.
type problem struct {
	Status       int
	Detail, Hint string
}

// problemOf describes an error of the API, or of this package.
func problemOf(err error) problem {
	var e *client.Error
	if errors.As(err, &e) {
		return problem{e.Status, e.Detail, e.Hint}
	}
	return problem{http.StatusInternalServerError, err.Error(), ""}
}

// fail answers with an error.
func (w *Web) fail(out http.ResponseWriter, v *visit, err error) {
	p := problemOf(err)
	if err := w.render(out, v, p.Status, "problem", http.StatusText(p.Status), p); err != nil {
		http.Error(out, p.Detail, p.Status)
	}
}

// withoutNote returns the address of a page without the result of the last action.
func withoutNote(u *url.URL) string {
	q := u.Query()
	q.Del("note")
	if len(q) == 0 {
		return u.Path
	}
	return u.Path + "?" + q.Encode()
}

// templates are parsed at the first request: the command line does not wait for them.
var templates = sync.OnceValue(func() (out struct {
	pages map[string]*template.Template
}) {
	common := template.Must(template.New("").Funcs(functions).ParseFS(files, "templates/layout.html",
		"templates/parts.html"))
	names, err := files.ReadDir("templates")
	if err != nil {
		panic(err) // they are part of the program
	}

	out.pages = map[string]*template.Template{}
	for _, n := range names {
		name := strings.TrimSuffix(n.Name(), ".html")
		if name == "layout" || name == "parts" {
			continue
		}
		out.pages[name] = template.Must(template.Must(common.Clone()).ParseFS(files, "templates/"+n.Name()))
	}
	return out
})

// staticVersions has, for each static file, a value that changes with its content: browsers may keep it for ever.
var staticVersions = sync.OnceValue(func() map[string]string {
	out := map[string]string{}
	names, _ := files.ReadDir("static")
	for _, n := range names {
		b, _ := files.ReadFile("static/" + n.Name())
		sum := sha256.Sum256(b)
		out[n.Name()] = hex.EncodeToString(sum[:6])
	}
	return out
})

var staticTypes = map[string]string{".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}

func serveStatic(out http.ResponseWriter, r *http.Request) {
	name := r.PathValue("file")
	b, err := files.ReadFile("static/" + name)
	if err != nil {
		http.NotFound(out, r)
		return
	}
	out.Header().Set("Content-Type", staticTypes[path.Ext(name)]+"; charset=utf-8")
	out.Header().Set("Cache-Control", "max-age=31536000, immutable")
	_, _ = out.Write(b)
}
