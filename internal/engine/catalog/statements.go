package catalog

import (
	"context"
	"database/sql"
	"sync"
)

// prepareAt is how often a query is parsed again before it is kept parsed. A command that clones once and ends has no
// use for prepared queries; a longer one does: parsing is half of what a short transaction costs.
const prepareAt = 3

// statements keeps frequent queries parsed.
type statements struct {
	mu    sync.Mutex
	known map[string]*statement
	due   []string // to be prepared when the connection is free
}

type statement struct {
	stmt *sql.Stmt // nil: not prepared
	runs int       // unprepared
	busy bool      // its rows are being read: it cannot run a second time until then
}

// statementFor returns a query as a statement of the transaction, or nil if it is not prepared. With hold, no other
// query gets the statement until release.
func (t *Tx) statementFor(query string, hold bool) (stmt *sql.Stmt, release func()) {
	s := t.stmts
	s.mu.Lock()
	defer s.mu.Unlock()

	k := s.known[query]
	if k == nil {
		k = &statement{}
		if s.known == nil {
			s.known = map[string]*statement{}
		}
		s.known[query] = k
	}

	if k.stmt != nil {
		return k.acquire(&s.mu, hold, func() *sql.Stmt { return t.tx.StmtContext(t.ctx, k.stmt) })
	}

	if k.runs++; k.runs == prepareAt {
		s.due = append(s.due, query)
	}

	if k.runs < prepareAt {
		return nil, func() {}
	}

	own := t.prepareForTx(query)
	return own.acquire(&s.mu, hold, func() *sql.Stmt { return own.stmt })
}

// acquire returns the statement by get, unless its rows are being read. The caller holds mu.
func (k *statement) acquire(mu *sync.Mutex, hold bool, get func() *sql.Stmt) (stmt *sql.Stmt, release func()) {
	if k.busy {
		return nil, func() {}
	}
	if !hold {
		return get(), func() {}
	}

	k.busy = true
	return get(), func() {
		mu.Lock()
		k.busy = false
		mu.Unlock()
	}
}

// prepareForTx prepares a query for this transaction alone: one that runs thousands of
// times in it cannot wait for its end.
func (t *Tx) prepareForTx(query string) *statement {
	if k := t.own[query]; k != nil {
		return k
	}

	k := &statement{}
	if stmt, err := t.tx.PrepareContext(t.ctx, query); err == nil { // else running it says why
		k.stmt = stmt // the end of the transaction closes it
	}

	if t.own == nil {
		t.own = map[string]*statement{}
	}

	t.own[query] = k
	return k
}

// prepareDue prepares the queries that have become due. The connection must be free. A query that cannot be prepared is
// still run unprepared.
func (s *statements) prepareDue(ctx context.Context, db *database) {
	s.mu.Lock()
	due := s.due
	s.due = nil
	s.mu.Unlock()
	for _, query := range due {
		stmt, err := db.PrepareContext(ctx, query)
		if err != nil {
			continue
		}
		s.mu.Lock()
		s.known[query].stmt = stmt
		s.mu.Unlock()
	}
}

// queryRows runs a query that returns rows. Call release when they are closed.
func (t *Tx) queryRows(query string, args ...any) (rows *sql.Rows, release func(), err error) {
	stmt, release := t.statementFor(query, true)
	if stmt != nil {
		rows, err = stmt.QueryContext(t.ctx, args...)
	} else {
		rows, err = t.tx.QueryContext(t.ctx, query, args...)
	}
	if err != nil {
		release()
	}
	return rows, release, err
}

// queryRow runs a query that returns one row, which must be scanned at once.
func (t *Tx) queryRow(query string, args ...any) *sql.Row {
	if stmt, _ := t.statementFor(query, false); stmt != nil {
		return stmt.QueryRowContext(t.ctx, args...)
	}
	return t.tx.QueryRowContext(t.ctx, query, args...)
}
