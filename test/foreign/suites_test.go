package foreign

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	_ "embed"

	"pando/internal/testing/testfs"
)

// need skips the test if a program is not installed.
func need(t *testing.T, program string) {
	t.Helper()
	if _, err := exec.LookPath(program); err != nil {
		t.Skipf("SKIPPED: there is no %s: run make deps", program)
	}
}

// python is the system's own, whose tests are a package of the distribution.
const python = "/usr/bin/python3"

//go:embed testdata/outcomes.py
var printOutcomes string

// pythonModules are about files, and fast; slowPythonModules run with PANDO_TEST_FULL.
var (
	pythonModules = []string{"test_os", "test_posix", "test_shutil", "test_tempfile", "test_pathlib", "test_glob",
		"test_fileio", "test_file", "test_mmap", "test_genericpath", "test_fcntl", "test_filecmp", "test_fileinput",
		"test_dbm_dumb", "test_stat", "test_unicode_file", "test_zipimport"}
	slowPythonModules = []string{"test_mailbox", "test_tarfile", "test_zipfile", "test_dbm", "test_import",
		"test_largefile", "test_compileall", "test_py_compile", "test_gzip", "test_shelve", "test_runpy", "test_pkg",
		"test_zipapp", "test_cmd_line_script",
		"test_file_eintr", "test_unicode_file_functions"}
)

// fillPython copies the tests of Python's standard library.
func fillPython(t *testing.T, dir string) {
	t.Helper()
	out, err := exec.Command(python, "-c", "import test.test_os; print(test.__path__[0])").Output()
	if err != nil {
		t.Skip("SKIPPED: the tests of Python's library are not installed: run make deps")
	}
	command(t, exec.Command("cp", "-a", strings.TrimSpace(string(out)), filepath.Join(dir, "test")))
	command(t, exec.Command("find", dir, "-name", "__pycache__", "-prune", "-exec", "rm", "-r", "{}", "+"))
	if err := os.WriteFile(filepath.Join(dir, "outcomes.py"), []byte(printOutcomes), 0o644); err != nil {
		t.Fatal(err)
	}
}

func runPython(t *testing.T, dir string) outcomes {
	t.Helper()
	modules := pythonModules
	if testfs.Full() {
		modules = append(modules, slowPythonModules...)
	}

	cmd := exec.CommandContext(t.Context(), python, append([]string{"outcomes.py"}, modules...)...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "PYTHONPATH="+dir, "TMPDIR="+filepath.Join(dir, "tmp"), "HOME="+dir, "LC_ALL=C.UTF-8")
	var log strings.Builder
	cmd.Stderr = &log
	out, err := cmd.Output()
	if err != nil {
		t.Errorf("%s: %v", dir, err)
	}

	// A test counts as failed if one of its parts did.
	all := outcomes{}
	for line := range strings.Lines(string(out)) {
		test, outcome, ok := strings.Cut(strings.TrimSpace(line), "\t")
		if !ok {
			continue
		}
		if all[test] != "failed" {
			all[test] = outcome
		}
	}

	if log.Len() > 0 {
		t.Logf("%s: %s", dir, log.String())
	}
	return all
}

// stressors call what programs call on files, and verify what they can. The first are fast.
var (
	stressors = []string{"access", "chattr", "chmod", "chown", "copy-file", "dentry", "dir", "dirdeep", "dirmany",
		"dnotify", "dup", "fallocate", "fanotify", "fcntl", "fiemap", "file-ioctl", "filename", "flock", "fsize", "fstat",
		"getdent", "handle", "io", "lease", "locka", "lockf", "lockofd", "mknod", "open", "rename", "touch", "utime",
		"xattr"}
	slowStressors = []string{"chdir", "fpunch", "inode-flags", "inotify", "link", "symlink", "sync-file"}
)

func fillStressNG(t *testing.T, _ string) { need(t, "stress-ng") }

func runStressNG(t *testing.T, dir string) outcomes {
	t.Helper()
	names := stressors
	if testfs.Full() {
		names = append(names, slowStressors...)
	}

	all := outcomes{}
	for _, name := range names {
		cmd := exec.CommandContext(t.Context(), "stress-ng", "--"+name, "1", "--"+name+"-ops", "20", "--timeout", "10",
			"--verify", "--temp-path", filepath.Join(dir, "tmp"))
		cmd.Dir = dir
		out, err := cmd.CombinedOutput()
		var exit *exec.ExitError
		switch {
		case err == nil && strings.Contains(string(out), "skipping stress"):
			all[name] = "skipped"
		case err == nil:
			all[name] = "passed"
		case errors.As(err, &exit):
			all[name] = "failed"
			t.Logf("%s: %s: %v\n%s", dir, name, err, out)
		default:
			t.Error(err)
		}
	}
	return all
}

// fioJobs write to a file that is in the golden, by several ways into the kernel, and read back what they wrote.
var fioJobs = map[string][]string{
	"as imported": {"--rw=randread", "--verify_only=1", "--ioengine=psync"},
	"psync":       {"--rw=randwrite", "--ioengine=psync"},
	"vectors":     {"--rw=randrw", "--ioengine=pvsync2"},
	"mmap":        {"--rw=randwrite", "--ioengine=mmap"},
	"direct":      {"--rw=randwrite", "--ioengine=libaio", "--iodepth=8", "--direct=1"},
	"sync":        {"--rw=randwrite", "--ioengine=sync", "--fdatasync=64"},
	"truncate":    {"--rw=write", "--ioengine=psync", "--create_on_open=1", "--fallocate=none", "--unlink=0"},
}

// fio runs a job on a file in a directory.
func fio(t *testing.T, dir, file string, more ...string) *exec.Cmd {
	cmd := exec.CommandContext(t.Context(), "fio", append([]string{"--name=job", "--filename=" + file, "--size=1m",
		"--bs=4k", "--verify=crc32c", "--verify_fatal=1", "--randseed=7", "--minimal"}, more...)...)
	cmd.Dir = dir
	return cmd
}

// fillFio writes a file for each job.
func fillFio(t *testing.T, dir string) {
	t.Helper()
	need(t, "fio")
	for name := range fioJobs {
		command(t, fio(t, dir, strings.ReplaceAll(name, " ", "-"), "--rw=randwrite", "--ioengine=psync", "--do_verify=0"))
	}
}

func runFio(t *testing.T, dir string) outcomes {
	t.Helper()
	all := outcomes{}
	var g sync.WaitGroup
	var mu sync.Mutex
	for name, more := range fioJobs {
		g.Go(func() {
			outcome := "passed"
			if out, err := fio(t, dir, strings.ReplaceAll(name, " ", "-"), more...).CombinedOutput(); err != nil {
				outcome = "failed"
				t.Logf("%s: %s: %v\n%s", dir, name, err, out)
			}
			mu.Lock()
			defer mu.Unlock()
			all[name] = outcome
		})
	}

	g.Wait()
	return all
}
