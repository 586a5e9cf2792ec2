package diagnose

import (
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
)

// settingsOf returns the settings of the only database found at a path, as "NAME=VALUE from FILE".
func settingsOf(t *testing.T, path, kind string) (db Database, settings string) {
	t.Helper()
	found := findDatabases(path)
	if len(found) != 1 || found[0].Kind != kind {
		t.Fatalf("found %+v, want one %s", found, kind)
	}
	var out []string
	for _, s := range found[0].Settings {
		from := filepath.Base(s.From)
		if s.Loses != "" {
			from += "!"
		}
		out = append(out, s.Name+"="+s.Value+" from "+from)
	}
	return found[0], strings.Join(out, ", ")
}

func write(t *testing.T, dir string, files map[string]string) {
	t.Helper()
	for name, text := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// TestPostgresSettings: the last word counts, through includes, and a loop of them ends.
func TestPostgresSettings(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, map[string]string{
		"data/PG_VERSION": "15\n", "data/global/pg_control": "x",
		"data/postgresql.conf": "# fsync = on\nfsync off # a comment\nSynchronous_Commit = 'off'\n" +
			"include 'more.conf'\ninclude_if_exists = 'nothing.conf'\ninclude_dir = 'conf.d'\n",
		"data/more.conf":     "full_page_writes = no\ninclude 'postgresql.conf'\nfsync = of\n",
		"data/conf.d/1.conf": "fsync = on\nwal_sync_method = open_datasync\n", "data/conf.d/1.txt": "fsync = off\n",
		"data/postgresql.auto.conf": "synchronous_commit = 'it''s'\n",
	})
	const want = "fsync=on from 1.conf, full_page_writes=no from more.conf!, synchronous_commit=it's from " +
		"postgresql.auto.conf, wal_sync_method=open_datasync from 1.conf"
	if _, got := settingsOf(t, dir, "postgresql"); got != want {
		t.Errorf("%s\nwant %s", got, want)
	}

	// The command line of the last start overrides all, and says where the files are, as on Debian.
	write(t, dir, map[string]string{"etc/postgresql.conf": "full_page_writes = on\nfsync = on\n",
		"data/postmaster.opts": fmt.Sprintf("/usr/bin/postgres \"-F\" \"-c\" \"config_file=%s/etc/postgresql.conf\" "+
			"\"--wal-sync-method=fsync\"\n", dir)})
	const now = "fsync=off from command line!, full_page_writes=on from postgresql.conf, synchronous_commit=it's from " +
		"postgresql.auto.conf, wal_sync_method=fsync from command line"
	if _, got := settingsOf(t, dir, "postgresql"); got != now {
		t.Errorf("%s\nwant %s", got, now)
	}
}

// TestMySQLSettings: only sections that servers read count.
func TestMySQLSettings(t *testing.T) {
	dir := t.TempDir()
	old := mysqlFiles
	mysqlFiles = []string{filepath.Join(dir, "my.cnf"), filepath.Join(dir, "none.cnf")}
	t.Cleanup(func() { mysqlFiles = old })
	write(t, dir, map[string]string{
		"data/ibdata1": "x", "data/mysql/db": "x",
		"my.cnf": "[client]\nsync_binlog=0\n[mysqld]\ninnodb-flush-log-at-trx-commit = 2 # fast\n!includedir " + dir +
			"/conf.d\n!include " + dir + "/my.cnf\n",
		"conf.d/a.cnf": "[mariadb-10.11]\ninnodb_doublewrite=\"OFF\"\n; sync_binlog=0\n",
	})
	const want = "innodb_flush_log_at_trx_commit=2 from my.cnf!, sync_binlog=1 from default, " +
		"innodb_doublewrite=OFF from a.cnf!, innodb_flush_method=chosen by the server from default"
	if _, got := settingsOf(t, filepath.Join(dir, "data"), "mysql"); got != want {
		t.Errorf("%s\nwant %s", got, want)
	}
}

// TestSQLiteSettings reads what sqlite3 has written. A FIFO beside it does not make pando wait.
func TestSQLiteSettings(t *testing.T) {
	if _, err := exec.LookPath("sqlite3"); err != nil {
		t.Skipf("SKIPPED: %v: run make deps", err)
	}
	for mode, want := range map[string]string{"wal": "wal", "delete": "rollback journal"} {
		dir := t.TempDir()
		cmd := exec.Command("sqlite3", filepath.Join(dir, "shop.db"), "pragma journal_mode="+mode+"; create table a (b)")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		if err := syscall.Mkfifo(filepath.Join(dir, "fifo"), 0o644); err != nil {
			t.Fatal(err)
		}
		want := "journal_mode=" + want + " from header, synchronous=unknown from each connection"
		if _, got := settingsOf(t, dir, "sqlite"); got != want {
			t.Errorf("%s: %s\nwant %s", mode, got, want)
		}
	}
}

// TestServerRoot: absolute names and links lead to what a server in a container sees, and nothing but regular files is
// opened, whatever they lead to.
func TestServerRoot(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, map[string]string{"data/PG_VERSION": "15\n", "data/global/pg_control": "x",
		"data/postgresql.conf": "include '/etc/more.conf'\ninclude '/etc/fifo'\ninclude '/etc/device'\n" +
			"include_dir '/etc/conf.d'\n",
		"root/srv/real.conf":     "fsync = off\n\033full_page_writes = off\n",
		"root/srv/conf.d/1.conf": "wal_sync_method = \033[2Jx\n"})
	for _, err := range []error{os.MkdirAll(filepath.Join(dir, "root/etc"), 0o755),
		os.Symlink("/srv/real.conf", filepath.Join(dir, "root/etc/more.conf")),
		os.Symlink("../../srv/conf.d", filepath.Join(dir, "root/etc/conf.d")),
		os.Symlink("../../../../../../../../dev/null", filepath.Join(dir, "root/etc/device")),
		syscall.Mkfifo(filepath.Join(dir, "root/etc/fifo"), 0o644)} {
		if err != nil {
			t.Fatal(err)
		}
	}

	root, err := os.Open(filepath.Join(dir, "root"))
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	p := &postgresConfig{values: map[string]value{}, root: serverRoot{root}}
	p.read(serverRoot{}, filepath.Join(dir, "data/postgresql.conf"), 0)
	sync := judged(p.values, "wal_sync_method", "fdatasync", nothing)
	if p.values["fsync"].text != "off" || sync.Value != "?[2Jx" || sync.From != "/etc/conf.d/1.conf" {
		t.Errorf("%+v, %+v", p.values, sync)
	}

	for _, name := range []string{"/etc/fifo", "/etc/device", "/etc", "/dev/null"} {
		if b := (serverRoot{root}).read(name, 10); b != nil {
			t.Errorf("%s was read", name)
		}
	}
	if (serverRoot{}).read("/dev/null", 10) != nil {
		t.Error("a device was read")
	}
}

// TestPostgresRunning asks a real server. Its settings are those that pando reads, and pando tells it from the server
// of a copy.
func TestPostgresRunning(t *testing.T) {
	bins, _ := filepath.Glob("/usr/lib/postgresql/*/bin/postgres")
	owner, err := user.Lookup("postgres")
	if len(bins) == 0 || err != nil || os.Geteuid() != 0 {
		t.Skip("SKIPPED: it needs root, PostgreSQL and its user: run make deps, and the tests as root")
	}

	dir, err := os.MkdirTemp("", "p")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	uid, _ := strconv.Atoi(owner.Uid)
	gid, _ := strconv.Atoi(owner.Gid)
	if err := os.Chown(dir, uid, gid); err != nil {
		t.Fatal(err)
	}

	data := filepath.Join(dir, "data")
	run := func(name string, args ...string) string {
		t.Helper()
		cmd := exec.Command(filepath.Join(filepath.Dir(bins[len(bins)-1]), name), args...)
		cmd.Dir = dir
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}}
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%s: %v: %s", name, err, out)
		}
		return strings.TrimSpace(string(out))
	}
	run("initdb", "-D", data, "-A", "trust", "-N")
	run("pg_ctl", "start", "-w", "-D", data, "-l", filepath.Join(dir, "log"),
		"-o", "-c listen_addresses= -c full_page_writes=off -k "+dir)
	defer run("pg_ctl", "stop", "-D", data, "-m", "immediate")
	run("psql", "-h", dir, "-d", "postgres", "-c", "alter system set synchronous_commit = off")
	run("psql", "-h", dir, "-d", "postgres", "-c", "select pg_reload_conf()")

	db, _ := settingsOf(t, dir, "postgresql")
	for _, s := range db.Settings {
		if said := run("psql", "-h", dir, "-d", "postgres", "-Atc", "show "+s.Name); said != s.Value {
			t.Errorf("%s: the server says %s, pando %s from %s", s.Name, said, s.Value, s.From)
		}
	}
	if db.PID == 0 || !slices.ContainsFunc(db.Settings, func(s DatabaseSetting) bool { return s.Loses != "" }) {
		t.Errorf("%+v", db)
	}

	other := filepath.Join(dir, "copy")
	run("pg_basebackup", "-h", dir, "-D", other)
	pid, err := os.ReadFile(filepath.Join(data, "postmaster.pid"))
	if err != nil {
		t.Fatal(err)
	}
	write(t, other, map[string]string{"postmaster.pid": string(pid)})
	if db := postgresAt(other); db.PID != 0 {
		t.Errorf("a copy has the server %d", db.PID)
	}
}

func FuzzParseSetting(f *testing.F) {
	for _, line := range []string{"fsync = off", "fsync 'o''ff' # x", "include_dir='a'", "x='a\\'b'", "='"} {
		f.Add(line)
	}
	f.Fuzz(func(t *testing.T, line string) {
		name, _, ok := parseSetting(line)
		if ok && (name == "" || strings.ContainsAny(name, " \t=#'")) {
			t.Errorf("%q has the name %q", line, name)
		}
		splitQuoted(line)
	})
}
