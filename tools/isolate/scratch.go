//go:build linux

package main

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

const (
	scratchBytes = 64 << 30 // of the ext4 in memory; it is sparse

	// enoughMemory is what must be free before the scratch goes into memory. The suite needs some 4 GiB.
	enoughMemory = 8 << 30
)

// makeScratch makes dir the TMPDIR of the tests.
func makeScratch(dir string) error {
	if err := os.Setenv("TMPDIR", dir); err != nil {
		return err
	}

	inMemory, err := wantsMemory()
	if err != nil {
		return err
	}

	if inMemory {
		if err := mountInMemory(dir); err != nil {
			return err
		}
	}

	return os.Chmod(dir, 0o777|os.ModeSticky)
}

func wantsMemory() (bool, error) {
	switch where := os.Getenv("PANDO_TEST_SCRATCH"); where {
	case "disk":
		return false, nil
	case "memory":
		return true, nil
	case "":
		free, err := freeMemory()
		return free >= enoughMemory, err
	default:
		return false, fmt.Errorf(`PANDO_TEST_SCRATCH is %q: use "memory" or "disk"`, where)
	}
}

// freeMemory returns how many bytes programs can still get without swapping.
func freeMemory() (int64, error) {
	f, err := os.Open("/proc/meminfo")
	if err != nil {
		return 0, err
	}

	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		if fields := strings.Fields(lines.Text()); len(fields) > 1 && fields[0] == "MemAvailable:" {
			kib, err := strconv.ParseInt(fields[1], 10, 64)
			return kib << 10, err
		}
	}

	return 0, errors.New("/proc/meminfo does not say how much memory is available")
}

// memoryOf names the mount point of the tmpfs below an ext4 in memory.
func memoryOf(dir string) string { return dir + "-memory" }

// mountInMemory mounts an ext4 on dir whose blocks are in a tmpfs. Both end with this mount namespace, as does the
// loop device between them.
func mountInMemory(dir string) error {
	if err := os.Mkdir(memoryOf(dir), 0o700); err != nil {
		return err
	}

	if err := unix.Mount("tmpfs", memoryOf(dir), "tmpfs", 0, "size=100%"); err != nil {
		return fmt.Errorf("mounting a tmpfs: %w", err)
	}

	image := filepath.Join(memoryOf(dir), "image")
	if err := errors.Join(os.WriteFile(image, nil, 0o600), os.Truncate(image, scratchBytes)); err != nil {
		return err
	}

	// By programs, so that what is under test is not needed to test it.
	for _, words := range [][]string{
		{"mkfs.ext4", "-q", "-F", "-E", "nodiscard,lazy_itable_init=1,lazy_journal_init=1", image},
		{"mount", "-t", "ext4", "-o", "loop,discard", image, dir},
	} {
		if out, err := exec.Command(words[0], words[1:]...).CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w\n%s", strings.Join(words, " "), err, out)
		}
	}

	return nil
}
