package diagnose

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// postgresAt reads the settings of a PostgreSQL cluster: its files, and the command line of its server, which overrides
// them. Settings of one role, database or session are not visible from outside.
func postgresAt(dir string) Database {
	db := Database{Kind: "postgresql", Path: dir}
	args := splitQuoted(string(serverRoot{}.read(filepath.Join(dir, "postmaster.opts"), configBytes))) // of the last start
	if pid := postmaster(dir); pid > 0 {
		db.PID, args = pid, commandLine(pid)
	}
	options := serverOptions(args)

	// The server may see other files than this process does, but the data directory is the one that was asked for.
	// postgresql.auto.conf, which ALTER SYSTEM writes, overrides postgresql.conf.
	root := rootOf(db.PID)
	defer root.close()
	p := &postgresConfig{values: map[string]value{}, root: root}
	if o, ok := options["config_file"]; ok {
		p.read(root, o.text, 0)
	} else {
		p.read(serverRoot{}, filepath.Join(dir, "postgresql.conf"), 0)
	}
	p.read(serverRoot{}, filepath.Join(dir, "postgresql.auto.conf"), 0)
	for name, v := range options {
		p.values[name] = v
	}

	off := func(loses string) func(string) string {
		return func(text string) string {
			if isOff(text) {
				return loses
			}
			return ""
		}
	}
	db.Settings = []DatabaseSetting{
		judged(p.values, "fsync", "on", off("a power failure damages or loses the database")),
		judged(p.values, "full_page_writes", "on", off("a power failure damages pages, unless the storage writes 8 KiB at "+
			"once, as ZFS does")),
		judged(p.values, "synchronous_commit", "on", off("a power failure loses the commits of the last moment")),
		judged(p.values, "wal_sync_method", "fdatasync", nothing),
	}
	return db
}

// postmaster returns the process ID of the server that runs on a data directory, 0 if none does. A clone has the file
// of its origin's server, whose directory is another one.
func postmaster(dir string) int {
	lines := strings.Split(string(serverRoot{}.read(filepath.Join(dir, "postmaster.pid"), 4096)), "\n")
	pid, err := strconv.Atoi(strings.TrimSpace(lines[0]))
	if err != nil || pid <= 0 {
		return 0
	}

	cwd, err := os.Stat("/proc/" + strconv.Itoa(pid) + "/cwd") // PostgreSQL works in its data directory
	if err != nil {
		return 0
	}
	own, err := os.Stat(dir)
	if err != nil || !os.SameFile(cwd, own) {
		return 0
	}
	return pid
}

// isOff reports whether a boolean of PostgreSQL is false: it accepts unique prefixes of these words.
func isOff(text string) bool {
	t := strings.ToLower(text)
	return t != "" && (t == "0" || t == "of" || t == "off" || strings.HasPrefix("false", t) || strings.HasPrefix("no", t))
}

// serverOptions returns the settings on the command line of a server: -c NAME=VALUE, --NAME=VALUE, and -F.
func serverOptions(args []string) map[string]value {
	out := map[string]value{}
	set := func(assignment string) {
		if name, text, ok := strings.Cut(assignment, "="); ok {
			out[settingName(name)] = value{text, "command line"}
		}
	}

	for i, a := range args {
		switch {
		case a == "-F":
			out["fsync"] = value{"off", "command line"}
		case a == "-c" && i+1 < len(args):
			set(args[i+1])
		case strings.HasPrefix(a, "--"):
			set(a[2:])
		case strings.HasPrefix(a, "-c"):
			set(a[2:])
		}
	}
	return out
}

func settingName(s string) string { return strings.ToLower(strings.ReplaceAll(s, "-", "_")) }

// splitQuoted splits a line into words, some of them in double quotes, as postmaster.opts has them.
func splitQuoted(line string) (out []string) {
	for i, part := range strings.Split(line, `"`) {
		if i%2 == 1 {
			out = append(out, part)
		} else {
			out = append(out, strings.Fields(part)...)
		}
	}
	return out
}

// postgresConfig is what files of settings say, which may include others: the last word counts.
type postgresConfig struct {
	values map[string]value
	files  int
	root   serverRoot // of the server: what absolute paths begin at
}

// Files may include others, to this depth as in PostgreSQL; the number of files is limited, too.
const (
	deepestInclude = 10
	mostIncluded   = 100
)

// read reads a file, which root leads to.
func (p *postgresConfig) read(root serverRoot, path string, depth int) {
	if p.files++; depth > deepestInclude || p.files > mostIncluded {
		return
	}

	for line := range strings.Lines(string(root.read(path, configBytes))) {
		name, text, ok := parseSetting(line)
		if !ok {
			continue
		}

		at, from := text, p.root
		if !filepath.IsAbs(at) {
			at, from = filepath.Join(filepath.Dir(path), at), root
		}
		switch name {
		case "include", "include_if_exists":
			p.read(from, at, depth+1)
		case "include_dir":
			for _, f := range from.list(at, ".conf") {
				p.read(from, f, depth+1)
			}
		default:
			p.values[name] = value{text, path}
		}
	}
}

// parseSetting parses a line of postgresql.conf: NAME = VALUE or NAME VALUE, with the value in quotes or not, and a
// comment from # on. https://www.postgresql.org/docs/current/config-setting.html
func parseSetting(line string) (name, text string, ok bool) {
	line = strings.TrimSpace(line)
	end := strings.IndexFunc(line, func(r rune) bool { return strings.ContainsRune(" \t=#'", r) })
	if end <= 0 {
		return "", "", false
	}

	name = strings.ToLower(line[:end])
	rest := strings.TrimSpace(line[end:])
	rest = strings.TrimSpace(strings.TrimPrefix(rest, "="))
	if quoted, is := strings.CutPrefix(rest, "'"); is {
		text, ok = unquote(quoted)
		return name, text, ok
	}

	text, _, _ = strings.Cut(rest, "#")
	text = strings.TrimSpace(text)
	return name, text, text != ""
}

// unquote reads to the end of a quoted value, in which two quotes and \' stand for one.
func unquote(s string) (string, bool) {
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		switch {
		case s[i] == '\\' && i+1 < len(s):
			i++
			b.WriteByte(s[i])
		case s[i] == '\'' && i+1 < len(s) && s[i+1] == '\'':
			i++
			b.WriteByte('\'')
		case s[i] == '\'':
			return b.String(), true
		default:
			b.WriteByte(s[i])
		}
	}
	return "", false
}
