package catalog

import (
	"database/sql"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"
)

// database is a connection that is counted while it is open. SQLite's locks on a file belong to
// the process, and closing any other descriptor of that file drops them all
// (https://www.sqlite.org/howtocorrupt.html, 2.2). So nobody may open the database's files beside
// SQLite while this process has it open.
type database struct {
	*sql.DB
	in   directory
	once sync.Once
}

// directory is the one that a database lies in, by whatever path.
type directory struct{ dev, ino uint64 }

// opened counts the open databases of this process.
var opened = struct {
	sync.Mutex
	count map[directory]int
}{count: map[directory]int{}}

// openDatabase opens the database at path, which is part of source.
func openDatabase(path, source string) (*database, error) {
	in, err := directoryOf(filepath.Dir(path))
	if err != nil {
		return nil, err
	}

	opened.Lock()
	opened.count[in]++
	opened.Unlock()

	d := &database{in: in}
	if d.DB, err = sql.Open("sqlite", source); err != nil {
		d.uncount()
		return nil, err
	}

	// One connection: some pragmas belong to it, and SQLite lets only one write at a time anyway.
	d.SetMaxOpenConns(1)
	return d, nil
}

// Close closes the database. Repeated, it does nothing.
func (d *database) Close() error {
	err := d.DB.Close()
	d.once.Do(d.uncount)
	return err
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
	in, err := directoryOf(dir)
	if err != nil {
		return
	}
	opened.Lock()
	defer opened.Unlock()
	if opened.count[in] == 0 {
		fn()
	}
}

func directoryOf(path string) (directory, error) {
	var st unix.Stat_t
	err := unix.Stat(path, &st)
	return directory{st.Dev, st.Ino}, err
}
