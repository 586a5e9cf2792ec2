// Package catalog is the record of a pool: which objects exist under which names, where volumes are mounted, and which
// operations make, read or remove which object.
//
// It is an SQLite database in WAL mode, so that several processes can use it at once without a daemon, and people can
// query it. The pool is the truth: the database can be rebuilt from the identities that lie beside the objects.
//
// There are two kinds of commits. A Durable one is on disk when it returns. A Soft one survives the death of the
// process, but maybe not a power loss: enough for marks (which say what a live process is doing) and mount records (no
// mount survives a power loss either). Every Durable commit also makes the Soft ones before it durable.
//
// One writes at a time, of all processes. Others read beside it, each one state, and wait for no commit.
package catalog

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/waiting"
	"pando/internal/driver"

	sqlite "modernc.org/sqlite"
)

const schema = `
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE goldens (
  name TEXT PRIMARY KEY,
  current INTEGER NOT NULL,      -- generation that clones are made from
  next INTEGER NOT NULL,         -- number of the next generation: numbers are not reused
  created_at INTEGER NOT NULL,   -- nanoseconds since 1970
  keep INTEGER NOT NULL DEFAULT 0, -- newest generations that a publish leaves, 0: all
  overlay TEXT NOT NULL DEFAULT '', -- whether clones are overlays: never, default, '' if the user decides
  source TEXT NOT NULL DEFAULT '', -- what a refresh makes new generations from, as JSON
  labels TEXT NOT NULL DEFAULT '', -- as JSON, '' if there are none
  owner INTEGER NOT NULL         -- user ID of who made it
) WITHOUT ROWID;
CREATE TABLE objects (
  id TEXT PRIMARY KEY,
  kind TEXT NOT NULL,            -- volume, snapshot, generation, layer
  name TEXT NOT NULL,            -- of a volume, or of a snapshot within its volume
  golden TEXT NOT NULL,
  generation INTEGER NOT NULL,
  volume TEXT NOT NULL,          -- of a snapshot: lineage of its volume; of a volume: its lineage, '' if that is its id
  fs TEXT NOT NULL,
  size INTEGER NOT NULL,         -- bytes of the block device, 0 for native
  sector INTEGER NOT NULL,
  origin TEXT NOT NULL,          -- reference
  origin_id TEXT NOT NULL,
  created_at INTEGER NOT NULL,   -- nanoseconds since 1970, as all times here
  expires_at INTEGER NOT NULL,   -- 0: never
  ephemeral INTEGER NOT NULL,
  boot TEXT NOT NULL,
  used_at INTEGER NOT NULL,
  logical INTEGER NOT NULL,      -- bytes when last measured
  exclusive INTEGER NOT NULL,
  shared INTEGER NOT NULL,
  extents INTEGER NOT NULL,
  measured_at INTEGER NOT NULL,  -- 0: never
  pinned INTEGER NOT NULL DEFAULT 0, -- not to be destroyed before
  consistency TEXT NOT NULL DEFAULT '', -- of a snapshot: clean, crash
  lower TEXT NOT NULL DEFAULT '', -- of an overlay: the object whose files it changes
  mirror INTEGER NOT NULL DEFAULT 0, -- of a generation: 1: made from the source of its golden
  labels TEXT NOT NULL DEFAULT '', -- of a volume or snapshot, as JSON, '' if there are none
  ord INTEGER NOT NULL DEFAULT 0, -- of a snapshot: its place among all of them
  owner INTEGER NOT NULL         -- user ID of who made the volume or golden
) WITHOUT ROWID;
CREATE UNIQUE INDEX volume_name ON objects(name) WHERE kind = 'volume';
CREATE INDEX volume_created ON objects(created_at, name) WHERE kind = 'volume';
CREATE INDEX volume_owner ON objects(owner, name) WHERE kind = 'volume' AND owner > 0;
CREATE UNIQUE INDEX generation_number ON objects(golden, generation) WHERE kind = 'generation';
CREATE UNIQUE INDEX snapshot_name ON objects(volume, name) WHERE kind = 'snapshot';
CREATE INDEX lineage ON objects(volume) WHERE volume <> '';
CREATE INDEX expiry ON objects(expires_at) WHERE expires_at > 0;
CREATE INDEX lower_layer ON objects(lower) WHERE lower <> '';
CREATE INDEX layer_name ON objects(name) WHERE kind = 'layer';
CREATE TABLE attachments (
  id TEXT PRIMARY KEY,           -- object
  mountpoint TEXT NOT NULL,
  loop INTEGER NOT NULL,         -- number of the loop device, -1: none
  mount_id INTEGER NOT NULL,     -- of the mount, 0: it is a symbolic link
  dev INTEGER NOT NULL,          -- of the image file behind the loop device
  ino INTEGER NOT NULL,
  mount_ns INTEGER NOT NULL,
  made_dir INTEGER NOT NULL,     -- 1: the mount point goes with the attachment
  uid INTEGER NOT NULL,          -- user ID that the mount shows in place of the root directory's, -1: no other
  gid INTEGER NOT NULL,          -- group ID that it shows in place of the root directory's
  boot TEXT NOT NULL,
  at INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE tombstones (
  id TEXT PRIMARY KEY,           -- object whose destruction was decided
  ref TEXT NOT NULL,
  bytes INTEGER NOT NULL,        -- exclusive bytes when last measured
  at INTEGER NOT NULL,
  reclaimed INTEGER NOT NULL     -- 1: the driver has removed it; kept until that is durable
) WITHOUT ROWID;
CREATE INDEX unreclaimed ON tombstones(reclaimed) WHERE reclaimed = 0;
CREATE TABLE marks (
  id TEXT PRIMARY KEY,           -- object that is worked on
  op TEXT NOT NULL,
  name TEXT NOT NULL,            -- the name that it will have, '' if it keeps its own
  reads TEXT NOT NULL,           -- object that it is made from
  mountpoint TEXT NOT NULL,      -- that it is being mounted at
  made_dir INTEGER NOT NULL,     -- 1: the directory is made for it
  freezes INTEGER NOT NULL DEFAULT 0, -- 1: the filesystem in what it reads may be frozen
  owner TEXT NOT NULL,           -- file in live/ that the operation holds locked
  pid INTEGER NOT NULL,
  start INTEGER NOT NULL,        -- of the process, clock ticks since boot
  boot TEXT NOT NULL,
  at INTEGER NOT NULL
) WITHOUT ROWID;
CREATE UNIQUE INDEX mark_name ON marks(name) WHERE name <> '';
CREATE TABLE remote_points (
  repo TEXT NOT NULL,            -- ID of a repository
  manifest TEXT NOT NULL,        -- ID of a manifest in it
  object TEXT NOT NULL,          -- object with the content that it describes; the row goes with it
  at INTEGER NOT NULL,
  PRIMARY KEY (repo, manifest, object)
) WITHOUT ROWID;
CREATE INDEX remote_object ON remote_points(object);
CREATE TABLE remote_heads (
  repo TEXT NOT NULL,
  name TEXT NOT NULL,            -- of the head: a volume or golden in the repository
  lineage TEXT NOT NULL,         -- of what it is here, '' if the head was only seen
  epoch INTEGER NOT NULL,        -- the highest that was seen in the head
  manifest TEXT NOT NULL,        -- that was last pushed or pulled, '' if the head was only seen
  at INTEGER NOT NULL,
  next INTEGER NOT NULL DEFAULT 0, -- the highest number of a next point that was seen with that epoch, 0: not known
  PRIMARY KEY (repo, name)
) WITHOUT ROWID;
CREATE TABLE events (
  seq INTEGER PRIMARY KEY,       -- microseconds since 1970 of the commit, or one more than that of the last event
  at INTEGER NOT NULL,
  kind TEXT NOT NULL,            -- what happened: create, rename, destroy ...
  object TEXT NOT NULL,          -- volume, snapshot, generation (also of a golden); '': the pool
  ref TEXT NOT NULL,             -- reference to what changed, as it is after the change; of a golden, its name
  id TEXT NOT NULL,              -- ID of the object; '': a golden or the pool
  owner INTEGER NOT NULL,        -- user ID of the object's owner
  who INTEGER NOT NULL,          -- user ID of who asked for the change
  op TEXT NOT NULL,              -- operation that made it
  detail TEXT NOT NULL
);
`

// Durability of a commit.
type Durability bool

const (
	Soft    Durability = false
	Durable Durability = true
)

// Catalog is an open catalogue. It may be used concurrently.
type Catalog struct {
	db   *database
	path string
	dir  string // directory of the pool

	seen     *seen
	idle     idle
	lost     int64 // see Lost
	known    bool  // whether it was known, when it was opened, how many commits there were
	onCommit func([]driver.ObjectID)
	onFull   func(context.Context) bool
	onFind   func(ctx context.Context, op string, f Found) error
}

var damagedHint = errs.Messagef("rebuild it from the pool: %s", errs.Run("init", errs.Param("rebuild")))

// Create makes an empty catalogue for a pool in dir, durably. Its first event is of the kind first. Exists.
func Create(ctx context.Context, dir, poolID string, first api.EventKind) error {
	path := filepath.Join(dir, "catalog.db")
	if _, err := os.Lstat(path); err == nil {
		return errs.New(errs.Exists, "create catalogue", path, "it already exists")
	}

	for _, d := range []string{"live", "locks"} {
		if err := os.Mkdir(filepath.Join(dir, d), 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return errs.Wrap("create catalogue", dir, err)
		}
	}

	// SQLite gives its files the mode of the database file.
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if err != nil {
		return errs.Wrap("create catalogue", path, err)
	}

	f.Close()
	db, err := openDatabase(path, dsn(path), 0)
	if err != nil {
		return wrap("create catalogue", path, err)
	}

	defer db.Close()

	run := func(stmt string, args ...any) {
		if err == nil {
			_, err = db.ExecContext(ctx, stmt, args...)
		}
	}
	run("PRAGMA journal_mode=WAL")
	run("PRAGMA synchronous=FULL")
	run("BEGIN IMMEDIATE")
	run(schema)
	run(fmt.Sprintf("PRAGMA user_version=%d", version()))
	run("INSERT INTO meta VALUES ('pool', ?)", poolID)
	run(insertEvent, Event{Kind: first, Op: string(first)}.values(ctx)...)
	run("INSERT INTO meta SELECT ?, seq - 1 FROM events", metaRemoved)
	run("COMMIT")
	return wrap("create catalogue", path, err)
}

// busyTimeout is how long a transaction waits for others, which take milliseconds.
const busyTimeout = 20 * time.Second

func dsn(path string) string {
	// A checkpoint every 128 pages keeps the log short, which the first
	// process to open the catalogue must read whole.
	return "file:" + (&url.URL{Path: path}).EscapedPath() + fmt.Sprintf("?_pragma=busy_timeout(%d)",
		busyTimeout.Milliseconds()) +
		fmt.Sprintf("&_pragma=wal_autocheckpoint(128)&_pragma=journal_size_limit(%d)", logBytes)
}

// poolQuery asks which pool the catalogue belongs to, and how many durable commits it has had.
const poolQuery = `SELECT value, coalesce((SELECT CAST(value AS INTEGER) FROM meta WHERE key = 'commits'), 0)
	FROM meta WHERE key = 'pool'`

// OpenReadOnly opens the catalogue for reading: it writes nothing, neither into the database nor its log, so that a
// format that this version would upgrade is Unsupported. Other kinds as Open. Only View works on it; end it with Close.
func OpenReadOnly(ctx context.Context, dir, poolID string) (*Catalog, error) {
	path := filepath.Join(dir, "catalog.db")
	if _, err := os.Stat(path); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil, errs.New(errs.Damaged, "open catalogue", path, "it is missing").WithHint("%s", damagedHint)
		}
		return nil, errs.Wrap("open catalogue", path, err)
	}

	// Read the count before checking for a log: commits counted by now are in the database, or in a log that exists.
	seen := seenOf(dir)
	noted := seen.readCommits()
	source := "file:" + (&url.URL{Path: path}).EscapedPath() + "?mode=ro&_pragma=busy_timeout(5000)"
	if log, err := os.Stat(path + "-wal"); errors.Is(err, fs.ErrNotExist) || err == nil && log.Size() == 0 {
		// No process has it open, and SQLite would make a log to read it with. A process that begins to write at this moment
		// writes to a log first.
		source += "&immutable=1"
	}

	db, err := openDatabase(path, source, sharedReaders)
	if err != nil {
		return nil, wrap("open catalogue", path, err)
	}

	var pool string
	var commits int64
	found, err := readVersion(ctx, db, path)
	switch {
	case err != nil:
	case found > 0 && found < version():
		err = errs.New(errs.Unsupported, "open catalogue", path,
			"it has format %d; the next command that uses the pool upgrades it to %d", found, version())
	default:
		if found > 0 {
			err = db.QueryRowContext(ctx, poolQuery).Scan(&pool, &commits)
		}
		if errors.Is(err, sql.ErrNoRows) {
			err = nil
		}
		if err = wrap("open catalogue", path, err); err == nil && pool != poolID {
			err = errs.New(errs.Damaged, "open catalogue", path, "it is not the catalogue of this pool").
				WithHint("%s", damagedHint)
		}
	}
	if err != nil {
		db.Close()
		return nil, err
	}

	c := &Catalog{db: db, path: path, dir: dir, seen: seen}
	c.checkSeen(noted, commits)
	return c, nil
}

// readVersion returns the version of a catalogue, 0 if it is none. TooNew.
func readVersion(ctx context.Context, db *database, path string) (found int, err error) {
	if err := db.QueryRowContext(ctx, "PRAGMA user_version").Scan(&found); err != nil {
		return 0, wrap("open catalogue", path, err)
	}
	if found > version() {
		return 0, errs.New(errs.TooNew, "open catalogue", path, "it has format %d, but this pando supports formats up to %d",
			found, version()).WithHint("upgrade pando")
	}
	return found, nil
}

// Open opens the catalogue of the pool in dir. Damaged if it is missing or not
// a catalogue of this pool, TooNew, NoSpace.
func Open(ctx context.Context, dir, poolID string) (*Catalog, error) {
	return openWritable(ctx, dir, poolID, "", sharedReaders)
}

// OpenAlone is Open on a disk without room even for the index of the log, which processes share: this process has the
// catalogue for itself until it is closed. InUse after 20 s if others have it open.
func OpenAlone(ctx context.Context, dir, poolID string) (*Catalog, error) {
	return openWritable(ctx, dir, poolID, "&_pragma=locking_mode(exclusive)", 0)
}

func openWritable(ctx context.Context, dir, poolID, more string, readers int) (*Catalog, error) {
	path := filepath.Join(dir, "catalog.db")
	if _, err := os.Stat(path); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil, errs.New(errs.Damaged, "open catalogue", path, "it is missing").WithHint("%s", damagedHint)
		}
		return nil, errs.Wrap("open catalogue", path, err)
	}

	Preallocate(dir)
	db, err := openDatabase(path, dsn(path)+more, readers)
	if err != nil {
		return nil, wrap("open catalogue", path, err)
	}

	c := &Catalog{db: db, path: path, dir: dir, seen: seenOf(dir)}
	found, err := readVersion(ctx, db, path)
	if err == nil && found > 0 && found < version() {
		err = c.upgrade(ctx)
	}
	if err != nil {
		_ = c.Close()
		return nil, err
	}

	var pool string
	noted := c.seen.readCommits() // before reading the catalogue: other processes may commit in between
	if found > 0 {
		var commits int64
		err = db.QueryRowContext(ctx, poolQuery).Scan(&pool, &commits)
		c.checkSeen(noted, commits)
	}
	if err != nil && !errors.Is(err, sql.ErrNoRows) {
		_ = c.Close()
		return nil, wrap("open catalogue", path, err)
	}

	if pool != poolID {
		_ = c.Close()
		return nil, errs.New(errs.Damaged, "open catalogue", path, "it is not the catalogue of this pool").
			WithHint("%s", damagedHint)
	}

	return c, nil
}

// Close closes the catalogue. The last process to close it writes the log back into the database, and waits for the
// disk. A process that is about to end can skip that: the log stays for the next one, and the kernel closes the files.
// Close waits for transactions that have begun; all others return Canceled.
func (c *Catalog) Close() error {
	c.RemoveIdleLiveFiles()
	err := c.db.Close()
	c.seen.closeFile() // not before transactions have ended, which write into it
	return wrap("close catalogue", c.path, err)
}

// RemoveIdleLiveFiles is Close for a process that is about to end: it only removes the live files that ended operations
// have left to later ones, which the kernel would not. An operation that ends later removes its own.
func (c *Catalog) RemoveIdleLiveFiles() { c.idle.removeLiveFiles() }

// Tx is a transaction. It holds the write lock of the catalogue: keep it short, and never call a driver inside.
type Tx struct {
	ctx context.Context
	s   *session
	c   *Catalog
	put []driver.ObjectID // objects whose rows it has added

	marked int // marks that it has added for its operation, less those that it has removed

	silent bool // whether it writes no events
}

// Update runs fn in a transaction and commits it. If fn fails, nothing has happened and its error is returned. fn may
// run more than once: see OnFull. It must not begin a transaction.
func (c *Catalog) Update(ctx context.Context, d Durability, fn func(*Tx) error) error {
	for {
		err := c.updateOnce(ctx, d, fn)
		if !errs.Is(err, errs.NoSpace) || c.onFull == nil || !c.onFull(ctx) {
			return err
		}
	}
}

func (c *Catalog) updateOnce(ctx context.Context, d Durability, fn func(*Tx) error) error {
	s, release, err := c.db.connect(ctx, c.db.writing)
	if err != nil {
		return wrap("open catalogue", c.path, err)
	}
	defer release()

	if err := s.commitsAre(d); err != nil {
		return wrap("write catalogue", c.path, err)
	}

	var commits int64
	var put []driver.ObjectID
	if err := c.transact(ctx, s, "BEGIN IMMEDIATE", func(tx *Tx) (err error) {
		if err = fn(tx); err == nil && d == Durable {
			commits, err = tx.countCommit()
		}
		put = tx.put
		return err
	}); err != nil {
		return err
	}

	if d == Durable {
		c.seen.recordCommits(commits)
	}
	if len(put) > 0 && c.onCommit != nil {
		c.onCommit(put)
	}

	c.db.shortenLog(ctx, s.conn)
	return nil
}

// View runs fn on one consistent state of the catalogue, without waiting for updates that run at the same time, except
// for 0.1 s at most when a log that has become long begins anew. fn must not write, nor begin a transaction: with many
// of those, all would wait for each other.
func (c *Catalog) View(ctx context.Context, fn func(*Tx) error) error {
	s, release, err := c.db.connect(ctx, c.db.reading)
	if err != nil {
		return wrap("open catalogue", c.path, err)
	}
	defer release()
	return c.transact(ctx, s, "BEGIN", fn)
}

// transact runs fn in a transaction that begin begins. When ctx ends, it is rolled back at its next query, or instead
// of the commit.
func (c *Catalog) transact(ctx context.Context, s *session, begin string, fn func(*Tx) error) error {
	if err := c.begin(ctx, s, begin); err != nil {
		return err
	}

	t := &Tx{ctx: ctx, s: s, c: c}
	ended := beginCounting(ctx)
	done := false
	defer func() {
		if !done {
			ended(0, s.rollback()) // fn's error, or its panic, says what went wrong
		}
	}()

	if err := fn(t); err != nil {
		return err
	}
	if ctx.Err() != nil {
		return wrap("write catalogue", c.path, context.Cause(ctx))
	}

	done = true
	err := s.commit()
	ended(t.marked, err)
	return wrap("write catalogue", c.path, err)
}

// writeLock is the byte of the -shm file that a writer has locked (sqlite.org/walformat.html).
const writeLock = 120

// begin begins a transaction. It waits for other writers, which SQLite bounds by busyTimeout.
func (c *Catalog) begin(ctx context.Context, s *session, query string) error {
	w := waiting.Wait{
		Op: "write catalogue", Ref: c.path, What: "the catalogue",
		Holders: func() []waiting.Process { return waiting.LockHolders(c.path+"-shm", writeLock) },
	}
	begun := time.Now()
	stop := w.Watch(ctx)
	err := s.begin(ctx, query)
	stop()
	var busy *sqlite.Error
	if errors.As(err, &busy) && busy.Code()&0xff == sqliteBusy {
		return w.Error(time.Since(begun))
	}

	return wrap("write catalogue", c.path, err)
}

// exec runs a query that returns no rows, and returns how many it has affected.
func (t *Tx) exec(query string, args ...any) (int64, error) {
	r, err := t.run(query, args...)
	if err != nil {
		return 0, err
	}
	n, err := r.RowsAffected()
	return n, wrap("write catalogue", t.c.path, err)
}

// run runs a query that returns no rows.
func (t *Tx) run(query string, args ...any) (r sql.Result, err error) {
	r, err = t.s.run(t.untilEnd(), query, args...)
	return r, wrap("write catalogue", t.c.path, err)
}

// SQLite's primary result codes (sqlite.org/rescode.html).
const (
	sqlitePerm       = 3
	sqliteBusy       = 5
	sqliteReadonly   = 8
	sqliteIOErr      = 10
	sqliteCorrupt    = 11
	sqliteFull       = 13
	sqliteCantOpen   = 14
	sqliteConstraint = 19
	sqliteNotADB     = 26
)

// wrap gives an SQLite error its kind.
func wrap(op, path string, err error) error {
	if err == nil {
		return nil
	}

	var se *sqlite.Error
	if !errors.As(err, &se) {
		return errs.Wrap(op, path, err)
	}

	e := &errs.Error{Op: op, Ref: path, Err: err}
	code := se.Code() & 0xff
	if (code == sqliteIOErr || code == sqliteCantOpen) && isFull(path) {
		code = sqliteFull // could not write to a mapped file, or make one
	}

	switch code {
	case sqliteCorrupt, sqliteNotADB:
		e.Kind, e.Hint = errs.Damaged, damagedHint
	case sqliteFull:
		e.Kind, e.Hint = errs.NoSpace, errs.Messagef("free space with %s and %s, or on the filesystem of the pool directory",
			errs.Run("destroy"), errs.Run("gc"))
	case sqliteBusy:
		e.Kind, e.Hint = errs.InUse, "another pando process is using this pool; try again"
	case sqliteReadonly, sqlitePerm, sqliteCantOpen:
		e.Kind, e.Hint = errs.Permission, "run it as root"
	case sqliteIOErr:
		e.Kind = errs.IO
	case sqliteConstraint:
		e.Kind = errs.Exists
	default:
		e.Kind = errs.Internal
		if strings.Contains(err.Error(), "no such table") || strings.Contains(err.Error(), "no such column") {
			e.Kind, e.Hint = errs.Damaged, damagedHint
		}
	}

	return e
}
