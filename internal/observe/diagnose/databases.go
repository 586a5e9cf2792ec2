package diagnose

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"
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
	Value string `json:"value"`
	// From is the file that sets it, "command line", "default", "header" (of a SQLite file), or "each connection", which
	// means that it is not stored anywhere.
	From string `json:"from"`
	// Loses says what a power failure costs with this value; "" if nothing.
	Loses string `json:"loses,omitempty"`
}

// mostDatabases limits how many databases are looked for below a path.
const mostDatabases = 16

// databases finds the databases at the path, or directly below it, and reports settings that lose data as causes.
func (w *watch) databases() {
	for _, db := range findDatabases(w.stack.Path) {
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

var databaseNames = map[string]string{"postgresql": "PostgreSQL", "mysql": "MySQL or MariaDB", "sqlite": "SQLite"}

// findDatabases looks at a file, or at a directory and what is directly in it. It follows no links from there.
func findDatabases(path string) (out []Database) {
	if db, ok := databaseAt(path); ok {
		out = append(out, db)
	}
	for _, e := range (serverRoot{}).entries(path) {
		if len(out) == mostDatabases {
			break
		}
		if !e.IsDir() && !e.Type().IsRegular() {
			continue
		}
		if db, ok := databaseAt(filepath.Join(path, e.Name())); ok {
			out = append(out, db)
		}
	}
	return out
}

func databaseAt(path string) (Database, bool) {
	exists := func(name string) bool {
		_, err := os.Lstat(filepath.Join(path, name))
		return err == nil
	}

	switch {
	case exists("PG_VERSION") && exists("global/pg_control"):
		return postgresAt(path), true
	case exists("ibdata1") && exists("mysql"):
		return mysqlAt(path), true
	}
	return sqliteAt(path)
}

// sqliteAt reads the header of a SQLite database: https://www.sqlite.org/fileformat2.html#the_database_header.
func sqliteAt(path string) (Database, bool) {
	header := serverRoot{}.read(path, 100)
	if len(header) < 100 || !bytes.HasPrefix(header, []byte("SQLite format 3\x00")) {
		return Database{}, false
	}

	mode := DatabaseSetting{Name: "journal_mode", Value: "rollback journal", From: "header"}
	if header[18] == 2 {
		mode.Value = "wal"
	}
	return Database{Kind: "sqlite", Path: path, Settings: []DatabaseSetting{mode,
		{Name: "synchronous", Value: "unknown", From: "each connection"}}}, true
}

// value is the value of a setting, and where it was found.
type value struct{ text, from string }

// judged returns a setting with its value, or its default, and what it loses. loses maps values to that.
func judged(values map[string]value, name, usual string, loses func(text string) string) DatabaseSetting {
	v, ok := values[name]
	if !ok {
		v = value{usual, "default"}
	}
	return DatabaseSetting{Name: name, Value: printable(v.text), From: printable(v.from), Loses: loses(v.text)}
}

func sortByName(entries []os.DirEntry) {
	slices.SortFunc(entries, func(a, b os.DirEntry) int { return strings.Compare(a.Name(), b.Name()) })
}

func nothing(string) string { return "" }
