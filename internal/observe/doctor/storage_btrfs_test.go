package doctor

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"pando/internal/linux/kernel"
	"pando/internal/linux/loopdev"
	"pando/internal/testing/testfs"

	"golang.org/x/sys/unix"
)

// tiny makes files that lie in the metadata of a btrfs.
func tiny(t *testing.T, dir string, from, n int) {
	t.Helper()
	content := bytes.Repeat([]byte("x"), 1800)
	sub := filepath.Join(dir, fmt.Sprint("from", from))
	if err := os.Mkdir(sub, 0o700); err != nil {
		t.Fatal(err)
	}
	for i := range n {
		if err := os.WriteFile(filepath.Join(sub, fmt.Sprint(i)), content, 0o600); err != nil {
			t.Fatalf("file %d: %v", from+i, err)
		}
	}
}

// syncfs commits what a filesystem has.
func syncfs(t *testing.T, dir string) {
	t.Helper()
	f, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := unix.Syncfs(int(f.Fd())); err != nil {
		t.Fatal(err)
	}
}

func TestBtrfsMetadata(t *testing.T) {
	noGuest(t)
	dir := testfs.Btrfs(t, 128<<20)
	nothing(t, examine(t, "btrfs-metadata", nil), dir)
	fillTo(t, dir, 97) // data has all the space
	nothing(t, examine(t, "btrfs-metadata", nil), dir)
	// Files are made as long as it is not critical, so that this comes before the end.
	var f Finding
	var seen []Severity
	files := 0
	for ; f.Severity != Critical; files += 500 {
		tiny(t, dir, files, 500)
		syncfs(t, dir)
		for _, x := range about(examine(t, "btrfs-metadata", nil), dir) {
			if f = x; !slices.Contains(seen, x.Severity) {
				seen = append(seen, x.Severity)
			}
		}
	}
	if !slices.Equal(seen, []Severity{Warning, Critical}) || f.Code != "btrfs-metadata-full" {
		t.Errorf("it went through %q to %s", seen, f.Code)
	}
	total, used, reserve, left := measured(t, f, "metadata"), measured(t, f, "metadata_used"), measured(t, f,
		"reserve"), measured(t, f, "left")
	if written := float64(files) * 1800; used.Low < written || used.Low > 2*written ||
		total.Low-used.Low-reserve.Low != left.Low {
		t.Errorf("with %d files: %s", files, asJSON(f.Measured))
	}
	if m := measured(t, f, "unallocated"); m.Low > total.Low/4 {
		t.Errorf("%v bytes are in no chunk", m.Low)
	}
	t.Logf("%d files, of %.0f bytes %.0f used", files, total.Low, used.Low)
}

// Metadata that may have another chunk, however full those are that it has.
func TestBtrfsMetadataThatMayGrow(t *testing.T) {
	noGuest(t)
	dir := testfs.Btrfs(t, 512<<20)
	all, err := btrfsAll()
	if err != nil {
		t.Fatal(err)
	}
	i := slices.IndexFunc(all, func(b btrfsFS) bool { return b.point == dir })
	number := func(name string) int64 {
		n, ok := readNumber(all[i].dir, "allocation", name)
		if !ok {
			t.Fatalf("no %s", name)
		}
		return n
	}
	total, percent := number("metadata/total_bytes"), int64(0)
	for files := 0; percent < metadataNote; files += 250 {
		tiny(t, dir, files, 250)
		syncfs(t, dir)
		if number("metadata/total_bytes") != total {
			t.Fatalf("btrfs made another chunk at %d %%: this tests nothing", percent)
		}
		percent = 100 * (number("metadata/bytes_used") + number("global_rsv_size")) / total
	}
	nothing(t, examine(t, "btrfs-metadata", nil), dir)
}

func TestBtrfsQgroups(t *testing.T) {
	noGuest(t)
	dir := testfs.Btrfs(t, 256<<20)
	f, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	made := 0
	snapshots := func(n int) {
		for ; made < n; made++ {
			if err := kernel.SubvolSnapshot(f, fmt.Sprint("s", made), f, true); err != nil {
				t.Fatal(err)
			}
		}
	}
	snapshots(30)
	nothing(t, examine(t, "btrfs-qgroups", nil), dir) // without quotas they cost nothing
	tool(t, "btrfs", "quota", "enable", dir)
	only(t, examine(t, "btrfs-qgroups", nil), dir, "btrfs-qgroups-many", Note)
	snapshots(200)
	x := only(t, examine(t, "btrfs-qgroups", nil), dir, "btrfs-qgroups-many", Warning)
	if m := measured(t, x, "subvolumes"); m.Low != 201 {
		t.Errorf("%v subvolumes, not 201", m.Low)
	}
	sh(t, x.Do[0].Commands[0])
	nothing(t, examine(t, "btrfs-qgroups", nil), dir)

	few := testfs.Btrfs(t, 128<<20)
	tool(t, "btrfs", "quota", "enable", few)
	nothing(t, examine(t, "btrfs-qgroups", nil), few)
}

// A block that is not what was written, and what the finding says to do.
func TestBtrfsErrors(t *testing.T) {
	noGuest(t)
	needRoot(t)
	top := t.TempDir()
	testfs.LeakCheck(t, top)
	image := filepath.Join(top, "image")
	d := attach(t, image, 128<<20, loopdev.Options{})
	dir := mkfs(t, "btrfs", d.Path(), "-q")
	nothing(t, examine(t, "scrub", nil), dir)
	pattern := bytes.Repeat([]byte("what was written"), 1<<12)
	if err := os.WriteFile(filepath.Join(dir, "file"), pattern, 0o600); err != nil {
		t.Fatal(err)
	}
	syncfs(t, dir)
	f, err := os.Open(filepath.Join(dir, "file"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED); err != nil {
		t.Fatal(err)
	}
	disk, err := os.ReadFile(image)
	if err != nil {
		t.Fatal(err)
	}
	at := bytes.Index(disk, pattern)
	if at < 0 {
		t.Fatal("the file is not on the disk")
	}
	w, err := os.OpenFile(image, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	if _, err := w.WriteAt([]byte("THIS"), int64(at)); err != nil {
		t.Fatal(err)
	}
	if _, err := f.Read(make([]byte, 4096)); !errors.Is(err, unix.EIO) {
		t.Fatalf("reading what is damaged: %v", err)
	}
	x := only(t, examine(t, "scrub", nil), dir, "scrub-btrfs-errors", Warning)
	if m := measured(t, x, "corruption_errs"); m.Low < 1 {
		t.Errorf("%v blocks are damaged", m.Low)
	}
}

func TestBtrfsDegraded(t *testing.T) {
	noGuest(t)
	needRoot(t)
	top := t.TempDir()
	testfs.LeakCheck(t, top)
	one := attach(t, filepath.Join(top, "one"), 256<<20, loopdev.Options{})
	var whole, half string
	t.Run("whole", func(t *testing.T) {
		two := attach(t, filepath.Join(top, "two"), 256<<20, loopdev.Options{})
		whole = mkfs(t, "btrfs", two.Path(), "-q", "-d", "raid1", "-m", "raid1", one.Path())
		nothing(t, examine(t, "scrub", nil), whole)
	})
	tool(t, "btrfs", "device", "scan", "--forget")
	half = mountAt(t, "btrfs", one.Path(), "degraded")
	f := only(t, examine(t, "scrub", nil), half, "scrub-btrfs-missing", Warning)
	if m := measured(t, f, "missing"); m.Low != 1 {
		t.Errorf("%v devices are missing", m.Low)
	}
}

// A scrub that goes on, one that is over, and one that is over since long.
func TestBtrfsScrub(t *testing.T) {
	noGuest(t)
	dir := testfs.Btrfs(t, 256<<20)
	uuid := ""
	all, err := btrfsAll()
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range all {
		if b.point == dir {
			uuid = b.uuid
		}
	}
	if uuid == "" {
		t.Fatalf("%s is not among %+v", dir, all)
	}
	t.Cleanup(func() {
		if err := os.Remove(scrubStatus + uuid); err != nil {
			t.Error(err)
		}
	})
	if err := os.WriteFile(filepath.Join(dir, "file"), bytes.Repeat([]byte("data"), 8<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	syncfs(t, dir)
	limit := filepath.Join("/sys/fs/btrfs", uuid, "devinfo/1/scrub_speed_max")
	if err := os.WriteFile(limit, []byte("1m"), 0); err != nil {
		t.Skipf("SKIPPED: this kernel cannot slow a scrub down: %v", err)
	}
	scrub := exec.Command("btrfs", "scrub", "start", "-B", dir)
	if err := scrub.Start(); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	for is := false; !is && err == nil; { // it takes half a minute
		is, err = kernel.BtrfsScrubbing(f, 1)
	}
	f.Close()
	if err != nil {
		t.Fatal(err)
	}
	only(t, examine(t, "scrub", nil), dir, "scrub-running", Note)
	tool(t, "btrfs", "scrub", "cancel", dir)
	if err := scrub.Wait(); err == nil {
		t.Error("the scrub that was cancelled has succeeded")
	}
	nothing(t, examine(t, "scrub", nil), dir)
	if err := os.WriteFile(limit, []byte("0"), 0); err != nil {
		t.Fatal(err)
	}
	tool(t, "btrfs", "scrub", "start", "-B", dir)
	nothing(t, examine(t, "scrub", nil), dir)
	if last, finished, err := lastScrub(uuid); err != nil || !finished || time.Since(last) > time.Hour {
		t.Errorf("the last scrub was at %v, to its end: %v, %v", last, finished, err)
	}

	// Time does not pass for tests: the scrub was long ago because its record says so.
	b, err := os.ReadFile(scrubStatus + uuid)
	if err != nil {
		t.Fatal(err)
	}
	_, after, _ := strings.Cut(string(b), "|t_start:")
	start, _, _ := strings.Cut(after, "|")
	old := strconv.FormatInt(time.Now().Add(-61*24*time.Hour).Unix(), 10)
	if err := os.WriteFile(scrubStatus+uuid, []byte(strings.Replace(string(b), "|t_start:"+start, "|t_start:"+old, 1)),
		0o600); err != nil {
		t.Fatal(err)
	}
	if m := measured(t, only(t, examine(t, "scrub", nil), dir, "scrub-overdue", Note), "days"); m.Low != 61 {
		t.Errorf("the last scrub was %v days ago, not 61:\n%s", m.Low, b)
	}
}

// A balance that goes on.
func TestBtrfsBalance(t *testing.T) {
	noGuest(t)
	dir := testfs.Btrfs(t, 1<<30)
	if err := os.WriteFile(filepath.Join(dir, "file"), bytes.Repeat([]byte("data"), 64<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	syncfs(t, dir)
	nothing(t, examine(t, "scrub", nil), dir)
	balance := exec.Command("btrfs", "balance", "start", "--full-balance", dir)
	if err := balance.Start(); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- balance.Wait() }()
	paused := false
	for ended := false; !paused && !ended; {
		select {
		case err := <-done:
			if err != nil {
				t.Fatal(err)
			}
			ended = true
		default:
			paused = exec.Command("btrfs", "balance", "pause", dir).Run() == nil
		}
	}
	if !paused {
		t.Skip("SKIPPED: the balance had ended before it could be paused")
	}
	<-done
	f := only(t, examine(t, "scrub", nil), dir, "scrub-btrfs-operation", Note)
	if m := measured(t, f, "operation"); m.Text != "balance paused" {
		t.Errorf("it is busy with %s", m.Text)
	}
	tool(t, "btrfs", "balance", "cancel", dir)
	nothing(t, examine(t, "scrub", nil), dir)
}

// An ext4 that has noticed an error.
func TestExt4Errors(t *testing.T) {
	noGuest(t)
	dir := testfs.Ext4(t, 16<<20)
	nothing(t, examine(t, "scrub", nil), dir)
	sys := filepath.Join("/sys/fs/ext4", deviceOf(t, dir).Name)
	if err := os.WriteFile(filepath.Join(sys, "trigger_fs_error"), []byte("of a test of Pando"), 0); err != nil {
		t.Fatal(err)
	}
	for count := ""; count != "1"; { // a worker of the kernel counts it
		b, err := os.ReadFile(filepath.Join(sys, "errors_count"))
		if err != nil || t.Context().Err() != nil {
			t.Fatal(err)
		}
		count = strings.TrimSpace(string(b))
	}
	f := only(t, examine(t, "scrub", nil), dir, "scrub-ext4-errors", Warning)
	if m := measured(t, f, "errors"); m.Low != 1 {
		t.Errorf("%v errors, not 1", m.Low)
	}
	measured(t, f, "last")
}

// What md shows of arrays; there is none on most hosts that tests run on.
func TestRAID(t *testing.T) {
	dir := t.TempDir()
	for what, c := range map[string]struct {
		files map[string]string
		want  []string
	}{
		"well": {map[string]string{"level": "raid5", "array_state": "active", "sync_action": "idle", "degraded": "0",
			"mismatch_cnt": "0"}, nil},
		"RAID 0": {map[string]string{"level": "raid0", "array_state": "clean"}, nil},
		"degraded": {map[string]string{"level": "raid1", "degraded": "1", "sync_action": "recover"},
			[]string{"scrub-md-degraded", "scrub-running"}},
		"parity": {map[string]string{"level": "raid6", "degraded": "0", "sync_action": "idle", "mismatch_cnt": "128"},
			[]string{"scrub-md-mismatch"}},
		"memory": {map[string]string{"level": "raid1", "degraded": "0", "sync_action": "idle", "mismatch_cnt": "128"},
			nil},
		"being read": {map[string]string{"level": "raid1", "degraded": "0", "sync_action": "check"},
			[]string{"scrub-running"}},
	} {
		md := filepath.Join(dir, what)
		if err := os.Mkdir(md, 0o700); err != nil {
			t.Fatal(err)
		}
		for name, content := range c.files {
			if err := os.WriteFile(filepath.Join(md, name), []byte(content+"\n"), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		var r Report
		r.findRAIDErrors("/dev/md0", readRAID(md))
		var got []string
		for _, f := range r.Findings {
			got = append(got, f.Code)
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%s: %q, not %q", what, got, c.want)
		}
	}
}
