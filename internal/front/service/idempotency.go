package service

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"maps"
	"net/http"
	"net/url"
	"strings"
	"sync"

	"pando/internal/base/errs"
	"pando/internal/engine"
)

// Repeatable is part of the input of requests that make something.
type Repeatable struct {
	Key string `header:"Idempotency-Key" maxLength:"255" doc:"Name of the request: a repetition returns what it made"`
}

// runningKeys are the keys of requests under way in this process, each with what cancels it.
type runningKeys struct {
	mu   sync.Mutex
	keys map[string]context.CancelFunc
}

func newRunningKeys() *runningKeys { return &runningKeys{keys: map[string]context.CancelFunc{}} }

// begin reports whether a request with a key may run now. If so, the caller calls end.
func (r *runningKeys) begin(key string, cancel context.CancelFunc) (end func(), ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()

	if r.keys[key] != nil {
		return nil, false
	}
	r.keys[key] = cancel
	return func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		delete(r.keys, key)
	}, true
}

// cancel cancels the request with a key, if it is under way.
func (r *runningKeys) cancel(key string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if cancel := r.keys[key]; cancel != nil {
		cancel()
	}
}

// hashBytes is how much of a hash is kept with an object.
const hashBytes = 16

// requestOf identifies a request by who sends it, its key, and what it asks for. Callers cannot use the keys of others.
func requestOf(c Caller, key, what string, body any) (engine.Request, error) {
	b, err := json.Marshal(body) // maps in the order of their keys
	if err != nil {
		return engine.Request{}, errs.Wrap("read request", "", err)
	}
	hash := func(parts ...string) string {
		sum := sha256.Sum256([]byte(strings.Join(parts, "\x00")))
		return hex.EncodeToString(sum[:hashBytes])
	}
	return engine.Request{Key: hash(c.Identity(), key), Sum: hash(what, string(b))}, nil
}

// makeOnce calls make for a request, unless the request repeats one: then it returns what that has made, and repeated
// is true. what and body are what the request asks for. make gets a context with which the engine records the request.
func (s *Service) makeOnce(
	ctx context.Context, r Repeatable, what string, body any, make func(context.Context) ([]engine.Info, error),
) (made []engine.Info, repeated bool, err error) {
	if r.Key == "" {
		made, err = make(ctx)
		return made, false, err
	}

	q, err := requestOf(callerOf(ctx), r.Key, what, body)
	if err != nil {
		return nil, false, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	end, ok := s.running.begin(q.Key, cancel)
	if !ok {
		return nil, false, errs.New(errs.Conflict, what, "", "a request with this Idempotency-Key is still running").
			WithHint("repeat it later")
	}
	defer end()

	// What it has made already stays, even if it is canceled now.
	if made, err := s.madeBefore(context.WithoutCancel(ctx), q, what); err != nil || len(made) > 0 {
		return made, true, err
	}
	made, err = make(engine.WithRequest(ctx, q))
	if !errs.Is(err, errs.Exists) {
		return made, false, err
	}

	// Another process may have made it in the meantime.
	if before, ferr := s.madeBefore(context.WithoutCancel(ctx), q, what); ferr != nil || len(before) > 0 {
		return before, true, ferr
	}
	return nil, false, err
}

// madeBefore returns what a request has made. The error has status 422 if that request had asked for something else.
func (s *Service) madeBefore(ctx context.Context, q engine.Request, what string) ([]engine.Info, error) {
	before, made, err := s.e.MadeBy(ctx, q.Key)
	if err == nil && len(made) > 0 && before.Sum != q.Sum {
		return nil, otherRequest(what, made[0].Name)
	}
	return made, err
}

// otherRequest returns the error of a key that another request has used.
func otherRequest(what, made string) error {
	p := problemOf(errs.New(errs.Invalid, what, made,
		"this Idempotency-Key belongs to a request that asked for something else").
		WithHint("use a new key for each request"))
	return p.withStatus(http.StatusUnprocessableEntity)
}

// addRequestRoutes adds what is about requests themselves.
func (s *Service) addRequestRoutes() {
	add(s, route{id: "cancel-request", access: anyUser, method: "DELETE", path: "/v1/requests/{key}", tag: "operations",
		status:  http.StatusNoContent,
		summary: "Cancel a request of yours that makes something, by its Idempotency-Key",
		about: "The request undoes what it did and is answered with canceled, or with what it made if it was done already. " +
			"Without a request with this key that is running, this does nothing."},
		func(ctx context.Context, in *struct {
			Key string `path:"key" maxLength:"255"`
		}) (*noContent, error) {
			q, err := requestOf(callerOf(ctx), in.Key, "", nil)
			if err != nil {
				return nil, err
			}
			s.running.cancel(q.Key)
			return &noContent{}, nil
		})
}

// begunWork are the operations that requests with a key have begun, while they run.
type begunWork struct {
	mu    sync.Mutex
	byKey map[string]begunRequest
}

type begunRequest struct {
	w   *work
	sum string
}

// startOnce begins an operation for a request. While it runs, a repetition is answered with the same operation.
func (s *Service) startOnce(
	ctx context.Context, r Repeatable, what string, body any, start func() (*operationAnswer, error),
) (*operationAnswer, error) {
	if r.Key == "" {
		return start()
	}
	q, err := requestOf(callerOf(ctx), r.Key, what, body)
	if err != nil {
		return nil, err
	}

	s.begun.mu.Lock()
	defer s.begun.mu.Unlock()
	maps.DeleteFunc(s.begun.byKey, func(_ string, b begunRequest) bool { return b.w.ended() })
	if b, ok := s.begun.byKey[q.Key]; ok {
		if b.sum != q.Sum {
			return nil, otherRequest(what, b.w.op.Ref)
		}
		return operationAt(b.w), nil
	}

	answer, err := start()
	if err != nil {
		return nil, err
	}
	w, err := s.operations.find(answer.Body.ID, callerOf(ctx))
	if err != nil {
		return nil, err
	}
	s.begun.byKey[q.Key] = begunRequest{w, q.Sum}
	return answer, nil
}

// make answers a request that makes one object.
func (s *Service) make(
	ctx context.Context, r Repeatable, what string, body any, fn func(context.Context) ([]engine.Info, error),
) (*createdAnswer, error) {
	made, repeated, err := s.makeOnce(ctx, r, what, body, fn)
	if err != nil {
		return nil, err
	}

	out := &createdAnswer{Status: http.StatusCreated, ETag: etag(made[0]), Location: locationOf(made[0]),
		Body: Volume{made[0], warned(ctx)}}
	if repeated {
		out.Status = http.StatusOK
	}
	return out, nil
}

// locationOf returns the path of an object.
func locationOf(i engine.Info) string {
	name, at, snapshot := strings.Cut(i.Name, "@")
	switch {
	case i.Kind == "golden":
		return "/v1/goldens/" + url.PathEscape(i.Golden)
	case snapshot:
		return "/v1/volumes/" + url.PathEscape(name) + "/snapshots/" + url.PathEscape(at)
	}
	return "/v1/volumes/" + url.PathEscape(name)
}
