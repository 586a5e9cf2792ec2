package diagnose

import (
	"errors"
	"path/filepath"
	"strings"
)

var postgresSettings = []string{"fsync", "full_page_writes", "synchronous_commit", "wal_sync_method"}

// postgresAt reads the settings of a PostgreSQL cluster: its files, and the command line of its server, which overrides
// them. Settings of one role, database or session are not visible from outside.
func postgresAt(data files) Database {
	db := Database{Kind: "postgresql", Path: data.within}
	c := &config{wanted: postgresSettings, values: map[string]value{}}

	// Without a server, postmaster.opts has the command line of its last start.
	server := postmaster(data)
	defer server.close()
	var args []string
	var err error
	if server != nil {
		db.PID = server.pid
		args, err = server.strings("cmdline")
	} else if b, unread := data.read("postmaster.opts", configBytes); unread == nil {
		args = splitQuoted(string(b))
	}
	options := serverOptions(args)

	// postgresql.auto.conf, which ALTER SYSTEM writes, overrides postgresql.conf.
	root, unseen := server.files()
	defer root.close()
	if err = errors.Join(err, unseen); err == nil {
		c.root = root
		in, dir := server.locate(data, root)
		main, at := filepath.Join(dir, "postgresql.conf"), in
		file, elsewhere := options["config_file"], options["-D"]
		switch {
		case filepath.IsAbs(file):
			main, at = file, root
		case filepath.IsAbs(elsewhere) && !data.exists("postgresql.conf"):
			main, at = filepath.Join(elsewhere, "postgresql.conf"), root
		}
		c.readPostgres(at, main, 0, true)
		if file != "" && !filepath.IsAbs(file) {
			c.skip(file, "it is relative to where the server was started")
		}
		c.readPostgres(in, filepath.Join(dir, "postgresql.auto.conf"), 0, false)
	} else {
		c.skip("what the server sees", err)
	}
	for name, text := range options {
		c.set(name, text, "command line")
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
		c.judged("fsync", "on", off("a power failure damages or loses the database")),
		c.judged("full_page_writes", "on", off("a power failure damages pages, unless the storage writes 8 KiB at "+
			"once, as ZFS does")),
		c.judged("synchronous_commit", "on", off("a power failure loses the commits of the last moment")),
		c.judged("wal_sync_method", "fdatasync", nothing),
	}
	return db
}

// postmaster returns the server that runs on a data directory, nil if none does. A clone has the file of its origin's
// server, whose directory is another one. The file has the number that the process has in its own container.
func postmaster(data files) *server {
	own, _, _ := strings.Cut(string(data.head("postmaster.pid", 4096)), "\n")
	if own = strings.TrimSpace(own); own == "" {
		return nil
	}
	return findServer(data, func(s *server) bool {
		for line := range strings.Lines(slurp(s.path("status"))) {
			if all, is := strings.CutPrefix(line, "NSpid:"); is {
				numbers := strings.Fields(all)
				return len(numbers) > 0 && numbers[len(numbers)-1] == own
			}
		}
		return false
	})
}

// isOff reports whether a boolean of PostgreSQL is false: it accepts unique prefixes of these words.
func isOff(text string) bool {
	t := strings.ToLower(text)
	return t != "" && (t == "0" || t == "of" || t == "off" || strings.HasPrefix("false", t) || strings.HasPrefix("no", t))
}

// serverOptions returns the settings on the command line of a server: -c NAME=VALUE, --NAME=VALUE, -F, and -D.
func serverOptions(args []string) map[string]string {
	out := map[string]string{}
	set := func(assignment string) {
		if name, text, ok := strings.Cut(assignment, "="); ok {
			out[settingName(name)] = text
		}
	}

	for i, a := range args {
		switch {
		case a == "-F":
			out["fsync"] = "off"
		case a == "-c" && i+1 < len(args):
			set(args[i+1])
		case a == "-D" && i+1 < len(args):
			out["-D"] = args[i+1]
		case strings.HasPrefix(a, "-D"):
			out["-D"] = a[2:]
		case strings.HasPrefix(a, "--"):
			set(a[2:])
		case strings.HasPrefix(a, "-c"):
			set(a[2:])
		}
	}
	return out
}

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

// deepestInclude is how deep files may include others, as in PostgreSQL.
const deepestInclude = 10

// readPostgres reads a file, and what it includes.
func (c *config) readPostgres(in files, path string, depth int, required bool) {
	if depth > deepestInclude {
		c.skip(in.show(path), "it is included too deeply")
		return
	}

	for line := range strings.Lines(c.file(in, path, required)) {
		name, text, ok := parseSetting(line)
		if !ok {
			continue
		}

		at, from := text, c.root
		if !filepath.IsAbs(at) {
			at, from = filepath.Join(filepath.Dir(path), at), in
		}
		switch name {
		case "include", "include_if_exists":
			c.readPostgres(from, at, depth+1, name == "include")
		case "include_dir":
			for _, f := range c.list(from, at, ".conf") {
				c.readPostgres(from, f, depth+1, true)
			}
		default:
			c.set(name, text, in.show(path))
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
