package service

import (
	"encoding/json"
	"errors"
	"net/http"

	"pando/internal/base/errs"
	"pando/internal/engine"

	"github.com/danielgtaylor/huma/v2"
)

// Problem is an error as clients see it: problem details of RFC 9457, with the fields of errs.Error.
type Problem struct {
	Type   string       `json:"type" doc:"URI of the kind of error: urn:pando:KIND" example:"urn:pando:not_found"`
	Title  string       `json:"title" doc:"Text of the status code"`
	Status int          `json:"status" doc:"HTTP status code"`
	Detail string       `json:"detail" doc:"What failed, and why"`
	Kind   string       `json:"kind" doc:"Kind of error, as in the JSON of commands"`
	Op     string       `json:"op,omitempty" doc:"Operation that failed"`
	Ref    string       `json:"ref,omitempty" doc:"Object of the operation"`
	Hint   errs.Message `json:"hint,omitempty" doc:"What to do next"`

	Errors []ProblemDetail `json:"errors,omitempty" doc:"Fields of the request that are invalid"`
}

// ProblemDetail is what is wrong with a field of a request.
type ProblemDetail struct {
	Location string `json:"location,omitempty" doc:"Field of the request, such as body.name"`
	Message  string `json:"message"`
}

// Error returns the detail.
func (p *Problem) Error() string { return p.Detail }

// GetStatus returns the status code.
func (p *Problem) GetStatus() int { return p.Status }

// ContentType returns the type of the body.
func (p *Problem) ContentType(string) string { return "application/problem+json" }

// withStatus gives the problem another status than that of its kind.
func (p *Problem) withStatus(status int) *Problem {
	p.Status, p.Title = status, statusText(status)
	return p
}

// in returns the problem in the words of a reader.
func (p *Problem) in(words errs.Renderer) *Problem {
	out := *p
	out.Hint = errs.Rendered(p.Hint, words).(errs.Message)
	return &out
}

// statusCanceled is the status of nginx for requests whose client went away. The standard has none.
const statusCanceled = 499

func statusText(status int) string {
	if status == statusCanceled {
		return "Canceled"
	}
	return http.StatusText(status)
}

// problemOf returns the problem that describes an error.
func problemOf(err error) *Problem {
	var p *Problem
	if errors.As(err, &p) {
		return p
	}

	kind := errs.KindOf(err)
	p = &Problem{Type: "urn:pando:" + string(kind), Detail: err.Error(), Kind: string(kind),
		Hint: errs.HintIn(err)}
	var e *errs.Error
	if errors.As(err, &e) {
		p.Op, p.Ref = e.Op, e.Ref
	}
	if errors.Is(err, engine.ErrChanged) {
		return p.withStatus(http.StatusPreconditionFailed)
	}
	return p.withStatus(kind.Codes().HTTP)
}

// kindsOf are the kinds of problems that huma finds in requests, by status.
var kindsOf = map[int]errs.Kind{
	http.StatusRequestTimeout: errs.Canceled, http.StatusInternalServerError: errs.Internal,
	http.StatusUnsupportedMediaType: errs.Unsupported, http.StatusNotAcceptable: errs.Unsupported,
}

func init() {
	// Of the whole program: huma has one function for all APIs.
	huma.NewError = func(status int, message string, details ...error) huma.StatusError {
		return invalidRequest(status, message, details)
	}
}

// invalidRequest returns the problem of a request that huma refuses.
func invalidRequest(status int, message string, details []error) *Problem {
	if message == "cannot read request body" || status == http.StatusUnprocessableEntity {
		status = http.StatusBadRequest // a client that went away, or a field that is invalid
	}

	kind, ok := kindsOf[status]
	if !ok {
		kind = errs.Invalid
	}
	p := &Problem{Type: "urn:pando:" + string(kind), Kind: string(kind), Detail: message,
		Hint: "GET " + documentPath + " describes all requests"}
	if status == http.StatusUnsupportedMediaType {
		p.Hint = "send the header Content-Type: application/json"
	}
	for _, d := range details {
		var detail *huma.ErrorDetail
		switch {
		case d == nil:
		case errors.As(d, &detail):
			p.Errors = append(p.Errors, ProblemDetail{detail.Location, detail.Message})
		default:
			p.Errors = append(p.Errors, ProblemDetail{"", d.Error()})
		}
	}
	if len(p.Errors) > 0 {
		p.Detail += ": " + p.Errors[0].Location + ": " + p.Errors[0].Message
	}
	return p.withStatus(status)
}

// writeProblem answers a request that huma handles with a problem.
func writeProblem(_ huma.API, ctx huma.Context, p *Problem) {
	ctx.SetHeader("Content-Type", p.ContentType(""))
	ctx.SetStatus(p.Status)
	_ = json.NewEncoder(ctx.BodyWriter()).Encode(p.in(wordsOf(ctx.Context()))) // a client that went away
}

// sendProblem answers a request with a problem.
func sendProblem(w http.ResponseWriter, r *http.Request, p *Problem) {
	if p.Status == http.StatusUnauthorized {
		w.Header().Set("WWW-Authenticate", "Bearer")
	}
	w.Header().Set("Content-Type", p.ContentType(""))
	w.WriteHeader(p.Status)
	_ = json.NewEncoder(w).Encode(p.in(wordsOf(withWords(r.Context(), r)))) // a client that went away
}

// problemsOf answers requests that the mux has no route for with problems in place of text.
func problemsOf(mux *http.ServeMux) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h, pattern := mux.Handler(r)
		if pattern != "" {
			mux.ServeHTTP(w, r)
			return
		}

		refusal := &statusOnly{header: http.Header{}}
		h.ServeHTTP(refusal, r)
		switch refusal.status {
		case http.StatusMethodNotAllowed:
			w.Header().Set("Allow", refusal.header.Get("Allow"))
			p := problemOf(errs.New(errs.Unsupported, r.Method, r.URL.Path, "this path has no such method").
				WithHint("use one of: %s", refusal.header.Get("Allow")))
			sendProblem(w, r, p.withStatus(refusal.status))
		default:
			sendProblem(w, r, problemOf(errs.New(errs.NotFound, r.Method, r.URL.Path, "no such path").
				WithHint("GET %s describes all paths", documentPath)))
		}
	})
}

// statusOnly keeps the status and header of a response.
type statusOnly struct {
	header http.Header
	status int
}

func (s *statusOnly) Header() http.Header         { return s.header }
func (s *statusOnly) WriteHeader(status int)      { s.status = status }
func (s *statusOnly) Write(b []byte) (int, error) { return len(b), nil }
