package web

import (
	"io"
	"net/http"
	"sync"
)

// inProcess passes requests of the client to the API in this process.
type inProcess struct{ handler http.Handler }

// RoundTrip returns the response when its header is there. Its body ends when the handler returns.
func (t inProcess) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.RequestURI = r.URL.RequestURI()
	r.Header.Set("Pando-Words", "command-line") // hints are commands
	if r.Body == nil {
		r.Body = http.NoBody
	}

	body, pipe := io.Pipe()
	w := &pipeWriter{header: http.Header{}, pipe: pipe, begun: make(chan struct{})}
	go func() {
		var failed error = io.EOF
		defer func() {
			if p := recover(); p != nil {
				failed = io.ErrUnexpectedEOF // a body that is cut off
			}
			w.WriteHeader(http.StatusOK)
			_ = pipe.CloseWithError(failed)
		}()
		t.handler.ServeHTTP(w, r)
	}()

	select {
	case <-w.begun:
	case <-r.Context().Done():
		_ = body.CloseWithError(r.Context().Err())
		return nil, r.Context().Err()
	}
	return &http.Response{Status: http.StatusText(w.status), StatusCode: w.status, Header: w.sent, Body: body,
		Request: r, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1, ContentLength: -1}, nil
}

// pipeWriter is the response that a handler writes.
type pipeWriter struct {
	header, sent http.Header
	status       int
	pipe         *io.PipeWriter
	begun        chan struct{} // closed with the header
	once         sync.Once
}

// Header returns the header that WriteHeader sends.
func (w *pipeWriter) Header() http.Header { return w.header }

// WriteHeader sends the header.
func (w *pipeWriter) WriteHeader(status int) {
	w.once.Do(func() {
		w.status, w.sent = status, w.header.Clone()
		close(w.begun)
	})
}

// Write passes on a part of the body. It waits for its reader.
func (w *pipeWriter) Write(b []byte) (int, error) {
	w.WriteHeader(http.StatusOK)
	return w.pipe.Write(b)
}

// FlushError makes streams work: all that was written is passed on already.
func (w *pipeWriter) FlushError() error { return nil }
