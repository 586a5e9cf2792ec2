package doctor

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"pando/internal/linux/loopdev"
	"pando/internal/linux/mount"
	"pando/internal/linux/run"
	"pando/internal/testing/testfs"

	"golang.org/x/sys/unix"
)

// stuckQuickly is the check with a short watch, for tests.
var stuckQuickly = stuckCheck(50 * time.Millisecond)

// TestStuckTask: a child that writes to a frozen filesystem hangs, and is found with the
// filesystem; thawed, it is not.
func TestStuckTask(t *testing.T) {
	rootOnly(t)
	dir := testfs.Ext4(t, 32<<20)
	c := startRole(t, "writer", nil, filepath.Join(dir, "file"))
	who := fmt.Sprintf("pid %d", c.pid())
	if s, text := checkNow(t, stuckQuickly, nil).about("", who); s != "" {
		t.Errorf("before: %s", text)
	}
	if _, err := run.Program(t.Context(), "fsfreeze", "--freeze", dir); err != nil {
		t.Fatal(err)
	}
	thawed := false
	thaw := func() {
		if !thawed {
			thawed = true
			if _, err := run.Program(t.Context(), "fsfreeze", "--unfreeze", dir); err != nil {
				t.Error(err)
			}
		}
	}
	defer thaw()
	c.in.Close() // now it writes
	deadline := time.Now().Add(30 * time.Second)
	for !waits(c.pid()) { // nothing tells when a task begins to hang
		if time.Now().After(deadline) {
			t.Fatalf("it does not hang: %s", readText(fmt.Sprintf("/proc/%d/status", c.pid())))
		}
	}
	r := checkNow(t, stuckQuickly, nil)
	s, text := r.about("filesystem-frozen", dir)
	if s != Warning || !strings.Contains(text, who) || !strings.Contains(text, "fsfreeze --unfreeze "+dir) {
		t.Errorf("frozen: %q %s: %+v", s, text, r)
	}
	thaw()
	_ = c.cmd.Wait()
	if s, text := checkNow(t, stuckQuickly, nil).about("filesystem-frozen", dir); s != "" {
		t.Errorf("thawed: %s", text)
	}
}

// waits reports whether a thread of a process is in state D.
func waits(pid int) bool {
	for _, w := range waitingTasks() {
		if w.pid == pid {
			return true
		}
	}
	return false
}

// TestFailedFilesystems: an XFS that shut down, an ext4 that went over to reading only
// after an error; and those that did not, one of them mounted read-only.
func TestFailedFilesystems(t *testing.T) {
	rootOnly(t)
	xfs, ext4 := testfs.XFS(t, 1), testfs.Ext4(t, 32<<20)
	for _, d := range []string{xfs, ext4} {
		for _, f := range checkNow(t, stuckQuickly, nil).Findings {
			if f.Subject == d {
				t.Errorf("whole: %+v", f)
			}
		}
	}
	t.Cleanup(func() { // what has shut down does not look mounted to others
		if err := unix.Unmount(xfs, 0); err != nil {
			t.Error(err)
		}
	})
	if _, err := run.Program(t.Context(), "xfs_io", "-x", "-c", "shutdown", xfs); err != nil {
		t.Fatal(err)
	}
	table, err := mount.Table("self")
	if err != nil {
		t.Fatal(err)
	}
	e, ok := mount.At(table, ext4)
	if !ok {
		t.Fatal("not mounted")
	}
	if err := unix.Mount("", ext4, "", unix.MS_REMOUNT, "errors=remount-ro"); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile("/sys/fs/ext4/"+filepath.Base(e.Source)+"/trigger_fs_error", []byte("made by a test"),
		0o200); err != nil {
		t.Skipf("SKIPPED: this kernel cannot make an error: %v", err)
	}
	r := checkNow(t, stuckQuickly, nil)
	if s, text := r.about("filesystem-shutdown", xfs); s != Critical {
		t.Errorf("XFS: %q %s", s, text)
	}
	s, text := r.about("filesystem-readonly", ext4)
	if s == "" {
		s, text = r.about("filesystem-shutdown", ext4)
	}
	if release := kernelRelease(); s == "" && (strings.HasPrefix(release, "6.12.") ||
		strings.HasPrefix(release, "6.13.") || strings.HasPrefix(release, "6.14.")) {
		t.Logf("Linux %s does not show that an ext4 has gone over to reading only", release)
	} else if s != Critical || !strings.Contains(text, "dmesg") {
		t.Errorf("ext4: %q %s; %s", s, text, readText("/proc/self/mountinfo"))
	}
	// Read-only by whoever mounted it is no fault.
	good := testfs.Ext4(t, 16<<20)
	if err := unix.Mount("", good, "", unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
		t.Fatal(err)
	}
	for _, f := range checkNow(t, stuckQuickly, nil).Findings {
		if f.Subject == good {
			t.Errorf("read-only: %+v", f)
		}
	}
}

// TestIOErrors: a loop device whose file was cut short.
func TestIOErrors(t *testing.T) {
	rootOnly(t)
	path := file(t, filepath.Join(testfs.Ext4(t, 32<<20), "cut"), 8<<20)
	t.Run("device", func(t *testing.T) {
		d := loopOn(t, path, loopdev.Options{DirectIO: true})
		name := filepath.Base(d)
		before, err := readKernelLog()
		if err != nil {
			t.Skipf("SKIPPED: the kernel's log may not be read: %v", err)
		}
		if err := os.Truncate(path, 0); err != nil {
			t.Fatal(err)
		}
		f, err := os.OpenFile(d, os.O_RDONLY|unix.O_DIRECT, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		page, err := unix.Mmap(-1, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = unix.Munmap(page) }()
		// The kernel limits how many such messages it writes, for all devices together.
		for deadline := time.Now().Add(time.Minute); ; {
			if n, err := f.ReadAt(page, 4<<20); err == nil {
				t.Fatalf("%d bytes were read behind the end of the file", n)
			}
			after, err := readKernelLog()
			if err != nil {
				t.Fatal(err)
			}
			if after[name].last > before[name].last {
				break
			}
			if time.Now().After(deadline) {
				t.Fatal("the kernel does not write the error into its log")
			}
		}
		if s, text := checkNow(t, stuckQuickly, nil).about("io-errors", d); s != Warning ||
			!strings.Contains(text, "losetup -l "+d) {
			t.Errorf("%q %s", s, text)
		}
		if err := os.Truncate(path, 8<<20); err != nil {
			t.Fatal(err)
		}
	})
	// Devices that never failed have none.
	log, err := readKernelLog()
	if err != nil {
		t.Fatal(err)
	}
	fine := loopOn(t, file(t, filepath.Join(t.TempDir(), "fine"), 1<<20), loopdev.Options{})
	if _, failed := log[filepath.Base(fine)]; !failed {
		if s, text := checkNow(t, stuckQuickly, nil).about("io-errors", fine); s != "" {
			t.Error(text)
		}
	}
}

// TestKernelLog: errors are counted by device, and those of a loop device since it got
// its file.
func TestKernelLog(t *testing.T) {
	out := map[string]deviceErrors{}
	for _, r := range []string{
		"3,437,1000000,-;I/O error, dev loop7, sector 8192 op 0x0:(READ) flags 0x800 phys_seg 1 prio class 2\n " +
			"SUBSYSTEM=block\n",
		"3,438,2000000,-;blk_update_request: I/O error, dev sda, sector 17",
		"6,439,3000000,-;loop7: detected capacity change from 0 to 262144",
		"3,440,4000000,-;critical medium error, dev sdb, sector 1",
		"3,441,5000000,-;I/O error, dev sda, sector 18 op 0x1:(WRITE) flags 0x0",
		"nonsense",
	} {
		noteRecord(out, r)
	}
	if e := out["sda"]; len(out) != 1 || e.count != 2 || e.last != 5*time.Second ||
		!strings.Contains(e.line, "sector 18") {
		t.Errorf("%+v", out)
	}
}

func init() {
	roles["writer"] = func(args []string, ready func(string)) error {
		f, err := os.Create(args[0])
		if err != nil {
			return err
		}
		ready(strconv.Itoa(os.Getpid()))
		_, err = f.Write([]byte("content"))
		return err
	}
}

func kernelRelease() string {
	var u unix.Utsname
	if unix.Uname(&u) != nil {
		return ""
	}
	return unix.ByteSliceToString(u.Release[:])
}
