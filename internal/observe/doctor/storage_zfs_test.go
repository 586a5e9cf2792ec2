package doctor

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"pando/internal/linux/loopdev"
	"pando/internal/testing/testfs"

	"golang.org/x/sys/unix"
)

// What `zpool status -P -L -p` prints, but for the names.
const poolStatusText = `  pool: tank
 state: DEGRADED
status: One or more devices has been taken offline by the administrator.
	Sufficient replicas exist for the pool to continue functioning in a
	degraded state.
action: Online the device using 'zpool online' or replace the device with
	'zpool replace'.
  scan: resilver in progress since Sun Nov  8 00:24:04 2026
	1.02G / 3.10G scanned at 104M/s, 0B / 3.10G issued
	0B resilvered, 0.00% done, no estimated completion time
config:

	NAME                STATE     READ WRITE CKSUM
	tank                DEGRADED     0     0     0
	  mirror-0          DEGRADED     0     0     0
	    /dev/sda1       ONLINE       0     0     0  block size: 512B configured, 4096B native
	    /dev/sdb1       OFFLINE      1     2     3
	  /var/tmp/file     ONLINE       0     0     0
	logs	
	  /dev/nvme0n1p1    ONLINE       0     0     0
	spares
	  /dev/sdc          AVAIL   

errors: 2 data errors, use '-v' for a list
`

func TestParsePoolStatus(t *testing.T) {
	s := parsePoolStatus(poolStatusText, "tank")
	if s.state != "DEGRADED" || !strings.HasPrefix(s.status, "One or more devices") ||
		!strings.HasSuffix(s.status, "a degraded state.") || !strings.HasPrefix(s.errors, "2 data errors") {
		t.Errorf("%+v", s)
	}
	want := []vdev{
		{name: "mirror-0", top: "mirror-0", state: "DEGRADED"},
		{name: "/dev/sda1", path: "/dev/sda1", top: "mirror-0", state: "ONLINE",
			note: "block size: 512B configured, 4096B native"},
		{name: "/dev/sdb1", path: "/dev/sdb1", top: "mirror-0", state: "OFFLINE", errors: [3]int64{1, 2, 3}},
		{name: "/var/tmp/file", path: "/var/tmp/file", top: "/var/tmp/file", state: "ONLINE"},
		{name: "/dev/nvme0n1p1", path: "/dev/nvme0n1p1", top: "/dev/nvme0n1p1", class: "logs", state: "ONLINE"},
		{name: "/dev/sdc", path: "/dev/sdc", top: "/dev/sdc", class: "spares", state: "AVAIL"},
	}
	if !slices.Equal(s.vdevs, want) {
		t.Errorf("%+v\nnot\n%+v", s.vdevs, want)
	}
	at := time.Date(2026, 11, 8, 0, 24, 4, 0, time.Local)
	for text, want := range map[string]scan{
		s.scan:                           {"resilver", "running", at},
		"none requested":                 {},
		"":                               {},
		"scrub paused since " + dateText: {"scrub", "paused", at},
		"scrub repaired 0B in 00:00:03 with 0 errors on " + dateText:           {"scrub", "done", at},
		"scrub repaired 12K in 1 days 02:03:04 with 2 errors on " + dateText:   {"scrub", "done", at},
		"resilvered 1.2M in 00:00:01 with 0 errors on " + dateText:             {"resilver", "done", at},
		"scrub canceled on " + dateText:                                        {"scrub", "canceled", at},
		"scrub in progress since " + dateText + " 1.02G / 3.10G scanned at 1M": {"scrub", "running", at},
	} {
		if got := parseScan(text); got != want {
			t.Errorf("%q: %+v, not %+v", text, got, want)
		}
	}
}

const dateText = "Sun Nov  8 00:24:04 2026"

// A scrub is overdue by its age, or by the pool's if there was none.
func TestOverdue(t *testing.T) {
	old, young := time.Now().AddDate(0, 0, -scrubDays-3), time.Now().AddDate(0, 0, -3)
	for what, c := range map[string]struct {
		scan    scan
		created time.Time
		want    string
	}{
		"long ago":         {scan{"scrub", "done", old}, old, "scrub-overdue"},
		"lately":           {scan{"scrub", "done", young}, old, ""},
		"never":            {scan{}, old, "scrub-overdue"},
		"new":              {scan{}, young, ""},
		"age not known":    {scan{}, time.Time{}, ""},
		"not to its end":   {scan{"scrub", "canceled", young}, old, "scrub-overdue"},
		"resilvered since": {scan{"resilver", "done", young}, old, ""},
		"now":              {scan{"scrub", "running", young}, old, "scrub-running"},
		"resilver now":     {scan{"resilver", "running", young}, young, "scrub-running"},
	} {
		var r Report
		r.findOverdueScrub("tank", "zpool tank", c.scan, c.created, "", "")
		got := ""
		if len(r.Findings) > 0 {
			got = r.Findings[0].Code
		}
		if got != c.want || len(r.Findings) > 1 {
			t.Errorf("%s: %s, not %q", what, asJSON(r.Findings), c.want)
		}
	}
}

func TestZFSSync(t *testing.T) {
	p := testfs.ZFS(t, 0)
	for _, d := range []string{"/a", "/a/b", "/c"} {
		tool(t, "zfs", "create", p+d)
	}
	c := examine(t, "sync-honoured", nil)
	for _, d := range []string{p, p + "/a", p + "/a/b"} {
		nothing(t, c, d)
	}
	tool(t, "zfs", "set", "sync=disabled", p+"/a")
	c = examine(t, "sync-honoured", nil)
	f := only(t, c, p+"/a", "sync-zfs-disabled", Critical)
	if m := measured(t, f, "datasets"); m.Low != 2 {
		t.Errorf("it holds for %v datasets, not 2", m.Low)
	}
	nothing(t, c, p)
	nothing(t, c, p+"/a/b")
	nothing(t, c, p+"/c")
	sh(t, f.Do[0].Commands[0])
	nothing(t, examine(t, "sync-honoured", nil), p+"/a")

	const name = "zfs_nocacheflush"
	parameter := "/sys/module/zfs/parameters/" + name
	nothing(t, examine(t, "sync-honoured", nil), name)
	if err := os.WriteFile(parameter, []byte("1"), 0); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.WriteFile(parameter, []byte("0"), 0) })
	f = only(t, examine(t, "sync-honoured", nil), name, "sync-zfs-nocacheflush", Critical)
	sh(t, f.Do[0].Commands[0])
	nothing(t, examine(t, "sync-honoured", nil), name)
}

func TestZFSLogDevice(t *testing.T) {
	p := testfs.ZFS(t, 0)
	d := attach(t, filepath.Join(t.TempDir(), "log"), 64<<20, loopdev.Options{})
	nothing(t, examine(t, "write-cache", nil), d.Path())
	tool(t, "zpool", "add", p, "log", d.Path())
	t.Cleanup(func() { sh(t, "zpool remove "+p+" "+d.Path()) })
	r := examine(t, "write-cache", nil)
	f := only(t, r, d.Path(), "write-cache-log", Note)
	if m := measured(t, f, "pool"); m.Text != p {
		t.Errorf("the pool is %s", m.Text)
	}

	// A mirror protects it.
	f = only(t, r, p, "write-cache-log-single", Warning)
	second := attach(t, filepath.Join(t.TempDir(), "log"), 64<<20, loopdev.Options{})
	sh(t, strings.Replace(f.Do[0].Commands[0], "NEWDISK", second.Path(), 1))
	nothing(t, examine(t, "write-cache", nil), p)
	tool(t, "zpool", "detach", p, second.Path())
}

func TestZFSAlignment(t *testing.T) {
	p := testfs.ZFS(t, 0) // made with ashift=12
	nothing(t, examine(t, "alignment", nil), p)
	file := filepath.Join(t.TempDir(), "second")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(file, 64<<20); err != nil {
		t.Fatal(err)
	}
	tool(t, "zpool", "add", "-f", "-o", "ashift=9", p, file)
	c := examine(t, "alignment", nil)
	if rows, err := ashifts(t.Context(), p); err != nil {
		t.Skipf("does not apply: this OpenZFS does not tell the ashift of vdevs: %v: %v", rows, err)
	}
	f := only(t, c, p, "alignment-ashift", Warning)
	if m := measured(t, f, "block"); m.Low != 512 {
		t.Errorf("blocks of %v bytes, not 512", m.Low)
	}
	if m := measured(t, f, "vdev"); m.Text != file {
		t.Errorf("the vdev is %s, not %s", m.Text, file)
	}
}

func TestZFSSpace(t *testing.T) {
	p := testfs.ZFS(t, 1<<30)
	nothing(t, examine(t, "space", nil), p)
	point := filesystem(t, t.TempDir(), p+"/full")
	file := filepath.Join(point, "file")
	sh(t, "dd if=/dev/zero of="+file+" bs=1M count=815 status=none && zpool sync "+p)
	f := only(t, examine(t, "space", nil), p, "space-zpool", Note)
	if m := measured(t, f, "used_percent"); m.Low < fullNote || m.Low >= fullWarning {
		t.Errorf("%v %% are used", m.Low)
	}
	// Every second block is freed: half of it is free, in pieces of 16 KiB.
	w, err := os.OpenFile(file, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	for off := int64(0); off < 815<<20; off += 32 << 10 {
		if err := unix.Fallocate(int(w.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, off, 16<<10); err != nil {
			t.Fatal(err)
		}
	}
	for range 4 { // what is freed is kept for two transaction groups
		tool(t, "zpool", "sync", p)
	}
	found := about(examine(t, "space", nil), p)
	if len(found) != 1 || found[0].Code != "space-zpool-fragmented" {
		t.Fatalf("found %s", asJSON(found))
	}
	if m, limit := measured(t, found[0], "fragmentation"), measured(t, found[0], "limit"); m.Low < limit.Low*2/3 {
		t.Errorf("a fragmentation of %v with a limit of %v", m.Low, limit.Low)
	}
}

func TestZFSDedupTable(t *testing.T) {
	p := testfs.ZFS(t, 256<<20)
	nothing(t, examine(t, "dedup", nil), p)
	point := filesystem(t, t.TempDir(), p+"/dedup", "dedup=on")
	if err := os.WriteFile(filepath.Join(point, "file"), noise(1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	tool(t, "zpool", "sync", p)
	f := only(t, examine(t, "dedup", nil), p, "zfs-ddt-memory", Note)
	if m := measured(t, f, "ddt_entries"); m.Low != 64 { // of 16 KiB each
		t.Errorf("%v entries, not 64", m.Low)
	}
	if f.Do[0].Commands[0] != "pando doctor --zfs "+p {
		t.Error(f.Do)
	}
}

func TestZFSHealth(t *testing.T) {
	p := testfs.ZFS(t, 128<<20)
	first := ""
	s, err := statusOf(t.Context(), p)
	if err != nil {
		t.Fatal(err)
	}
	first = s.vdevs[0].path
	point := filesystem(t, t.TempDir(), p+"/files")
	pattern := bytes.Repeat([]byte("what was written"), 1<<10)
	if err := os.WriteFile(filepath.Join(point, "file"), bytes.Repeat(pattern, 8), 0o600); err != nil {
		t.Fatal(err)
	}
	nothing(t, examine(t, "scrub", nil), p)

	// A mirror without its second half.
	image := filepath.Join(t.TempDir(), "second")
	second := attach(t, image, 128<<20, loopdev.Options{}).Path()
	tool(t, "zpool", "attach", "-w", p, first, second)
	t.Cleanup(func() { sh(t, "zpool detach "+p+" "+second) })
	nothing(t, examine(t, "scrub", nil), p)
	tool(t, "zpool", "offline", p, second)
	f := only(t, examine(t, "scrub", nil), p, "scrub-zpool-state", Warning)
	if m := measured(t, f, "state"); m.Text != "DEGRADED" {
		t.Errorf("the state is %s", m.Text)
	}
	tool(t, "zpool", "online", p, second)
	tool(t, "zpool", "wait", "-t", "resilver", p)
	nothing(t, examine(t, "scrub", nil), p)

	// A scrub that goes on: it is told to make no progress.
	suspend := "/sys/module/zfs/parameters/zfs_scan_suspend_progress"
	if err := os.WriteFile(suspend, []byte("1"), 0); err != nil {
		t.Fatal(err)
	}
	tool(t, "zpool", "scrub", p)
	c := examine(t, "scrub", nil)
	if err := os.WriteFile(suspend, []byte("0"), 0); err != nil {
		t.Fatal(err)
	}
	only(t, c, p, "scrub-running", Note)
	tool(t, "zpool", "wait", "-t", "scrub", p)
	nothing(t, examine(t, "scrub", nil), p)

	// One half is not what was written.
	damage(t, image, pattern)
	tool(t, "zpool", "scrub", "-w", p)
	c = examine(t, "scrub", nil)
	f = only(t, c, second, "scrub-zpool-errors", Warning)
	if m := measured(t, f, "checksum"); m.Low < 1 {
		t.Errorf("%v blocks are damaged", m.Low)
	}
	nothing(t, c, first)
	nothing(t, c, p) // the other half was right
	tool(t, "zpool", "clear", p)
	nothing(t, examine(t, "scrub", nil), second)

	// Both are not.
	both := strings.TrimSpace(readText("/sys/block", filepath.Base(first), "loop/backing_file"))
	damage(t, image, pattern)
	damage(t, both, pattern)
	tool(t, "zpool", "scrub", "-w", p)
	found := about(examine(t, "scrub", nil), p)
	if i := slices.IndexFunc(found, func(f Finding) bool {
		return f.Code == "scrub-zpool-data" && f.Severity == Critical
	}); i < 0 {
		t.Errorf("data is lost, and there is %s", asJSON(found))
	}
}

// damage changes some bytes in the middle of each 16 KiB of a pattern in a file.
func damage(t *testing.T, path string, pattern []byte) {
	t.Helper()
	disk, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	n := 0
	for off := 0; ; n++ {
		i := bytes.Index(disk[off:], pattern)
		if i < 0 {
			break
		}
		off += i
		if _, err := f.WriteAt([]byte("THIS"), int64(off+len(pattern)/2)); err != nil {
			t.Fatal(err)
		}
		off += len(pattern)
	}
	if n == 0 {
		t.Fatalf("%s does not hold what was written", path)
	}
}
