package service

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/url"
	"reflect"
	"strconv"
	"strings"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/warnings"
	"pando/internal/driver"
	"pando/internal/engine"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"
)

// documentPath is where the OpenAPI document is.
const documentPath = "/v1/openapi.json"

// Limits of a request's body, except for those that are streams.
const maxBodyBytes = 1 << 20

// bodyTimeout limits how long a body that is not a stream may take to arrive. Tests use less.
var bodyTimeout = 30 * time.Second

// requestSuffix ends the names of the types of bodies that clients send. Unknown fields are refused in these only: a
// newer service may answer with more fields than a client knows.
const requestSuffix = "Request"

func (s *Service) newAPI(mux *http.ServeMux) huma.API {
	registry := huma.NewMapRegistry("#/components/schemas/", huma.DefaultSchemaNamer)
	registry.RegisterTypeAlias(reflect.TypeFor[driver.Labels](), reflect.TypeFor[map[string]string]())
	registry.RegisterTypeAlias(reflect.TypeFor[errs.Message](), reflect.TypeFor[string]())

	config := huma.Config{
		OpenAPI: &huma.OpenAPI{
			OpenAPI: "3.1.0",
			Info: &huma.Info{Title: "Pando", Version: "v1",
				Description: "Instant, disposable, copy-on-write volumes. Sizes are in bytes, durations in seconds, times in " +
					"RFC 3339. A field that is null, and a parameter that is empty, are like ones that are missing. Errors are " +
					"application/problem+json with the kind of the error and a hint."},
			Components: &huma.Components{Schemas: registry},
		},
		Formats:                      map[string]huma.Format{"application/json": jsonFormat, "json": jsonFormat},
		DefaultFormat:                "application/json",
		RejectUnknownQueryParameters: true,
		Transformers: []huma.Transformer{func(ctx huma.Context, _ string, v any) (any, error) {
			return s.redacted(ctx.Context(), errs.Rendered(v, wordsOf(ctx.Context())))
		}},
	}
	return humago.New(mux, config)
}

// jsonFormat writes JSON without the escapes of HTML.
var jsonFormat = huma.Format{
	Marshal: func(w io.Writer, v any) error {
		var b bytes.Buffer
		enc := json.NewEncoder(&b)
		enc.SetEscapeHTML(false)
		if err := enc.Encode(v); err != nil {
			return err
		}
		_, _ = w.Write(b.Bytes()) // an error means that the client went away: nobody is left to be told
		return nil
	},
	Unmarshal: json.Unmarshal,
}

// documentOf returns the OpenAPI document, after all routes were added.
func documentOf(api huma.API) ([]byte, error) {
	for name, schema := range api.OpenAPI().Components.Schemas.Map() {
		if !strings.HasSuffix(name, requestSuffix) && schema.AdditionalProperties == false {
			schema.AdditionalProperties = nil
		}
	}

	b, err := json.MarshalIndent(api.OpenAPI(), "", "  ")
	if err != nil {
		return nil, errs.Wrap("serve", documentPath, err)
	}
	return append(b, '\n'), nil
}

// serveDocument answers with the OpenAPI document, to all who may connect: it has no secrets.
func (s *Service) serveDocument(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/openapi+json")
	_, _ = w.Write(s.document) // a client that went away
}

// route is a method and path of the API.
type route struct {
	access  access
	id      string // of the operation, in the document, the history and in errors: clone-volume
	method  string
	path    string
	tag     string // resource
	summary string
	about   string // more than the summary says, in Markdown; may be ""
	status  int    // of success; 0: 200
	body    *huma.RequestBody
	answer  *huma.Response // of success; nil: by the type
}

func (r route) operation() huma.Operation {
	op := huma.Operation{
		OperationID: r.id, Method: r.method, Path: r.path, Summary: r.summary, Description: r.about, Tags: []string{r.tag},
		DefaultStatus: r.status, MaxBodyBytes: maxBodyBytes, BodyReadTimeout: bodyTimeout, RequestBody: r.body,
	}
	if r.answer != nil {
		op.Responses = map[string]*huma.Response{"200": r.answer, "default": problemResponse}
	}
	return op
}

// problemResponse describes errors.
var problemResponse = &huma.Response{
	Description: "Error",
	Content: map[string]*huma.MediaType{
		"application/problem+json": {Schema: &huma.Schema{Ref: "#/components/schemas/Problem"}},
	},
}

// add adds a route. fn is called in the name of the caller once authorize has allowed it.
func add[I, O any](s *Service, r route, fn func(context.Context, *I) (*O, error)) {
	if r.access == 0 {
		panic("route " + r.id + " does not say who may use it")
	}
	op := r.operation()
	op.Middlewares = huma.Middlewares{s.admit(r.access)}
	huma.Register(s.api, op, func(ctx context.Context, in *I) (*O, error) {
		out, err := fn(s.enter(ctx, r.id), in)
		if err != nil {
			return nil, problemOf(err)
		}
		return out, nil
	})
	if r.status == http.StatusCreated {
		documentRepetition(s.api.OpenAPI().Paths[r.path].Post)
	}
}

// documentRepetition describes what a request that makes something answers when it is repeated.
func documentRepetition(op *huma.Operation) {
	repeated := *op.Responses[strconv.Itoa(http.StatusCreated)]
	repeated.Description = "The request repeats one with the same Idempotency-Key, which has made this"
	op.Responses[strconv.Itoa(http.StatusOK)] = &repeated
}

// checkQuery refuses what huma passes over: a query that cannot be read, and a parameter that is there more than once
// though it is not a list, of which a proxy perhaps reads another one than huma.
func checkQuery(ctx huma.Context) error {
	u := ctx.URL()
	if u.RawQuery == "" {
		return nil
	}
	op := ctx.Operation()
	query, err := url.ParseQuery(u.RawQuery)
	if err != nil {
		return errs.New(errs.Invalid, op.OperationID, "", "the query cannot be read: %v", err).
			WithHint("escape the values of parameters")
	}

	for _, p := range op.Parameters {
		if p.In == "query" && p.Schema.Type != huma.TypeArray && len(query[p.Name]) > 1 {
			return errs.New(errs.Invalid, op.OperationID, "", "the parameter %s is there more than once", p.Name).
				WithHint("send it once")
		}
	}
	return nil
}

// enter returns the context of a call of the engine: it names the caller, and collects warnings.
func (s *Service) enter(ctx context.Context, id string) context.Context {
	keepReading(ctx)
	l := &warnings.List{}
	ctx = warnings.Collect(engine.ActAs(ctx, callerOf(ctx).actor(id)), l)
	return context.WithValue(ctx, warningsKey{}, l)
}

type warningsKey struct{}

// warned returns the warnings of a call so far.
func warned(ctx context.Context) []errs.Message {
	if l, ok := ctx.Value(warningsKey{}).(*warnings.List); ok {
		return l.Messages()
	}
	return nil
}
