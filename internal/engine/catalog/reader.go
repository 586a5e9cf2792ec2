package catalog

import (
	"fmt"
	"net/url"
	"sync"
)

// reader is a second connection, which only reads: it need not wait while others write, as SQLite's log keeps the state
// before them.
type reader struct {
	mu      sync.Mutex
	db      *database // nil: not opened
	stmts   statements
	crowded int  // how often a call found the first connection in use
	off     bool // there must not be one
}

// readAt is how often the first connection must have been in use before a second one is opened, which takes longer than
// most waits.
const readAt = 3

// readerPragmas are those of the second connection.
var readerPragmas = fmt.Sprintf("?_pragma=busy_timeout(%d)&_pragma=query_only(1)", busyTimeout.Milliseconds())

// ifCrowded returns the connection if it is worth having; nil: wait for the first one.
func (r *reader) ifCrowded(path string) *database {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.crowded++; r.db != nil || r.off || r.crowded < readAt {
		return r.db
	}

	db, err := openDatabase(path, "file:"+(&url.URL{Path: path}).EscapedPath()+readerPragmas)
	if err != nil {
		return nil // the first connection has to do
	}
	r.db = db
	return db
}

func (r *reader) close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.off = true
	if r.db == nil {
		return nil
	}
	db := r.db
	r.db = nil
	return db.Close()
}
