package catalog

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"strings"
)

// prepareAt is how often a query is parsed again before it is kept parsed. A command that clones once and ends has no
// use for prepared queries; a longer one does: parsing is half of what a short transaction costs.
const prepareAt = 3

// session is a connection with the queries that it keeps parsed. One transaction uses it at a time, and so does one
// goroutine.
//
// Its queries run without the context of their caller, except the one that waits for others. For a context that can
// end, each would start a goroutine that interrupts it, and wait for that in the end: a short transaction would take
// three times as long. So a transaction looks at its context itself, before each query and each row.
type session struct {
	conn     *sql.Conn
	d        *database
	prepared map[string]*sql.Stmt
	reading  map[*sql.Stmt]bool // statements whose rows are being read: they cannot run a second time until then
	level    string             // how durable commits are, as it was set last
	broken   bool               // whether a transaction may still be open in it
}

// takeSession returns the session that was used last of those that are free, or a new one. The caller has a turn.
func (d *database) takeSession(ctx context.Context) (*session, error) {
	d.mu.Lock()
	if last := len(d.free) - 1; last >= 0 {
		s := d.free[last]
		d.free = d.free[:last]
		d.mu.Unlock()
		return s, nil
	}
	d.mu.Unlock()

	conn, err := d.Conn(ctx)
	if err != nil {
		return nil, err
	}
	return &session{conn: conn, d: d, prepared: map[string]*sql.Stmt{}, reading: map[*sql.Stmt]bool{}}, nil
}

// giveBack takes a session back whose transaction has ended.
func (d *database) giveBack(s *session) {
	if s.broken {
		s.close(driver.ErrBadConn) // the end of the connection ends its transaction
		return
	}

	d.mu.Lock()
	defer d.mu.Unlock()
	d.free = append(d.free, s)
}

// closeSessions gives the connections of all sessions back, which are free. They close with the database.
func (d *database) closeSessions() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, s := range d.free {
		s.close(nil)
	}
	d.free = nil
}

// close ends the session. Its connection is used by others, unless it is called bad. Nobody else closes statements of a
// single connection, and with an open one the connection stays open for ever.
func (s *session) close(bad error) {
	for _, stmt := range s.prepared {
		_ = stmt.Close()
	}
	_ = s.conn.Raw(func(any) error { return bad })
	_ = s.conn.Close()
}

// worthPreparing counts a run of a query, and reports whether it has run so often that it is worth being prepared.
func (d *database) worthPreparing(query string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.runs[query] < prepareAt {
		d.runs[query]++
	}
	return d.runs[query] == prepareAt
}

// statement returns a query as a statement, or nil if it is not kept parsed, or is being read.
func (s *session) statement(query string) *sql.Stmt {
	stmt := s.prepared[query]
	if stmt == nil && s.d.worthPreparing(query) {
		var err error
		if stmt, err = s.conn.PrepareContext(context.Background(), query); err != nil {
			return nil // the error comes again when the query is run
		}
		s.prepared[query] = stmt
	}
	if s.reading[stmt] {
		return nil
	}
	return stmt
}

// run runs a query that returns no rows.
func (s *session) run(ctx context.Context, query string, args ...any) (sql.Result, error) {
	if stmt := s.statement(query); stmt != nil {
		return stmt.ExecContext(ctx, args...)
	}
	return s.conn.ExecContext(ctx, query, args...)
}

// queryRow runs a query that returns one row, which must be scanned at once.
func (s *session) queryRow(ctx context.Context, query string, args ...any) *sql.Row {
	if stmt := s.statement(query); stmt != nil {
		return stmt.QueryRowContext(ctx, args...)
	}
	return s.conn.QueryRowContext(ctx, query, args...)
}

// queryRows runs a query that returns rows. Call release when they are closed.
func (s *session) queryRows(ctx context.Context, query string, args ...any) (_ *sql.Rows, release func(), err error) {
	stmt := s.statement(query)
	if stmt == nil {
		rows, err := s.conn.QueryContext(ctx, query, args...)
		return rows, func() {}, err
	}

	rows, err := stmt.QueryContext(ctx, args...)
	if err != nil {
		return nil, nil, err
	}
	s.reading[stmt] = true
	return rows, func() { delete(s.reading, stmt) }, nil
}

// commitsAre sets how durable the commits of the session are from now on.
func (s *session) commitsAre(d Durability) error {
	level := "PRAGMA synchronous=NORMAL"
	if d == Durable {
		level = "PRAGMA synchronous=FULL"
	}
	if level == s.level {
		return nil
	}

	// It takes effect when it is parsed, so that it must not be kept parsed (sqlite.org/pragma.html).
	_, err := s.conn.ExecContext(context.Background(), level)
	if err == nil {
		s.level = level
	}
	return err
}

// begin begins a transaction with a query. It waits for others until ctx ends, or as long as busyTimeout.
func (s *session) begin(ctx context.Context, query string) error {
	_, err := s.run(ctx, query)
	if err != nil {
		_ = s.rollback() // it may have begun at the moment at which ctx ended
	}
	return err
}

// commit ends the transaction. If it fails, nothing of the transaction has happened.
func (s *session) commit() error {
	_, err := s.run(context.Background(), "COMMIT")
	if err != nil {
		_ = s.rollback()
	}
	return err
}

// rollback ends the transaction, unless SQLite has already ended it, as it does after some errors
// (sqlite.org/c3ref/get_autocommit.html).
func (s *session) rollback() error {
	_, err := s.run(context.Background(), "ROLLBACK")
	if err != nil && strings.Contains(err.Error(), "no transaction is active") {
		return nil
	}
	s.broken = s.broken || err != nil
	return err
}

// untilEnd returns the context for the next query of the transaction: it has ended if that of the transaction has, and
// does not end during the query.
func (t *Tx) untilEnd() context.Context {
	if t.ctx.Err() != nil {
		return t.ctx
	}
	return context.Background()
}

// queryRow runs a query that returns one row, which must be scanned at once.
func (t *Tx) queryRow(query string, args ...any) *sql.Row {
	return t.s.queryRow(t.untilEnd(), query, args...)
}
