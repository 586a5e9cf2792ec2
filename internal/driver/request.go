package driver

import "strings"

// Request identifies a request that makes objects: whoever repeats it finds what it has made. Both parts are hashes in
// hexadecimal digits, so that an identity does not show what a client sent.
type Request struct {
	Key string `json:"key"` // of what the client calls the request
	Sum string `json:"sum"` // of what it asked for
}

// IsZero reports whether there is no request.
func (r Request) IsZero() bool { return r == Request{} }

// String returns both parts for the catalogue, "" for the zero Request. StoredRequest reads it.
func (r Request) String() string {
	if r.IsZero() {
		return ""
	}
	return r.Key + " " + r.Sum
}

// StoredRequest returns the request of which String returned text.
func StoredRequest(text string) Request {
	key, sum, _ := strings.Cut(text, " ")
	return Request{key, sum}
}
