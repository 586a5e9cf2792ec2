package mount_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"

	"pando/internal/linux/mount"
)

// TestUnmountWhileForking unmounts what was just closed, while other goroutines
// start programs all the time: until such a child runs its program, it has copies
// of what was open.
func TestUnmountWhileForking(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: mounting needs root: run the tests as root")
	}
	dir := t.TempDir()
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				if err := exec.Command("true").Run(); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	defer wg.Wait()
	defer close(stop)
	for range 300 {
		m, err := mount.Device("tmpfs", "tmpfs", nil, false)
		if err != nil {
			t.Fatal(err)
		}
		_, err = m.MoveTo(dir)
		m.Close()
		if err != nil {
			t.Fatal(err)
		}
		f, err := os.Create(filepath.Join(dir, "file"))
		if err == nil {
			err = f.Close()
		}
		if err != nil {
			t.Error(err)
		}
		if err := mount.Unmount(dir); err != nil {
			t.Fatal(err)
		}
	}
}
