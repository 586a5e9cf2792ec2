package diagnose

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"pando/internal/testing/testfs"

	"golang.org/x/sys/unix"
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

// TestPostgresSettings: the last word counts, through includes.
func TestPostgresSettings(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, map[string]string{
		"data/PG_VERSION": "15\n", "data/global/pg_control": "x",
		"data/postgresql.conf": "# fsync = on\nfsync off # a comment\nSynchronous_Commit = 'off'\n" +
			"include 'more.conf'\ninclude_if_exists = 'nothing.conf'\ninclude_dir = 'conf.d'\n",
		"data/more.conf":     "full_page_writes = no\nfsync = of\n",
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

// TestMySQLSettings: only sections that servers read count, and the binary log only if there is one.
func TestMySQLSettings(t *testing.T) {
	dir := t.TempDir()
	useMySQLFiles(t, filepath.Join(dir, "my.cnf"), filepath.Join(dir, "none.cnf"))
	write(t, dir, map[string]string{
		"data/ibdata1": "x", "data/mysql/db": "x",
		"my.cnf": "[client]\nsync_binlog=0\n[mysqld]\ninnodb-flush-log-at-trx-commit = 2 # fast\n!includedir " + dir +
			"/conf.d\n",
		"conf.d/a.cnf": "[mysqld-9.9]\nloose-innodb_doublewrite=\"DETECT_only\"\n; sync_binlog=0\n" +
			"[mysqld_safe]\nsync_binlog=7\n[mariadb]\nsync_binlog=8\ninnodb_flush_method=nosync\n",
	})
	check := func(what, want string) {
		t.Helper()
		if _, got := settingsOf(t, filepath.Join(dir, "data"), "mysql"); got != want {
			t.Errorf("%s: %s\nwant %s", what, got, want)
		}
	}
	const usual = "innodb_flush_method=chosen by the server from default"
	check("MySQL 5.7", "innodb_flush_log_at_trx_commit=2 from my.cnf!, log_bin=OFF from default, "+
		"sync_binlog=1 from default, innodb_doublewrite=DETECT_only from a.cnf!, "+usual)

	// SET PERSIST of MySQL 8 has the last word.
	write(t, dir, map[string]string{"data/mysql.ibd": "x",
		"data/mysqld-auto.cnf": `{"Version": 2, "mysql_dynamic_parse_early_variables": {"sync_binlog": {"Value": "0", ` +
			`"Metadata": {"User": "root"}}}, "mysql_static_variables": {"innodb_doublewrite": {"Value": "ON"}}}`})
	check("MySQL 8", "innodb_flush_log_at_trx_commit=2 from my.cnf!, log_bin=ON from default, "+
		"sync_binlog=0 from mysqld-auto.cnf!, innodb_doublewrite=ON from mysqld-auto.cnf, "+usual)

	// MariaDB has other sections and defaults, and knows no persisted variables.
	write(t, dir, map[string]string{"data/aria_log_control": "x", "data/mysql_upgrade_info": "10.11.6-MariaDB",
		"conf.d/a.cnf": "[mysqld-9.9]\nsync_binlog=7\n[mariadb-10.11]\ninnodb_flush_log_at_trx_commit=3\n" +
			"[client-server]\nskip-innodb-doublewrite\n"})
	check("MariaDB", "innodb_flush_log_at_trx_commit=3 from a.cnf, log_bin=OFF from default, sync_binlog=0 from default, "+
		"innodb_doublewrite=OFF from a.cnf!, "+usual)
	write(t, dir, map[string]string{"conf.d/b.cnf": "[mariadbd]\nlog-bin\n"})
	check("MariaDB with a binary log", "innodb_flush_log_at_trx_commit=3 from a.cnf, log_bin=ON from b.cnf, "+
		"sync_binlog=0 from default!, innodb_doublewrite=OFF from a.cnf!, "+usual)

	// A loop ends, and what it may have said otherwise is not known.
	write(t, dir, map[string]string{
		"conf.d/b.cnf": "[mariadbd]\nlog-bin\n!include " + dir + "/my.cnf\n[server]\nlog_bin=x\n"})
	_, got := settingsOf(t, filepath.Join(dir, "data"), "mysql")
	if !strings.HasPrefix(got, "innodb_flush_log_at_trx_commit=unknown from ") ||
		!strings.Contains(got, "log_bin=x from b.cnf") {
		t.Errorf("a loop: %s", got)
	}
}

func useMySQLFiles(t *testing.T, paths ...string) {
	old := mysqlFiles
	mysqlFiles = paths
	t.Cleanup(func() { mysqlFiles = old })
}

// TestMySQLRunning: a process that is called as the server, and works in the data directory, counts with its command
// line and environment, and the files that it sees.
func TestMySQLRunning(t *testing.T) {
	dir := t.TempDir()
	useMySQLFiles(t, filepath.Join(dir, "my.cnf"))
	write(t, dir, map[string]string{"data/ibdata1": "x", "data/mysql/db": "x", "data/aria_log_control": "x",
		"my.cnf":      "[mysqld]\nsync_binlog=2\nlog_bin\ninnodb_flush_method=fsync\n",
		"home/my.cnf": "[mysqld]\nsync_binlog=3\n", "extra.cnf": "[mysqld]\ninnodb_flush_method=O_DSYNC\n",
		"only.cnf": "[mysqld]\nsync_binlog=4\n"})
	sh, err := os.ReadFile("/bin/sh")
	if err != nil {
		t.Fatal(err)
	}
	program := filepath.Join(dir, "mariadbd")
	if err := testfs.WriteProgram(program, sh); err != nil {
		t.Fatal(err)
	}

	for _, c := range []struct {
		args []string
		want string
	}{
		{nil, "innodb_flush_log_at_trx_commit=1 from default, log_bin=ON from my.cnf, sync_binlog=3 from my.cnf!, " +
			"innodb_doublewrite=ON from default, innodb_flush_method=fsync from my.cnf"},
		{[]string{"--defaults-extra-file=" + dir + "/extra.cnf", "--innodb-flush-log-at-trx-commit", "2",
			"--skip-innodb-doublewrite", "--sync-binlog=1"},
			"innodb_flush_log_at_trx_commit=2 from command line!, log_bin=ON from my.cnf, sync_binlog=1 from command line, " +
				"innodb_doublewrite=OFF from command line!, innodb_flush_method=O_DSYNC from extra.cnf"},
		{[]string{"--defaults-file=" + dir + "/only.cnf"},
			"innodb_flush_log_at_trx_commit=1 from default, log_bin=OFF from default, sync_binlog=4 from only.cnf, " +
				"innodb_doublewrite=ON from default, innodb_flush_method=chosen by the server from default"},
		{[]string{"--no-defaults", "--log-bin"},
			"innodb_flush_log_at_trx_commit=1 from default, log_bin=ON from command line, sync_binlog=0 from default!, " +
				"innodb_doublewrite=ON from default, innodb_flush_method=chosen by the server from default"},
	} {
		cmd := exec.Command(program, append([]string{"-c", "read x", "mariadbd"}, c.args...)...)
		cmd.Dir = filepath.Join(dir, "data")
		cmd.Env = []string{"MYSQL_HOME=" + dir + "/home", "MYSQL_ROOT_PASSWORD=secret"}
		in, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		db, got := settingsOf(t, filepath.Join(dir, "data"), "mysql")
		if got != c.want || db.PID != cmd.Process.Pid {
			t.Errorf("%q: PID %d, want %d; %s\nwant %s", c.args, db.PID, cmd.Process.Pid, got, c.want)
		}
		_ = in.Close()
		_ = cmd.Wait()
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

// TestServerFiles: absolute names and links lead to what a server in a container sees. Nothing but regular files is
// opened, and nothing that waits or acts when it is read.
func TestServerFiles(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, map[string]string{
		"root/data/postgresql.conf": "include '/etc/more.conf'\ninclude_dir '/etc/conf.d'\n",
		"root/srv/real.conf":        "fsync = off\n\033full_page_writes = off\n",
		"root/srv/conf.d/1.conf":    "wal_sync_method = \033[2Jx" + strings.Repeat("x", 400) + "\n",
		"root/etc/long":             strings.Repeat("# long\n", configBytes/7+1), "root/etc/leased": "fsync = off\n"})
	link := func(to, name string) error { return os.Symlink(to, filepath.Join(dir, "root", name)) }
	for _, err := range []error{link("/srv/real.conf", "etc/more.conf"), link("../../srv/conf.d", "etc/conf.d"),
		link("../../../../../../../../dev/null", "etc/device"), link(dir+"/root/srv/real.conf", "etc/out"),
		syscall.Mkfifo(filepath.Join(dir, "root/etc/fifo"), 0o644)} {
		if err != nil {
			t.Fatal(err)
		}
	}

	top, err := os.Open(filepath.Join(dir, "root"))
	if err != nil {
		t.Fatal(err)
	}
	root := files{dir: top}
	defer root.close()
	c := &config{wanted: postgresSettings, values: map[string]value{}, root: root}
	c.readPostgres(root, "/data/postgresql.conf", 0, true)
	sync := c.judged("wal_sync_method", "fdatasync", nothing)
	if c.values["fsync"].text != "off" || !strings.HasPrefix(sync.Value, "?[2Jxx") || len(sync.Value) > 310 ||
		sync.From != "/etc/conf.d/1.conf" || c.unread != "" {
		t.Errorf("%+v, %+v", c, sync)
	}

	host, err := hostFiles()
	if err != nil {
		t.Fatal(err)
	}
	defer host.close()
	within, err := filesWithin(filepath.Join(dir, "root"))
	if err != nil {
		t.Fatal(err)
	}
	defer within.close()

	// Whoever opens a file waits for a program that has a lease on it.
	leased, err := os.OpenFile(filepath.Join(dir, "root/etc/leased"), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer leased.Close()
	if _, err := unix.FcntlInt(leased.Fd(), unix.F_SETLEASE, unix.F_WRLCK); err != nil {
		t.Fatal(err)
	}

	const none = "no such file"
	for _, x := range []struct {
		in         files
		path, want string
	}{
		{root, "/etc/fifo", "not a regular file"}, {root, "/etc/device", none},
		{root, "/etc", "not a regular file"}, {root, "/etc/out", none},
		{root, "/dev/null", none}, {root, "/etc/long", "too long"},
		{root, "/etc/leased", "resource temporarily unavailable"},
		{host, "/dev/null", "not a regular file"}, {host, "/proc/kmsg", "belongs to the kernel"},
		{host, "/proc/self/status", "belongs to the kernel"}, {host, "/proc/self/exe", "too many levels of symbolic links"},
		{within, "etc/more.conf", "leads out of"}, {within, "/etc/long", "leads out of"}, {within, "../x", "leads out of"},
		{within, "etc/conf.d/1.conf", "leads out of"},
	} {
		if b, err := x.in.read(x.path, configBytes); err == nil || !strings.Contains(err.Error(), x.want) {
			t.Errorf("%s: %d bytes, %v; want %s", x.path, len(b), err, x.want)
		}
	}
	if b, err := within.read("srv/real.conf", 100); err != nil || len(b) == 0 {
		t.Errorf("a file within: %q, %v", b, err)
	}
}

// TestUnreadSettings: a value that a file may have set otherwise is unknown, and not the default.
func TestUnreadSettings(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, map[string]string{"data/PG_VERSION": "15\n", "data/global/pg_control": "x",
		"outside.conf": "fsync = off\n"})
	check := func(what, want string) {
		t.Helper()
		if _, got := settingsOf(t, dir, "postgresql"); !strings.Contains(got, want) {
			t.Errorf("%s: %s\nwant %s", what, got, want)
		}
	}
	check("no file", "fsync=unknown from postgresql.conf could not be read: it does not exist, full_page_writes=unknown")
	write(t, dir, map[string]string{"data/postgresql.auto.conf": "fsync = off\n"})
	check("no main file", "fsync=off from postgresql.auto.conf!, full_page_writes=unknown")

	if err := os.Symlink("../outside.conf", filepath.Join(dir, "data/postgresql.conf")); err != nil {
		t.Fatal(err)
	}
	check("a link out", "full_page_writes=unknown from data")

	if err := os.Remove(filepath.Join(dir, "data/postgresql.conf")); err != nil {
		t.Fatal(err)
	}
	write(t, dir, map[string]string{"data/postgresql.auto.conf": "", "data/postgresql.conf": "fsync = off\n" +
		"full_page_writes = off\ninclude 'postgresql.conf'\nfsync = on\n"})
	check("a loop", "fsync=on from postgresql.conf, full_page_writes=unknown from postgresql.conf could not be read: "+
		"it is included too deeply")
	write(t, dir, map[string]string{"data/postgresql.conf": "include 'none.conf'\n"})
	check("a missing include", "fsync=unknown from none.conf could not be read: it does not exist")
	write(t, dir, map[string]string{
		"data/postmaster.opts": "postgres \"-c\" \"config_file=etc/x.conf\" \"-c\" \"fsync=off\""})
	check("a relative file", "fsync=off from command line!, full_page_writes=unknown from x.conf could not be read")
}

// TestDatabasesUntouched: looking for databases changes no time of access, which would be written to the disk.
func TestDatabasesUntouched(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, map[string]string{"a/PG_VERSION": "15\n", "a/global/pg_control": "x", "a/postgresql.conf": "#\n",
		"b.db": "SQLite format 3\x00" + strings.Repeat("x", 100)})
	old := time.Now().Add(-48 * time.Hour).Truncate(time.Second)
	all := []string{"a/postgresql.conf", "b.db", "a", "."}
	for _, name := range all {
		if err := os.Chtimes(filepath.Join(dir, name), old, old); err != nil {
			t.Fatal(err)
		}
	}
	if found := findDatabases(dir); len(found) != 2 {
		t.Fatalf("found %+v", found)
	}
	for _, name := range all {
		var st unix.Stat_t
		if err := unix.Stat(filepath.Join(dir, name), &st); err != nil {
			t.Fatal(err)
		}
		if st.Atim.Sec != old.Unix() {
			t.Errorf("%s was accessed", name)
		}
	}
}

// TestInTime: what does not answer does not keep diagnose waiting.
func TestInTime(t *testing.T) {
	end := make(chan struct{})
	defer close(end)
	hang := func() int { <-end; return 1 }
	if _, ok := inTime(t.Context(), time.Millisecond, hang); ok {
		t.Error("it has waited")
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, ok := inTime(ctx, time.Hour, hang); ok {
		t.Error("it has waited although it was interrupted")
	}
	if got, ok := inTime(t.Context(), time.Hour, func() int { return 2 }); !ok || got != 2 {
		t.Errorf("%d, %v", got, ok)
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

	// A copy with its files is not the directory of that server.
	other := filepath.Join(dir, "copy")
	run("pg_basebackup", "-h", dir, "-D", other)
	pid, err := os.ReadFile(filepath.Join(data, "postmaster.pid"))
	if err != nil {
		t.Fatal(err)
	}
	write(t, other, map[string]string{"postmaster.pid": string(pid)})
	copied, err := filesWithin(other)
	if err != nil {
		t.Fatal(err)
	}
	defer copied.close()
	if db := postgresAt(copied); db.PID != 0 {
		t.Errorf("a copy has the server %d", db.PID)
	}

	// In a container, the number of the process is 1, and it sees other files: /etc of this host has nothing of them.
	write(t, dir, map[string]string{"etc/pg/main.conf": "fsync = off\ninclude 'more.conf'\n",
		"etc/pg/more.conf": "wal_sync_method = open_sync\n"})
	if err := os.Remove(filepath.Join(other, "postmaster.pid")); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-ec",
		`mount --bind "$1/etc" /etc; mount --bind "$1/copy" /mnt; cd /mnt
		exec setpriv --pdeathsig KILL --reuid "$2" --regid "$3" --clear-groups "$4/postgres" -D /mnt -k "$1" -p 5433 \
			-c config_file=/etc/pg/main.conf -c hba_file=/mnt/pg_hba.conf -c ident_file=/mnt/pg_ident.conf -c listen_addresses=`,
		"sh", dir, owner.Uid, owner.Gid, filepath.Dir(bins[len(bins)-1]))
	runtime.LockOSThread() // for the rest of the test: it dies with its thread
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	ready := func() bool {
		b, _ := os.ReadFile(filepath.Join(other, "postmaster.pid"))
		return strings.Contains(string(b), "ready")
	}
	for end := time.Now().Add(20 * time.Second); !ready(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the server in the container does not start")
		}
	}
	db, _ = settingsOf(t, other, "postgresql")
	for _, s := range db.Settings {
		if said := run("psql", "-h", dir, "-p", "5433", "-d", "postgres", "-Atc", "show "+s.Name); said != s.Value {
			t.Errorf("in a container: %s: the server says %s, pando %s from %s", s.Name, said, s.Value, s.From)
		}
	}
	if db.PID == 0 || db.Settings[0].From != "/etc/pg/main.conf" || db.Settings[3].From != "/etc/pg/more.conf" ||
		db.Settings[2].From != "/mnt/postgresql.auto.conf" {
		t.Errorf("in a container: %+v", db)
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
