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
	due   []string // queries to be prepared when a connection is free
}

type statement struct {
	stmt *sql.Stmt // nil: not prepared
	runs int       // how often it ran without being prepared
}

// statementFor returns a query as a statement of the transaction, or nil if it is not prepared. With hold, the
// transaction does not get the statement again until release.
func (t *Tx) statementFor(query string, hold bool) (stmt *sql.Stmt, release func()) {
	s := &t.c.db.stmts
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
		return t.acquire(k, hold, func() *sql.Stmt { return t.tx.StmtContext(t.ctx, k.stmt) })
	}

	if k.runs++; k.runs == prepareAt {
		s.due = append(s.due, query)
	}

	if k.runs < prepareAt {
		return nil, func() {}
	}

	own := t.prepareForTx(query)
	return t.acquire(own, hold, func() *sql.Stmt { return own.stmt })
}

// acquire returns the statement by get, unless the transaction is reading its rows: it cannot run a second time until
// then.
func (t *Tx) acquire(k *statement, hold bool, get func() *sql.Stmt) (stmt *sql.Stmt, release func()) {
	if t.held[k] {
		return nil, func() {}
	}
	if !hold {
		return get(), func() {}
	}

	if t.held == nil {
		t.held = map[*statement]bool{}
	}

	t.held[k] = true
	return get(), func() { delete(t.held, k) }
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

// prepareDue prepares the queries that have become due. A connection must be free. A query that cannot be prepared is
// still run unprepared.
func (d *database) prepareDue(ctx context.Context) {
	ctx = context.WithoutCancel(ctx) // the queries are for later transactions
	s := &d.stmts
	s.mu.Lock()
	due := s.due
	s.due = nil
	s.mu.Unlock()
	for _, query := range due {
		stmt, err := d.PrepareContext(ctx, query)
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
