package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"
)

// BenchmarkRootlessRun compares whole commands that give a program a private, writable copy of a golden with 10,000
// files, and remove it again: `pando run` of a user without root, the same as root, both in overlays on pools of the
// plain driver on one filesystem, and cp -a and rm. They take turns; figures are medians of five. Run it as root, with
// -benchtime 1x and TMPDIR on the disk.
func BenchmarkRootlessRun(b *testing.B) {
	if os.Geteuid() != 0 {
		b.Skip("SKIPPED: changing the user needs root")
	}

	const user, rounds = 61234, 5
	top := benchTree(b, user)
	pando := filepath.Join(top, "pando")
	if out, err := exec.Command("go", "build", "-o", pando, ".").CombinedOutput(); err != nil {
		b.Fatalf("%v: %s", err, out)
	}

	run := func(uid uint32, program string, args ...string) time.Duration {
		cmd := exec.Command(program, args...)
		cmd.Dir, cmd.Env = top, append(os.Environ(), fmt.Sprintf("PANDO_POOL=%s/of-%d/pool", top, uid))
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
		begun := time.Now()
		if out, err := cmd.CombinedOutput(); err != nil {
			b.Fatalf("%s %v: %v: %s", program, args, err, out)
		}
		return time.Since(begun)
	}

	for _, uid := range []uint32{0, user} {
		run(uid, pando, "init", "--driver", "plain")
		run(uid, pando, "golden", "import", "g", filepath.Join(top, "tree"))
		run(uid, pando, "run", "g", "--overlay", "--", "true") // makes the template
	}

	for range b.N {
		var ofUser, ofRoot, copied []float64
		for range rounds {
			ofUser = append(ofUser, run(user, pando, "run", "g", "--overlay", "--", "true").Seconds())
			ofRoot = append(ofRoot, run(0, pando, "run", "g", "--overlay", "--", "true").Seconds())
			to := filepath.Join(top, fmt.Sprintf("of-%d", user), "copy")
			copied = append(copied, (run(user, "cp", "-a", "--reflink=never", filepath.Join(top, "tree"), to) +
				run(user, "rm", "-rf", to)).Seconds())
		}
		b.ReportMetric(0, "ns/op")
		b.ReportMetric(middle(ofUser)*1000, "user-ms")
		b.ReportMetric(middle(ofRoot)*1000, "root-ms")
		b.ReportMetric(middle(copied)*1000, "cp+rm-ms")
		b.ReportMetric(middle(copied)/middle(ofUser), "cp/user")
		b.ReportMetric(middle(ofUser)/middle(ofRoot), "user/root")
	}

	for _, uid := range []uint32{0, user} {
		run(uid, pando, "deinit", "--force")
	}
}

// benchTree makes a directory with a tree of 10,000 files of 4 KiB that all can read, and one for each user's pool.
func benchTree(b *testing.B, user int) string {
	b.Helper()
	top, err := os.MkdirTemp("", "pando-rootless-")
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { os.RemoveAll(top) })
	if err := os.Chmod(top, 0o755); err != nil {
		b.Fatal(err)
	}

	content := make([]byte, 4096)
	for i := range 10_000 {
		dir := filepath.Join(top, "tree", fmt.Sprint(i/100))
		if err := os.MkdirAll(dir, 0o755); err != nil {
			b.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, fmt.Sprint(i)), content, 0o644); err != nil {
			b.Fatal(err)
		}
	}

	for _, uid := range []int{0, user} {
		dir := filepath.Join(top, fmt.Sprintf("of-%d", uid))
		if err := os.Mkdir(dir, 0o755); err != nil {
			b.Fatal(err)
		}
		if err := os.Chown(dir, uid, uid); err != nil {
			b.Fatal(err)
		}
	}
	return top
}

func middle(all []float64) float64 {
	slices.Sort(all)
	return all[len(all)/2]
}
