package diagnose

import (
	"bytes"
	"context"
	"path/filepath"
	"strings"
	"time"
	"unicode"

	"golang.org/x/sys/unix"
)

// Database is a database below the path, with the settings on which it depends what survives a power failure.
type Database struct {
	Kind     string            `json:"kind"` // "postgresql", "mysql", "sqlite"
	Path     string            `json:"path"` // its data directory, or its file
	PID      int               `json:"pid,omitempty"`
	Settings []DatabaseSetting `json:"settings"`
}

// DatabaseSetting is one of a database's own settings.
type DatabaseSetting struct {
	Name  string `json:"name"`
	Value string `json:"value"` // "unknown" if it could not be read
	// From is the file that sets it, as the server calls it, "command line", "default", "header" (of a SQLite file), or
	// "each connection", which means that it is not stored anywhere. If the value is unknown, it says why.
	From string `json:"from"`
	// Loses says what a power failure costs with this value; "" if nothing.
	Loses string `json:"loses,omitempty"`
}

const (
	// mostDatabases limits how many databases are looked for below a path.
	mostDatabases = 16
	// databasesTime is how long reading settings may take. Files of a container can be those of a program or of another
	// machine, which does not answer.
	databasesTime = 5 * time.Second
	mostPrinted   = 300 // longest name or value that is printed, in characters
	unknown       = "unknown"
)

// databases finds the databases at the path, or directly below it, and reports settings that lose data as causes.
func (w *watch) databases(ctx context.Context) {
	path := w.stack.Path
	found, ok := inTime(ctx, databasesTime, func() []Database { return findDatabases(path) })
	if !ok {
		w.missing("the settings of databases", "reading them took more than %s", databasesTime)
	}

	for _, db := range found {
		w.report.Databases = append(w.report.Databases, db)
		for _, s := range db.Settings {
			if s.Loses == "" {
				continue
			}
			what := databaseNames[db.Kind] + " at " + printable(db.Path) + " has " + s.Name + " = " + s.Value + ": " + s.Loses
			w.addLie("database-unsafe", what,
				[]string{s.Name + " = " + s.Value + ", from " + s.From},
				"its figures are not those of a database that keeps what it has committed", "see docs/diagnose.md")
		}
	}
}

// inTime returns what find returns, unless that takes too long or ctx ends; find then goes on without effect.
func inTime[T any](ctx context.Context, most time.Duration, find func() T) (out T, ok bool) {
	ctx, cancel := context.WithTimeout(ctx, most)
	defer cancel()

	done := make(chan T, 1)
	go func() { done <- find() }()
	select {
	case out = <-done:
		return out, true
	case <-ctx.Done():
		return out, false
	}
}

var databaseNames = map[string]string{"postgresql": "PostgreSQL", "mysql": "MySQL or MariaDB", "sqlite": "SQLite"}

// findDatabases looks at a file, or at a directory and what is directly in it. It follows no links from there.
func findDatabases(path string) (out []Database) {
	top, err := filesWithin(path)
	if err != nil { // it is a file
		if top, err = filesWithin(filepath.Dir(path)); err != nil {
			return nil
		}
		defer top.close()
		if db, ok := sqliteAt(top, filepath.Base(path)); ok {
			out = append(out, db)
		}
		return out
	}
	defer top.close()

	if db, ok := databaseIn(top); ok {
		out = append(out, db)
	}
	all, _ := top.entries(".")
	for _, e := range all {
		if len(out) == mostDatabases {
			break
		}

		var db Database
		var ok bool
		switch {
		case e.IsDir():
			dir, err := top.find(e.Name(), unix.O_DIRECTORY|unix.O_NOFOLLOW)
			if err != nil {
				continue
			}
			db, ok = databaseIn(files{dir, top.show(e.Name())})
			dir.Close()
		case e.Type().IsRegular():
			db, ok = sqliteAt(top, e.Name())
		}
		if ok {
			out = append(out, db)
		}
	}
	return out
}

// databaseIn returns the database whose data directory this is.
func databaseIn(data files) (Database, bool) {
	switch {
	case data.exists("PG_VERSION") && data.exists("global/pg_control"):
		return postgresAt(data), true
	case data.exists("ibdata1") && data.exists("mysql"):
		return mysqlAt(data), true
	}
	return Database{}, false
}

// sqliteAt reads the header of a SQLite database: https://www.sqlite.org/fileformat2.html#the_database_header.
func sqliteAt(in files, name string) (Database, bool) {
	header := in.head(name, 100)
	if len(header) < 100 || !bytes.HasPrefix(header, []byte("SQLite format 3\x00")) {
		return Database{}, false
	}

	mode := DatabaseSetting{Name: "journal_mode", Value: "rollback journal", From: "header"}
	if header[18] == 2 {
		mode.Value = "wal"
	}
	return Database{Kind: "sqlite", Path: in.show(name), Settings: []DatabaseSetting{mode,
		{Name: "synchronous", Value: unknown, From: "each connection"}}}, true
}

// value is the value of a setting, and where it was found.
type value struct{ text, from string }

// judged returns a setting with its value, or its default, and what it loses. loses maps values to that.
func (c *config) judged(name, usual string, loses func(text string) string) DatabaseSetting {
	v, ok := c.values[name]
	switch {
	case ok:
	case c.unread != "":
		return DatabaseSetting{Name: name, Value: unknown, From: printable(c.unread)}
	default:
		v = value{usual, "default"}
	}
	return DatabaseSetting{Name: name, Value: printable(v.text), From: printable(v.from), Loses: loses(v.text)}
}

// printable returns text for one line of a terminal: whoever owns a database chooses names and values.
func printable(s string) string {
	s = strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, s)
	if runes := []rune(s); len(runes) > mostPrinted {
		return string(runes[:mostPrinted]) + "…"
	}
	return s
}

func nothing(string) string { return "" }

// settingName returns the name of a setting as it is compared.
func settingName(s string) string { return strings.ToLower(strings.ReplaceAll(s, "-", "_")) }
