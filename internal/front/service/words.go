package service

import (
	"context"
	"net/http"
	"strings"

	"pando/internal/base/errs"
)

// httpWords renders messages as requests and fields of this API.
type httpWords struct{}

// wordsHeader is the header of requests that says in whose words hints and warnings shall be: wordsOfCommandLine, or
// those of this API.
const wordsHeader = "Pando-Words"

// wordsOfCommandLine asks for the words of the command line, which uses this API for its users.
const wordsOfCommandLine = "command-line"

type wordsKey struct{}

// withWords returns the context of a request with these headers.
func withWords(ctx context.Context, r *http.Request) context.Context {
	if r.Header.Get(wordsHeader) != wordsOfCommandLine {
		return ctx
	}
	return context.WithValue(ctx, wordsKey{}, errs.CommandLine{})
}

// wordsOf returns the words in which the caller of a request reads messages.
func wordsOf(ctx context.Context) errs.Renderer {
	if r, ok := ctx.Value(wordsKey{}).(errs.Renderer); ok {
		return r
	}
	return httpWords{}
}

// requests are the operations that are requests here. {} stands for an argument in order; what is left of them is not
// part of the request.
var requests = map[string]string{
	"clone":          "POST /v1/volumes",
	"destroy":        "DELETE /v1/volumes/{}",
	"diff":           "GET /v1/diff",
	"doctor":         "POST /v1/doctor",
	"export":         "GET /v1/exports/{}",
	"flatten":        "POST /v1/volumes/{}/flatten",
	"fork":           "POST /v1/volumes/{}/fork",
	"fsck":           "POST /v1/fsck",
	"gc":             "POST /v1/gc",
	"golden import":  "POST /v1/goldens/{}/import",
	"golden ls":      "GET /v1/goldens",
	"golden publish": "POST /v1/goldens/{}/publish",
	"golden rm":      "DELETE /v1/goldens/{}",
	"golden set":     "PATCH /v1/goldens/{}",
	"golden show":    "GET /v1/goldens/{}",
	"history":        "GET /v1/history",
	"label ls":       "GET /v1/labels/{}",
	"label rm":       "PATCH /v1/labels/{}",
	"ls":             "GET /v1/volumes",
	"mount":          "POST /v1/volumes/{}/mount",
	"prune":          "POST /v1/prune",
	"pull":           "POST /v1/remotes/{}/pull",
	"push":           "POST /v1/remotes/{}/push",
	"rebase":         "POST /v1/volumes/{}/rebase",
	"remote ls":      "GET /v1/remotes",
	"rename":         "POST /v1/rename",
	"rewind":         "POST /v1/volumes/{}/rewind",
	"show":           "GET /v1/volumes/{}",
	"snapshot":       "POST /v1/volumes/{}/snapshots",
	"umount":         "POST /v1/volumes/{}/unmount",
	"unpin":          "DELETE /v1/pins/{}",
	"verify":         "POST /v1/remotes/{}/verify",
}

// fields are the parameters that have another name here, or another meaning than the field with their name.
var fields = map[string]string{
	"keep-free": "keep_free_percent", "older-than": "older_than_seconds", "idle": "idle_seconds", "size": "size_bytes",
	"label": "labels", "no-freeze": "freeze", "accept-rollback": "accept_rollback", "take-over": "take_over",
}

// values are the values of parameters that are flags on the command line.
var values = map[string]string{"no-freeze": `"never"`, "freeze": `"always"`}

// Operation is a request; what the service cannot do is a command for its host.
func (h httpWords) Operation(o errs.Operation) string {
	request, ok := requests[o.Name]
	if !ok {
		return h.command(o)
	}

	var with []string
	for _, a := range o.Args {
		switch a := a.(type) {
		case errs.Text:
			request = strings.Replace(request, "{}", string(a), 1)
		case errs.Parameter:
			with = append(with, h.Parameter(a))
		}
	}
	request = strings.NewReplacer("{}", "NAME").Replace(request)
	if len(with) > 0 {
		request += " with " + strings.Join(with, " and ")
	}
	return request
}

// command is an operation that only the command line has.
func (httpWords) command(o errs.Operation) string {
	words := []string{"pando", o.Name}
	for _, a := range o.Args {
		switch a := a.(type) {
		case errs.Text:
			words = append(words, string(a))
		case errs.Parameter:
			words = append(words, strings.TrimSpace("--"+a.Name+" "+a.Value))
		}
	}
	return "`" + strings.Join(words, " ") + "` on the host of the service"
}

// Parameter is a field, and its value if the message gives one.
func (httpWords) Parameter(p errs.Parameter) string {
	name, ok := fields[p.Name]
	if !ok {
		name = strings.ReplaceAll(p.Name, "-", "_")
	}
	value, ok := values[p.Name]
	if !ok {
		value = p.Value
	}
	if value == "" {
		return "the field " + name
	}
	return "the field " + name + " set to " + value
}

// Variable is a variable of the environment of the service.
func (httpWords) Variable(v errs.Variable) string {
	return "the variable " + string(v) + " of the service"
}
