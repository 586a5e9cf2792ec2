package catalog

import (
	"cmp"
	"context"
	"database/sql"
	"database/sql/driver"
	"fmt"
	"path/filepath"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"pando/internal/base/errs"

	"golang.org/x/sync/semaphore"
	"golang.org/x/sys/unix"
	"modernc.org/sqlite"
)

// database is an SQLite database that is counted while it is open. SQLite's locks on a file belong to
// the process, and closing any other descriptor of that file drops them all
// (https://www.sqlite.org/howtocorrupt.html, 2.2). So nobody may open the database's files beside
// SQLite while this process has it open.
//
// A transaction takes a turn before its session: one writes at a time, and several read beside it. So each finds a
// session free; if they follow one another it is the same one, which still has what it has read.
type database struct {
	*sql.DB
	writing *semaphore.Weighted // turns of those that write, of which there is one
	reading *semaphore.Weighted // turns of those that read
	readers int64               // number of turns in reading; 0: those that read take the turn of those that write
	writes  int                 // number of transactions that have written
	longLog int64               // number of pages with which the log is too long, if that is more than keptLog

	mu   sync.Mutex
	free []*session     // sessions that no transaction uses; the last one was used last
	runs map[string]int // how often a query has run, until it is worth being prepared

	closing sync.Once
	closed  atomic.Bool
	in      inode // directory that the database lies in
}

// sharedReaders is how many transactions read at once, in a database that others use as well: as many as there are
// processors, and some more, so that short ones need not wait for those that read everything.
var sharedReaders = min(runtime.GOMAXPROCS(0)+2, 8)

// inode is a file or directory, by whatever path.
type inode struct{ dev, ino uint64 }

// opened counts the open databases of this process, by the directory that they lie in.
var opened = struct {
	sync.Mutex
	count map[inode]int
}{count: map[inode]int{}}

// openDatabase opens the database at path, which is part of source. So many transactions read beside the one that
// writes; 0: there is one connection for everything.
func openDatabase(path, source string, readers int) (*database, error) {
	in, err := inodeOf(filepath.Dir(path))
	if err != nil {
		return nil, err
	}

	opened.Lock()
	opened.count[in]++
	opened.Unlock()

	d := &database{in: in, writing: semaphore.NewWeighted(1), readers: int64(readers), runs: map[string]int{}}
	d.reading = d.writing
	if readers > 0 {
		d.reading = semaphore.NewWeighted(d.readers)
	}
	c, err := sqlite.NewConnector(source)
	if err != nil {
		d.uncount()
		return nil, err
	}

	d.DB = sql.OpenDB(&oneFile{Connector: c, path: path})
	d.SetMaxOpenConns(1 + readers)
	d.SetMaxIdleConns(1 + readers)
	return d, nil
}

// Close closes the database when the transactions have ended that have their turn; the others fail (see connect).
// Repeated, it does nothing.
func (d *database) Close() (err error) {
	d.closing.Do(func() {
		d.closed.Store(true)
		_ = d.writing.Acquire(context.Background(), 1)
		defer d.writing.Release(1)
		if d.readers > 0 {
			_ = d.reading.Acquire(context.Background(), d.readers)
			defer d.reading.Release(d.readers)
		}

		d.closeSessions()
		err = d.DB.Close()
		d.uncount()
	})
	return err
}

var errDatabaseClosed = errs.New(errs.Canceled, "", "", "it was closed")

// connect waits for a turn and takes a session. Call release when its transaction has ended. It returns Canceled if
// the database was closed.
func (d *database) connect(ctx context.Context, turns *semaphore.Weighted) (_ *session, release func(), err error) {
	if d.closed.Load() {
		return nil, nil, errDatabaseClosed
	}
	if err := turns.Acquire(ctx, 1); err != nil {
		return nil, nil, context.Cause(ctx)
	}
	if d.closed.Load() { // the database was closed while this transaction waited
		turns.Release(1)
		return nil, nil, errDatabaseClosed
	}

	s, err := d.takeSession(ctx)
	if err != nil {
		turns.Release(1)
		return nil, nil, cmp.Or(context.Cause(ctx), err)
	}

	return s, func() {
		d.giveBack(s)
		turns.Release(1)
	}, nil
}

const (
	// keptLog is how many pages of the log readers may keep: half of those that are preallocated.
	keptLog = logBytes / 2 / pageBytes

	// logLooks is how many transactions write from one look at the log to the next. Few write more than ten pages.
	logLooks = 16

	// readersWait is how long a writer waits for those who still read what is in the log, to begin it anew, and those in
	// this process who want to read wait for the writer.
	readersWait = 100 * time.Millisecond
)

// shortenLog begins the log anew if it has become long: it does not begin anew by itself while readers overlap, of
// whatever process. It gives up if a reader takes its time, until the log is twice as long. The caller has the turn of
// those that write.
func (d *database) shortenLog(ctx context.Context, conn *sql.Conn) {
	if d.writes++; d.readers == 0 || d.writes%logLooks != 1 {
		return
	}

	ctx = context.WithoutCancel(ctx)
	var busy, pages, written int64
	err := conn.QueryRowContext(ctx, "PRAGMA wal_checkpoint(NOOP)").Scan(&busy, &pages, &written)
	if err != nil || pages < max(d.longLog, keptLog) {
		return
	}

	// SQLite has few read marks, which many readers share: without a moment in which they pause, one of the marks may
	// always be in use.
	d.longLog = 2 * pages
	patient, cancel := context.WithTimeout(ctx, readersWait)
	defer cancel()
	if d.reading.Acquire(patient, d.readers) != nil {
		return
	}
	defer d.reading.Release(d.readers)

	// Wait for readers in other processes.
	waitAtMost := func(most time.Duration) {
		_, _ = conn.ExecContext(ctx, fmt.Sprintf("PRAGMA busy_timeout(%d)", most.Milliseconds()))
	}
	waitAtMost(readersWait)
	defer waitAtMost(busyTimeout)
	err = conn.QueryRowContext(ctx, "PRAGMA wal_checkpoint(RESTART)").Scan(&busy, &pages, &written)
	if err == nil && busy == 0 {
		d.longLog = 0
	}
}

// oneFile makes connections to the file that the first one has opened, and to no other: a rebuild puts another one in
// its place, and then connections would disagree.
type oneFile struct {
	driver.Connector
	path string
	mu   sync.Mutex
	file inode // file that the first connection has opened; zero before that
}

// Connect implements driver.Connector. It returns Conflict if another file has taken the place of the first one.
func (o *oneFile) Connect(ctx context.Context) (driver.Conn, error) {
	before, err := inodeOf(o.path)
	if err != nil {
		return nil, errs.Wrap("open catalogue", o.path, err)
	}
	conn, err := o.Connector.Connect(ctx)
	if err != nil {
		return nil, err
	}

	now, err := inodeOf(o.path)
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.file == (inode{}) {
		o.file = before
	}
	if err != nil || now != o.file {
		_ = conn.Close()
		return nil, errs.New(errs.Conflict, "open catalogue", o.path, "another one has taken its place").
			WithHint("open the pool again")
	}
	return conn, nil
}

func (d *database) uncount() {
	opened.Lock()
	defer opened.Unlock()
	if opened.count[d.in]--; opened.count[d.in] == 0 {
		delete(opened.count, d.in)
	}
}

// ifClosed calls fn if this process has no database open in dir, and keeps it from opening one
// in the meantime.
func ifClosed(dir string, fn func()) {
	in, err := inodeOf(dir)
	if err != nil {
		return
	}
	opened.Lock()
	defer opened.Unlock()
	if opened.count[in] == 0 {
		fn()
	}
}

func inodeOf(path string) (inode, error) {
	var st unix.Stat_t
	err := unix.Stat(path, &st)
	return inode{st.Dev, st.Ino}, err
}
