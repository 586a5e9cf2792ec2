package service

import (
	"context"
	"net/http"
	"time"
)

// accepted is the status of answers with an operation that runs.
const accepted = http.StatusAccepted

// operationAnswer is the answer with an operation.
type operationAnswer struct {
	Location string `header:"Location"`
	Body     Operation
}

func operationAt(w *work) *operationAnswer {
	op := w.describe()
	return &operationAnswer{"/v1/operations/" + op.ID, op}
}

// OperationList lists operations.
type OperationList struct {
	Items []Operation `json:"items" nullable:"false"`
}

// InOperation names an operation in the path of a request.
type InOperation struct {
	ID string `path:"id"`
}

func (s *Service) addOperationRoutes() {
	add(s, route{id: "list-operations", access: anyUser, method: "GET", path: "/v1/operations", tag: "operations",
		summary: "List operations that run or have ended, the newest first",
		about: "They are kept in memory: after a restart of the service there are none. What they were doing is then " +
			"undone or finished as after a command that was killed. Results are left out."},
		func(ctx context.Context, _ *struct{}) (*struct{ Body OperationList }, error) {
			out := &struct{ Body OperationList }{OperationList{[]Operation{}}}
			for _, w := range s.operations.list(callerOf(ctx)) {
				op := w.describe()
				op.Result = nil
				out.Body.Items = append(out.Body.Items, op)
			}
			return out, nil
		})

	add(s, route{id: "show-operation", access: anyUser, method: "GET", path: "/v1/operations/{id}", tag: "operations",
		summary: "Show an operation"},
		func(ctx context.Context, in *InOperation) (*operationAnswer, error) {
			w, err := s.operations.find(in.ID, callerOf(ctx))
			if err != nil {
				return nil, err
			}
			return operationAt(w), nil
		})

	add(s, route{id: "wait-operation", access: anyUser, method: "GET", path: "/v1/operations/{id}/wait", tag: "operations",
		summary: "Wait for the end of an operation",
		about:   "Answers with the operation when it ends, or as it is after the timeout."}, s.waitOperation)

	add(s, route{id: "cancel-operation", access: anyUser, method: "DELETE", path: "/v1/operations/{id}", tag: "operations",
		status: accepted, summary: "Cancel an operation",
		about: "It undoes what it did, and ends as canceled. One that has ended stays as it is."},
		func(ctx context.Context, in *InOperation) (*operationAnswer, error) {
			w, err := s.operations.find(in.ID, callerOf(ctx))
			if err != nil {
				return nil, err
			}
			w.cancel()
			return operationAt(w), nil
		})
}

func (s *Service) waitOperation(ctx context.Context, in *struct {
	InOperation
	Timeout float64 `query:"timeout_seconds" minimum:"0" maximum:"300" default:"30"`
}) (*operationAnswer, error) {
	w, err := s.operations.find(in.ID, callerOf(ctx))
	if err != nil {
		return nil, err
	}

	timeout := time.NewTimer(min(seconds(in.Timeout), waitAtMost))
	defer timeout.Stop()
	select {
	case <-w.done:
	case <-timeout.C:
	case <-s.closing:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	return operationAt(w), nil
}
