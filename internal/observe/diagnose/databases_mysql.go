package diagnose

import (
	"encoding/json"
	"errors"
	"path/filepath"
	"slices"
	"strings"
)

// mysqlFiles are the files of settings that MySQL and MariaDB read, in their order on Debian and elsewhere.
var mysqlFiles = []string{"/etc/my.cnf", "/etc/mysql/my.cnf"}

var mysqlSettings = []string{"innodb_flush_log_at_trx_commit", "log_bin", "sync_binlog", "innodb_doublewrite",
	"innodb_flush_method"}

// mysqlAt reads the settings of MySQL or MariaDB: the files that the server sees which runs on the directory, or this
// host's if none does, and its command line. SET GLOBAL changes them without a trace outside of the server.
func mysqlAt(data files) Database {
	db := Database{Kind: "mysql", Path: data.within}
	m := mysqlConfig{config: config{wanted: mysqlSettings, values: map[string]value{}},
		maria: data.exists("aria_log_control")}
	for _, f := range []string{"mysql_upgrade_info", "mariadb_upgrade_info"} {
		if parts := strings.SplitN(string(data.head(f, 100)), ".", 3); len(parts) == 3 {
			m.version = parts[0] + "." + parts[1]
		}
	}

	server := findServer(data, func(s *server) bool {
		name := strings.TrimSpace(slurp(s.path("comm")))
		return name == "mysqld" || name == "mariadbd"
	})
	defer server.close()
	var args, environ []string
	root, err := server.files()
	defer root.close()
	if server != nil {
		var err1, err2 error
		db.PID = server.pid
		args, err1 = server.strings("cmdline")
		environ, err2 = server.strings("environ")
		err = errors.Join(err, err1, err2)
	}

	if err == nil {
		m.root = root
		m.readAll(args, environ)
	} else {
		m.skip("what the server sees", err)
	}
	m.readOptions(args)
	if !m.maria {
		m.readPersisted(data)
	}

	// MariaDB has no binary log by default, MySQL has one since 8.0, which keeps its tables in mysql.ibd.
	log, sync := "OFF", "1"
	switch {
	case m.maria:
		sync = "0"
	case data.exists("mysql.ibd"):
		log = "ON"
	}
	binlog := m.judged("log_bin", log, nothing)
	logs := binlog.Value != unknown && !isOneOf(binlog.Value, "0", "OFF")

	loses := func(what string, bad ...string) func(string) string {
		return func(text string) string {
			if isOneOf(text, bad...) {
				return what
			}
			return ""
		}
	}
	db.Settings = []DatabaseSetting{
		m.judged("innodb_flush_log_at_trx_commit", "1",
			loses("a power failure loses the commits of about a second", "0", "2")),
		binlog,
		m.judged("sync_binlog", sync, func(text string) string {
			if !logs || text == "1" {
				return ""
			}
			return "a power failure loses the end of the binary log, which replicas and point-in-time recovery need"
		}),
		m.judged("innodb_doublewrite", "ON", loses("a power failure damages pages, unless the storage writes 16 KiB "+
			"at once, as ZFS can", "0", "OFF", "FALSE", "DETECT_ONLY")),
		m.judged("innodb_flush_method", "chosen by the server", loses("a power failure damages or loses the database",
			"nosync")),
	}
	return db
}

func isOneOf(text string, words ...string) bool {
	return slices.ContainsFunc(words, func(w string) bool { return strings.EqualFold(text, w) })
}

// mysqlConfig is what files of settings say to MySQL or MariaDB.
type mysqlConfig struct {
	config
	maria   bool   // the server is MariaDB
	version string // for example "10.11"; empty if not known
}

// readAll reads the files that a server with this command line and environment reads.
func (m *mysqlConfig) readAll(args, environ []string) {
	named := func(list []string, prefix string) string {
		for _, s := range list {
			if text, ok := strings.CutPrefix(s, prefix); ok {
				return text
			}
		}
		return ""
	}
	if slices.Contains(args, "--no-defaults") {
		return
	}
	if only := named(args, "--defaults-file="); only != "" {
		m.readNamed(only)
		return
	}

	for _, f := range mysqlFiles {
		m.readMySQL(f, 0, false)
	}
	for _, name := range []string{"MARIADB_HOME=", "MYSQL_HOME="} {
		if home := named(environ, name); home != "" && (m.maria || name == "MYSQL_HOME=") {
			m.readMySQL(filepath.Join(home, "my.cnf"), 0, false)
			break
		}
	}
	if extra := named(args, "--defaults-extra-file="); extra != "" {
		m.readNamed(extra)
	}
}

// readNamed reads a file that the command line names.
func (m *mysqlConfig) readNamed(file string) {
	if !filepath.IsAbs(file) {
		m.skip(file, "it is relative to where the server was started")
		return
	}
	m.readMySQL(file, 0, true)
}

// readOptions reads a command line.
func (m *mysqlConfig) readOptions(args []string) {
	for i, a := range args {
		option, is := strings.CutPrefix(a, "--")
		if !is {
			continue
		}
		name, text, set := strings.Cut(option, "=")
		takesNext := !set && !slices.Contains([]string{"log_bin", "innodb_doublewrite"}, settingName(name))
		if takesNext && i+1 < len(args) && !strings.HasPrefix(args[i+1], "-") {
			text, set = args[i+1], true
		}
		m.option(name, text, set, "command line")
	}
}

// option sets what an option says: NAME=VALUE, NAME to turn something on, or skip_NAME.
func (m *mysqlConfig) option(name, text string, set bool, from string) {
	name = strings.TrimPrefix(settingName(name), "loose_")
	for _, prefix := range []string{"skip_", "disable_"} {
		if bare, is := strings.CutPrefix(name, prefix); is {
			name, text, set = bare, "OFF", true
		}
	}
	name = strings.TrimPrefix(name, "enable_")
	if !set || text == "" {
		text = "ON"
	}
	m.set(name, text, from)
}

// readPersisted reads what SET PERSIST has stored, which overrides even the command line:
// https://dev.mysql.com/doc/refman/8.0/en/persisted-system-variables.html
func (m *mysqlConfig) readPersisted(data files) {
	const name = "mysqld-auto.cnf"
	text := m.file(data, name, false)
	if text == "" {
		return
	}

	var all any
	if err := json.Unmarshal([]byte(text), &all); err != nil {
		m.skip(data.show(name), err)
		return
	}
	m.persisted(all, data.show(name))
}

// persisted finds "NAME": {"Value": "TEXT"} at any depth, which differs from version to version.
func (m *mysqlConfig) persisted(in any, from string) {
	object, _ := in.(map[string]any)
	for name, inner := range object {
		entry, _ := inner.(map[string]any)
		if text, is := entry["Value"].(string); is {
			m.set(settingName(name), text, from)
		} else {
			m.persisted(inner, from)
		}
	}
}

// readMySQL reads a file, and what it includes.
func (m *mysqlConfig) readMySQL(path string, depth int, required bool) {
	if depth > deepestInclude {
		m.skip(path, "it is included too deeply")
		return
	}

	section := ""
	for line := range strings.Lines(m.file(m.root, path, required)) {
		line = strings.TrimSpace(line)
		switch {
		case line == "", line[0] == '#', line[0] == ';':
		case strings.HasPrefix(line, "!includedir "):
			for _, f := range m.list(m.root, strings.TrimSpace(strings.TrimPrefix(line, "!includedir ")), ".cnf") {
				m.readMySQL(f, depth+1, true)
			}
		case strings.HasPrefix(line, "!include "):
			m.readMySQL(strings.TrimSpace(strings.TrimPrefix(line, "!include ")), depth+1, false)
		case line[0] == '[':
			section = strings.Trim(line, "[] ")
		case m.isServerSection(section):
			name, text, set := strings.Cut(line, "=")
			text, _, _ = strings.Cut(text, " #")
			m.option(strings.TrimSpace(name), strings.Trim(strings.TrimSpace(text), `"'`), set, path)
		}
	}
}

// isServerSection reports whether the server reads a section, such as [mysqld] or [mariadb-10.11].
func (m *mysqlConfig) isServerSection(name string) bool {
	sections := []string{"mysqld", "server"}
	if m.maria {
		sections = append(sections, "mariadb", "mariadbd", "client-server")
	}
	if slices.Contains(sections, name) {
		return true
	}
	kind, version, is := strings.Cut(name, "-")
	return is && slices.Contains(sections, kind) && (m.version == "" || m.version == version)
}
