package catalog

import (
	"context"
	"database/sql"
	"errors"
	"time"

	"pando/internal/base/errs"
)

// group is a transaction that several calls of Update share: the first one begins it, those that wait join it one
// after the other, and the one that finds nobody waiting commits it. All of them return after that. So calls that come
// at the same time wait for the disk together, and write pages that they all change once.
//
// A call that fails is undone alone, up to its savepoint. If the whole transaction fails, each call runs again alone,
// unless that cannot help. No call returns, not even with an error, before everything that it has read is committed.
type group struct {
	c       *Catalog
	conn    *sql.Conn
	tx      *sql.Tx
	cancel  context.CancelFunc // of the context of tx, when it has ended
	durable bool
	members []*member
	closed  error // why nobody can join or commit it; nil: nothing has failed as a whole
	begun   time.Time
	done    chan struct{} // closed when all members have their result
}

// groupMost limits the calls in a group: other processes wait while it is open.
const groupMost = 64

// restMost limits the time after a group that is left to them.
const restMost = 20 * time.Millisecond

// member is one call of Update.
type member struct {
	ctx   context.Context
	d     Durability
	fn    func(*Tx) error
	alone bool // it ran in a group that failed as a whole

	tx    *Tx
	err   error
	ended func(marked int, err error) // see beginCounting
}

var (
	// errAlone says that a call must run again, in a transaction of its own.
	errAlone = errors.New("the transaction of several calls failed")

	errFirstFailed = errors.New("the first call failed, with the whole transaction")
	errPanicked    = errors.New("the call did not return")
)

// updateOnce is Update, but does not make space.
func (c *Catalog) updateOnce(ctx context.Context, d Durability, fn func(*Tx) error) error {
	m := &member{ctx: ctx, d: d, fn: fn}
	err := c.join(m)
	if err == errAlone {
		m = &member{ctx: ctx, d: d, fn: fn, alone: true}
		err = c.join(m)
	}
	return err
}

// join runs a call in a group, and returns its result when the group has ended.
func (c *Catalog) join(m *member) error {
	g, err := c.turns.take(m.ctx, &turn{joins: !m.alone, durable: m.d == Durable})
	if err != nil {
		return wrap("open catalogue", c.path, err)
	}
	if g == nil {
		if g, err = c.beginGroup(m); err != nil {
			c.turns.release()
			return err
		}
	}

	g.run(m)
	<-g.done
	return m.err
}

// beginGroup begins the transaction that m is the first member of.
func (c *Catalog) beginGroup(m *member) (*group, error) {
	conn, err := c.db.Conn(m.ctx)
	if err != nil {
		return nil, wrap("open catalogue", c.path, err)
	}

	sync := "PRAGMA synchronous=NORMAL"
	if m.d == Durable {
		sync = "PRAGMA synchronous=FULL"
	}
	if _, err := conn.ExecContext(m.ctx, sync); err != nil {
		conn.Close()
		return nil, wrap("write catalogue", c.path, err)
	}

	// The first member may give up while it waits for other processes. Once the transaction has begun, it belongs to
	// all, and nobody's context ends it.
	ctx, cancel := context.WithCancel(context.WithoutCancel(m.ctx))
	stop := context.AfterFunc(m.ctx, cancel)
	tx, err := c.begin(ctx, conn, nil)
	if !stop() && err == nil {
		_ = tx.Rollback() // nothing has happened yet
		err = wrap("write catalogue", c.path, m.ctx.Err())
	}
	if err != nil {
		cancel()
		conn.Close()
		return nil, err
	}

	return &group{c: c, conn: conn, tx: tx, cancel: cancel, durable: m.d == Durable, begun: time.Now(),
		done: make(chan struct{})}, nil
}

// admits reports whether a call that waits may join.
func (g *group) admits(w *turn) bool {
	return w.joins && (g.durable || !w.durable) && g.closed == nil && len(g.members) < groupMost && !g.members[0].alone
}

// run runs the function of a member in the transaction, and hands that on, or ends it.
func (g *group) run(m *member) {
	g.members = append(g.members, m)
	m.err = errPanicked
	m.ended = beginCounting(m.ctx)
	defer g.handOn()
	defer g.settle(m)

	// A statement that is interrupted can undo the whole transaction, so a context that ends interrupts none.
	m.tx = &Tx{ctx: context.WithoutCancel(m.ctx), tx: g.tx, c: g.c, stmts: &g.c.stmts}
	err := g.savepoint(m, "SAVEPOINT member")
	if err == nil {
		err = m.apply()
	}
	m.err = err
}

// apply runs the function, and checks what it has done.
func (m *member) apply() error {
	if err := m.ctx.Err(); err != nil {
		return wrap("write catalogue", m.tx.c.path, err)
	}
	err := m.fn(m.tx)
	if err == nil {
		err = m.tx.checkPut()
	}
	if err == nil {
		err = m.tx.undone // the function has overlooked that
	}
	if err == nil {
		err = wrap("write catalogue", m.tx.c.path, m.ctx.Err())
	}
	return err
}

// savepoint runs a statement about the savepoint of a member. The first one needs none: undoing it undoes everything.
func (g *group) savepoint(m *member, statement string) error {
	if m == g.members[0] {
		return nil
	}
	_, err := m.tx.exec(statement)
	return err
}

// settle keeps or undoes what a member has done. If that fails, or there is nothing else in the transaction, the group
// is closed.
func (g *group) settle(m *member) {
	if m.err != nil && m == g.members[0] {
		g.closed = errFirstFailed
		return
	}
	if m.err != nil {
		g.closed = g.savepoint(m, "ROLLBACK TO member")
	}
	if g.closed == nil {
		g.closed = g.savepoint(m, "RELEASE member")
	}
}

// handOn lets the next call join, or ends the group if none can.
func (g *group) handOn() {
	if g.c.turns.handOn(g) {
		return
	}
	commits, err := g.commit()
	g.cancel()
	g.conn.Close()
	g.c.stmts.prepareDue(context.WithoutCancel(g.members[0].ctx), g.c.db)

	// What was committed is noted in the order of the commits, while the next group is already at work.
	defer close(g.done)
	g.c.noting.Lock()
	defer g.c.noting.Unlock()
	if rest := g.rest(); rest > 0 {
		time.AfterFunc(rest, g.c.turns.release)
	} else {
		g.c.turns.release()
	}
	if err != nil || g.closed != nil {
		return
	}
	if commits > 0 {
		g.c.seen.recordCommits(commits)
	}
	for _, m := range g.members {
		if m.err == nil {
			m.tell()
		}
	}
}

// rest returns how long this process leaves the catalogue to others after a group of several calls. SQLite has no
// queue: a process that waits tries again from time to time, and would find the next group at work each time.
func (g *group) rest() time.Duration {
	if len(g.members) == 1 {
		return 0
	}
	return min(time.Since(g.begun)/3, restMost)
}

// commit ends the transaction, and gives the members their results. It returns how many durable commits there have
// been; 0 if this was none.
func (g *group) commit() (commits int64, err error) {
	if g.closed != nil {
		err := g.tx.Rollback()
		for _, m := range g.members {
			m.ended(0, err) // the member's own error says what went wrong
			if len(g.members) > 1 {
				m.err = errAlone
			}
		}
		return 0, nil
	}

	if commits, err = g.countCommits(); err == nil {
		err = wrap("write catalogue", g.c.path, g.tx.Commit())
	} else {
		_ = g.tx.Rollback() // the first error says what went wrong
	}

	for _, m := range g.members {
		marked := m.tx.marked
		switch {
		case m.err != nil:
			marked = 0
			if err != nil { // it may have failed because of what was then undone
				m.err = errAlone
			}
		case errs.Is(err, errs.NoSpace) && len(g.members) > 1:
			m.err = errAlone // there may be room for it
		default:
			m.err = err
		}
		m.ended(marked, err)
	}
	return commits, err
}

// countCommits counts the durable changes in the transaction.
func (g *group) countCommits() (int64, error) {
	var durable int64
	var last *Tx
	for _, m := range g.members {
		if m.err == nil && m.d == Durable {
			durable++
			last = m.tx
		}
	}
	if durable == 0 {
		return 0, nil
	}
	return last.countCommits(durable)
}

// tell calls what wants to know of commits.
func (m *member) tell() {
	c := m.tx.c
	if len(m.tx.put) > 0 && c.onCommit != nil {
		c.onCommit(m.tx.put)
	}
	if len(m.tx.changes) > 0 && c.onChange != nil {
		c.onChange(m.ctx, m.tx.changes)
	}
}
