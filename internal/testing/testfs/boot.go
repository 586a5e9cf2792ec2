package testfs

import (
	"crypto/rand"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// ShareMounts makes the mounts of this mount namespace shared, as they are on most hosts: then
// what a test unmounts goes from the namespaces of OtherBoot too. TestMain calls it, so that
// tests that run at the same time do not hold each other's mounts. Without root it does nothing.
func ShareMounts() error {
	if os.Geteuid() != 0 {
		return nil
	}
	return os.NewSyscallError("sharing mounts", unix.Mount("", "/", "", unix.MS_REC|unix.MS_SHARED, ""))
}

// OtherBoot is a command in a mount namespace of its own that has another boot ID, as containers
// have. What the test mounts and unmounts, it does there too (see ShareMounts), but not the other
// way round. Root only.
func OtherBoot(t testing.TB, name string, args ...string) *exec.Cmd {
	t.Helper()
	id := filepath.Join(t.TempDir(), "boot_id")
	if err := os.WriteFile(id, []byte(rand.Text()+"-of-this-test\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	script := `mount --bind "$0" /proc/sys/kernel/random/boot_id && exec "$@"`
	return exec.Command("unshare", append([]string{"-m", "--propagation", "slave", "sh", "-c", script, id, name},
		args...)...)
}

// Rebooted runs a command of OtherBoot in a time namespace in which the kernel has just booted:
// what was made before is of an earlier boot. Mounts and devices of the test are still there.
func Rebooted(t testing.TB, cmd *exec.Cmd) ([]byte, error) {
	t.Helper()
	var out []byte
	err := inTimeNamespace(func() (err error) {
		out, err = cmd.CombinedOutput()
		return err
	})
	return out, err
}

// inTimeNamespace calls f on a thread whose children live in a time namespace that begins now.
func inTimeNamespace(f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // for good: the thread ends with this goroutine
		err := unix.Unshare(unix.CLONE_NEWTIME)
		if err != nil {
			done <- fmt.Errorf("new time namespace: %w", err)
			return
		}

		var up unix.Timespec
		if err = unix.ClockGettime(unix.CLOCK_BOOTTIME, &up); err == nil {
			// The nanoseconds must not be negative.
			offset := fmt.Sprintf("boottime %d %d", -up.Sec-1, time.Second.Nanoseconds()-up.Nsec)
			if up.Nsec == 0 {
				offset = fmt.Sprintf("boottime %d 0", -up.Sec)
			}
			err = os.WriteFile(fmt.Sprintf("/proc/%d/timens_offsets", unix.Gettid()), []byte(offset), 0)
		}
		if err == nil {
			err = f()
		}

		done <- err
	}()

	return <-done
}
