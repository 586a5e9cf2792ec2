package web

import (
	"net/http"
	"net/url"
	"path"
	"strings"

	"pando/client"
)

// mostRefs limits the objects of one action.
const mostRefs = 1000

// note is what came of an action on one object.
type note struct {
	Ref, Text, Hint string
	Failed          bool
}

// confirmation is what an action would do.
type confirmation struct {
	Action    action
	Refs      []string
	Form      url.Values // all fields of the form
	Details   []*client.Details
	Exclusive int64 // bytes that only these objects have
	Problem   *problem
}

// detailsShown limits how many objects a confirmation asks for.
const detailsShown = 50

// do does an action, and returns to the page that it was asked for on.
func (w *Web) do(out http.ResponseWriter, v *visit) error {
	if err := v.ParseForm(); err != nil {
		return invalid("the form cannot be read", "go back, and try again")
	}
	a, known := actionNamed(v.PostForm.Get("action"))
	refs := v.PostForm["ref"]
	switch {
	case !known:
		return invalid("this is not an action", "go back, and choose one of the page")
	case len(refs) == 0:
		return invalid("nothing is selected", "go back, and select what to "+strings.ToLower(a.Title))
	case strings.ContainsAny(strings.Join(refs, ""), "*?["):
		return invalid("only names can be selected", "filter the list, and select what it shows")
	case len(refs) > mostRefs:
		return invalid("too much is selected at once", "select fewer objects")
	}
	if a.Danger && v.PostForm.Get("confirmed") != "yes" {
		return w.confirm(out, v, a, refs)
	}

	number := v.session.addNotes(v.perform(a, refs))
	to := backIn(v.PostForm.Get("back"), v.PostForm.Get("action"))
	q := to.Query()
	q.Set("note", number)
	q.Del("select")
	to.RawQuery = q.Encode()
	http.Redirect(out, v.Request, to.String(), http.StatusSeeOther)
	return nil
}

// perform does an action to each object. One that fails does not keep the others from being done.
func (v *visit) perform(a action, refs []string) (out []note) {
	form := v.PostForm
	if len(refs) > 1 {
		form = url.Values{} // each has a name, a key and so on of its own
	}
	if a.Name == "destroy" && len(refs) > 1 {
		return v.destroyMany(refs)
	}
	for _, ref := range refs {
		text, err := a.do(v.Context(), v.c, ref, form)
		n := note{Ref: ref, Text: text}
		if err != nil {
			p := problemOf(err)
			n = note{Ref: ref, Text: p.Detail, Hint: p.Hint, Failed: true}
		}
		out = append(out, n)
	}
	return out
}

// destroyMany destroys volumes with one request, which commits them together.
func (v *visit) destroyMany(refs []string) (out []note) {
	report, err := v.c.DestroyMany(v.Context(), refs, nil)
	if err != nil {
		p := problemOf(err)
		return []note{{Text: p.Detail, Hint: p.Hint, Failed: true}}
	}
	for _, f := range report.Failed {
		out = append(out, note{Ref: f.Ref, Text: f.Detail, Hint: f.Hint, Failed: true})
	}
	for _, d := range report.Destroyed {
		n := note{Ref: d.Ref, Text: "destroyed"}
		if d.HeldBy != "" {
			n.Text += "; its space is held by " + d.HeldBy
		}
		out = append(out, n)
	}
	return out
}

// confirm shows what an action would destroy.
func (w *Web) confirm(out http.ResponseWriter, v *visit, a action, refs []string) error {
	c := confirmation{Action: a, Refs: refs, Form: v.PostForm}
	for _, ref := range refs[:min(len(refs), detailsShown)] {
		d, err := ask[client.Details](v, client.Path("objects", ref), nil)
		if err != nil {
			p := problemOf(err)
			c.Problem = &p
			break
		}
		c.Details = append(c.Details, &d)
		c.Exclusive += d.ExclusiveBytes
	}
	return w.render(out, v, http.StatusOK, "confirm", a.Title, c)
}

// Back returns where the form came from.
func (c confirmation) Back() string { return backIn(c.Form.Get("back"), "").String() }

// backIn returns where an action returns to: a page of this service, and nowhere else. The view of an object that the
// action has removed is no more.
func backIn(text, action string) *url.URL {
	u, err := url.Parse(text)
	if err != nil || u.Scheme != "" || u.Host != "" || u.Opaque != "" || !strings.HasPrefix(u.Path, "/") ||
		strings.HasPrefix(u.Path, "//") || strings.Contains(u.Path, `\`) {
		return &url.URL{Path: "/"}
	}
	out := &url.URL{Path: path.Clean(u.Path), RawQuery: u.RawQuery}
	switch {
	case action == "destroy" && strings.HasPrefix(out.Path, "/volumes/"), action == "rename" && out.Path != "/volumes":
		out = &url.URL{Path: "/volumes"}
	case action == "remove-golden":
		out = &url.URL{Path: "/lineage"}
	}
	return out
}
