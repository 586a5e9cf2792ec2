package service

import (
	"encoding/json"
	"net/http"
	"strconv"
	"strings"

	"pando/internal/base/errs"
)

// observedWriter notes the status of a response, and the kind of error that it tells of.
type observedWriter struct {
	http.ResponseWriter
	status  int
	kind    errs.Kind
	written bool
}

// WriteHeader notes the status.
func (w *observedWriter) WriteHeader(status int) {
	w.status = status
	w.ResponseWriter.WriteHeader(status)
}

// Write notes the kind of a problem, which is written at once.
func (w *observedWriter) Write(b []byte) (int, error) {
	if !w.written && w.status >= http.StatusBadRequest &&
		strings.HasPrefix(w.Header().Get("Content-Type"), (*Problem)(nil).ContentType("")) {
		w.kind = kindIn(b)
	}
	w.written = true
	return w.ResponseWriter.Write(b)
}

// Unwrap returns the writer below, for http.ResponseController.
func (w *observedWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// kindIn returns the kind of a problem.
func kindIn(problem []byte) errs.Kind {
	var p struct {
		Kind errs.Kind `json:"kind"`
	}
	if json.Unmarshal(problem, &p) != nil || p.Kind == "" {
		return errs.Internal
	}
	return p.Kind
}

// statusLabel returns the label of a status; of one that the standard does not know, only its class.
func statusLabel(status int) string {
	if statusText(status) == "" {
		return strconv.Itoa(status/100) + "xx"
	}
	return strconv.Itoa(status)
}
