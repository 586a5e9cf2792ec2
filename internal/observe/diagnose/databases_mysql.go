package diagnose

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// mysqlFiles are the files of settings that MySQL and MariaDB read, in their order on Debian and elsewhere.
var mysqlFiles = []string{"/etc/my.cnf", "/etc/mysql/my.cnf"}

// mysqlAt reads the settings of MySQL or MariaDB: the files that the server sees which runs on the directory, or this
// host's if none does, and its command line. SET GLOBAL changes them without a trace outside of the server.
func mysqlAt(dir string) Database {
	db := Database{Kind: "mysql", Path: dir}
	db.PID = mysqlServer(dir)
	root := rootOf(db.PID)
	defer root.close()
	m := &mysqlConfig{values: map[string]value{}}
	for _, f := range mysqlFiles {
		m.read(root, f, 0)
	}
	m.read(serverRoot{}, filepath.Join(dir, "my.cnf"), 0)

	if db.PID > 0 {
		for _, a := range commandLine(db.PID) {
			if name, text, ok := strings.Cut(strings.TrimPrefix(a, "--"), "="); ok && strings.HasPrefix(a, "--") {
				m.values[settingName(name)] = value{text, "command line"}
			}
		}
	}

	loses := func(what string, bad ...string) func(string) string {
		return func(text string) string {
			for _, b := range bad {
				if strings.EqualFold(text, b) {
					return what
				}
			}
			return ""
		}
	}
	db.Settings = []DatabaseSetting{
		judged(m.values, "innodb_flush_log_at_trx_commit", "1", loses("a power failure loses the commits of about a second",
			"0", "2")),
		judged(m.values, "sync_binlog", "1", loses("a power failure loses the end of the binary log, which replicas and "+
			"point-in-time recovery need", "0")),
		judged(m.values, "innodb_doublewrite", "ON", loses("a power failure damages pages, unless the storage writes 16 KiB "+
			"at once, as ZFS can", "0", "OFF")),
		judged(m.values, "innodb_flush_method", "chosen by the server", loses("a power failure damages or loses the database",
			"nosync")),
	}
	return db
}

// mysqlServer returns the process ID of the server that works in a directory, 0 if none does.
func mysqlServer(dir string) int {
	own, err := os.Stat(dir)
	if err != nil {
		return 0
	}
	comms, _ := filepath.Glob("/proc/[0-9]*/comm")
	for _, f := range comms {
		if name := strings.TrimSpace(slurp(f)); name != "mysqld" && name != "mariadbd" {
			continue
		}
		cwd, err := os.Stat(filepath.Join(filepath.Dir(f), "cwd"))
		if err == nil && os.SameFile(cwd, own) {
			pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(f)))
			return pid
		}
	}
	return 0
}

// mysqlConfig is what files of settings say to servers: the last word counts.
type mysqlConfig struct {
	values map[string]value
	files  int
}

func (m *mysqlConfig) read(root serverRoot, path string, depth int) {
	if m.files++; depth > deepestInclude || m.files > mostIncluded {
		return
	}

	section := ""
	for line := range strings.Lines(string(root.read(path, configBytes))) {
		line = strings.TrimSpace(line)
		switch {
		case line == "", line[0] == '#', line[0] == ';':
		case strings.HasPrefix(line, "!includedir "):
			dir := strings.TrimSpace(strings.TrimPrefix(line, "!includedir "))
			for _, f := range root.list(dir, ".cnf") {
				m.read(root, f, depth+1)
			}
		case strings.HasPrefix(line, "!include "):
			m.read(root, strings.TrimSpace(strings.TrimPrefix(line, "!include ")), depth+1)
		case line[0] == '[':
			section = strings.Trim(line, "[] ")
		case isServerSection(section):
			name, text, _ := strings.Cut(line, "=")
			text, _, _ = strings.Cut(text, " #")
			m.values[settingName(strings.TrimSpace(name))] = value{strings.Trim(strings.TrimSpace(text), `"'`), path}
		}
	}
}

// isServerSection reports whether servers read a section, such as [mysqld] or [mariadb-10.11].
func isServerSection(name string) bool {
	for _, prefix := range []string{"mysqld", "mariadbd", "mariadb", "server"} {
		if name == prefix || strings.HasPrefix(name, prefix+"-") {
			return true
		}
	}
	return false
}
