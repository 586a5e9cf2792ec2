package proof_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"pando/internal/observe/proof"
	"pando/internal/observe/stack"
	"pando/internal/testing/testfs"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
)

// forgetful is a file that answers syncs without doing anything.
type forgetful struct{ fs.FileHandle }

func (f *forgetful) Fsync(context.Context, uint32) syscall.Errno { return 0 }
func (f *forgetful) Write(ctx context.Context, data []byte, off int64) (uint32, syscall.Errno) {
	return f.FileHandle.(fs.FileWriter).Write(ctx, data, off)
}
func (f *forgetful) Read(ctx context.Context, buf []byte, off int64) (fuse.ReadResult, syscall.Errno) {
	return f.FileHandle.(fs.FileReader).Read(ctx, buf, off)
}
func (f *forgetful) Release(ctx context.Context) syscall.Errno {
	return f.FileHandle.(fs.FileReleaser).Release(ctx)
}

type forgetfulNode struct{ *fs.LoopbackNode }

func (n *forgetfulNode) WrapChild(_ context.Context, ops fs.InodeEmbedder) fs.InodeEmbedder {
	return &forgetfulNode{ops.(*fs.LoopbackNode)}
}

func (n *forgetfulNode) Open(ctx context.Context, flags uint32) (fs.FileHandle, uint32, syscall.Errno) {
	f, out, errno := n.LoopbackNode.Open(ctx, flags)
	return &forgetful{f}, out, errno
}

func (n *forgetfulNode) Create(
	ctx context.Context, name string, flags, mode uint32, out *fuse.EntryOut,
) (*fs.Inode, fs.FileHandle, uint32, syscall.Errno) {
	in, f, o, errno := n.LoopbackNode.Create(ctx, name, flags, mode, out)
	return in, &forgetful{f}, o, errno
}

// mountFUSE mounts a filesystem by a program, this one, which passes all on to dir but
// syncs.
func mountFUSE(t *testing.T, dir string) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: mounting needs root")
	}
	if _, err := os.Stat("/dev/fuse"); err != nil {
		skip(t, "no FUSE: %v", err)
	}
	loopback, err := fs.NewLoopbackRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	root := &forgetfulNode{loopback.(*fs.LoopbackNode)}
	root.RootData.RootNode = root
	at := t.TempDir()
	server, err := fs.Mount(at, root,
		&fs.Options{MountOptions: fuse.MountOptions{DirectMount: true, FsName: "forgetful", Name: "forgetful"}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := server.Unmount(); err != nil {
			t.Error(err)
			return
		}
		server.Wait()
	})
	return at
}

// TestFUSE: what a program does with syncs cannot be shown, and what cannot be shown is
// no pass.
func TestFUSE(t *testing.T) {
	onDisk(t)
	needTracepoints(t)
	dir := testfs.Ext4(t, 64<<20)
	at := mountFUSE(t, dir)
	p := watch(t, at, options{})
	wantFail(t, p, "fuse.forgetful on "+at, "could not prove that it passes syncs on")
	if l := p.Layers[0]; l.Result != proof.Unknown {
		t.Errorf("%+v", l)
	}
	if p.Calls.Result != proof.OK {
		t.Errorf("%+v", p.Calls)
	}
	// Beside it, the filesystem itself.
	wantOK(t, watch(t, dir, options{}))
}

// fio runs fio in dir, and judges.
func fio(t *testing.T, dir string, env []string, call string, more ...string) proof.Proof {
	t.Helper()
	need(t, "fio", "fio")
	s, err := stack.Of(t.Context(), dir)
	if err != nil {
		t.Fatal(err)
	}
	w, err := proof.New(t.Context(), s)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	var out bytes.Buffer
	args := append([]string{"--name=x", "--directory=" + dir, "--size=2m", "--bs=8k", "--rw=write", "--ioengine=psync",
		"--overwrite=1", "--number_ios=300", "--output-format=json", "--group_reporting=1"}, more...)
	cmd := exec.Command("fio", args...)
	cmd.Env = append(os.Environ(), env...)
	cmd.Stdout, cmd.Stderr = &out, os.Stderr
	if err := w.Start(cmd); err != nil {
		t.Fatal(err)
	}
	if err := w.Sample(t.Context(), 200*time.Millisecond); err != nil {
		t.Error(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Fatalf("%v\n%s", err, out.String())
	}
	e, err := w.Stop()
	if err != nil {
		t.Fatal(err)
	}
	var r struct {
		Jobs []struct {
			Write struct {
				Total int64 `json:"total_ios"`
			} `json:"write"`
		} `json:"jobs"`
	}
	if err := json.Unmarshal(out.Bytes(), &r); err != nil || len(r.Jobs) != 1 {
		t.Fatalf("%v\n%s", err, out.String())
	}
	p := e.Judge(proof.Load{Call: call, Syncs: r.Jobs[0].Write.Total, Writers: 1})
	show(t, p)
	return p
}

// TestPreload: a library that swallows syncs is found by what the kernel sees.
func TestPreload(t *testing.T) {
	onDisk(t)
	needTracepoints(t)
	need(t, "gcc", "gcc")
	dir := testfs.Ext4(t, 64<<20)
	lib := filepath.Join(t.TempDir(), "nosync.so")
	source := filepath.Join(t.TempDir(), "nosync.c")
	if err := os.WriteFile(source, []byte(`
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
int fsync(int fd) { (void)fd; return 0; }
int fdatasync(int fd) { (void)fd; return 0; }
static int without(const char *name, const char *path, int flags, va_list list) {
	int (*real)(const char *, int, ...) = dlsym(RTLD_NEXT, name);
	int mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(list, int) : 0;
	return real(path, flags & ~O_SYNC & ~O_DSYNC, mode);
}
#define OPEN(name) int name(const char *path, int flags, ...) { \
	va_list l; va_start(l, flags); int fd = without(#name, path, flags, l); va_end(l); return fd; }
OPEN(open)
OPEN(open64)
`), 0o600); err != nil {
		t.Fatal(err)
	}
	do(t, "gcc", "-shared", "-fPIC", "-O1", "-o", lib, source, "-ldl")
	p := fio(t, dir, []string{"LD_PRELOAD=" + lib}, "fdatasync", "--fdatasync=1")
	wantFail(t, p, "system call", "a layer above the kernel swallows them")
	if !strings.Contains(p.Reasons[0], "LD_PRELOAD="+lib) || p.Calls.Counted > 5 || p.Calls.Reported < 50 {
		t.Errorf("%q %+v", p.Reasons, p.Calls)
	}
	p = fio(t, dir, []string{"LD_PRELOAD=" + lib}, "write (O_DSYNC)", "--sync=dsync")
	wantFail(t, p, "system call", "no file was opened with O_DSYNC")

	wantOK(t, fio(t, dir, nil, "fdatasync", "--fdatasync=1"))
	wantOK(t, fio(t, dir, nil, "write (O_DSYNC)", "--sync=dsync"))
	// A buffered profile by mistake.
	wantFail(t, fio(t, dir, nil, "fdatasync"), "system call", "the kernel counted 0 of")
}

// TestIOUring: syncs that are no system calls cannot be compared with those.
func TestIOUring(t *testing.T) {
	onDisk(t)
	needTracepoints(t)
	need(t, "fio", "fio")
	if out, err := exec.Command("fio", "--name=x", "--filename="+filepath.Join(t.TempDir(), "f"), "--size=64k",
		"--rw=write", "--ioengine=io_uring").CombinedOutput(); err != nil {
		skip(t, "fio has no io_uring here: %s", out)
	}
	p := fio(t, testfs.Ext4(t, 64<<20), nil, "fdatasync", "--ioengine=io_uring", "--fdatasync=1")
	wantFail(t, p, "system call", "io_uring")
	if p.Calls.Result != proof.Unknown {
		t.Errorf("%+v", p.Calls)
	}
}

// TestNoRoot: who may not trace counts by block statistics, and says so.
func TestNoRoot(t *testing.T) {
	onDisk(t)
	if os.Geteuid() != 0 {
		skip(t, "needs root, to make filesystems for nobody")
	}
	dir := testfs.Ext4(t, 64<<20)
	p := asNobody(t, dir)
	wantOK(t, p)
	if p.Method != proof.Statistics || !strings.Contains(p.NoTraces, "trace the kernel") || p.Calls.Counted != -1 ||
		p.Calls.Result != proof.OK {
		t.Errorf("%s %q %+v", p.Method, p.NoTraces, p.Calls)
	}
	remount(t, dir, "nobarrier")
	// The first is by the options, the second by the counts.
	wantFail(t, asNobody(t, dir), "ext4 on "+dir, "mounted with nobarrier")
	wantFail(t, asNobody(t, dir, "counts"), "ext4 on "+dir, "it does not pass syncs on")
}

// asNobody watches a load as a user without rights, in a child: TestMain's "watch".
func asNobody(t *testing.T, dir string, how ...string) proof.Proof {
	t.Helper()
	file := filepath.Join(dir, "nobody")
	if err := os.WriteFile(file, make([]byte, 512<<10), 0o600); err != nil {
		t.Fatal(err)
	}
	const nobody = 65534
	if err := os.Chown(file, nobody, nobody); err != nil {
		t.Fatal(err)
	}
	for d := dir; d != "/"; d = filepath.Dir(d) {
		info, err := os.Stat(d)
		if err != nil {
			t.Fatal(err)
		}
		if info.Mode()&0o005 != 0o005 && strings.HasPrefix(d, os.TempDir()+"/") {
			if err := os.Chmod(d, 0o755); err != nil {
				t.Fatal(err)
			}
		}
	}
	program := filepath.Join(t.TempDir(), "test") // where nobody can read it
	b, err := os.ReadFile("/proc/self/exe")
	if err == nil {
		err = testfs.WriteProgram(program, b)
	}
	if err == nil {
		err = os.Chmod(filepath.Dir(program), 0o755)
	}
	if err == nil {
		err = os.Chmod(filepath.Dir(filepath.Dir(program)), 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(program, append([]string{file}, how...)...)
	cmd.Env = append(os.Environ(), "PANDO_TEST_WATCH=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	var p proof.Proof
	if err := json.Unmarshal(out, &p); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	show(t, p)
	return p
}

// watchHere is the child of asNobody.
func watchHere(ctx context.Context, args []string) error {
	file := args[0]
	s, err := stack.Of(ctx, filepath.Dir(file))
	if err != nil {
		return err
	}
	w, err := proof.New(ctx, s)
	if err != nil {
		return err
	}
	defer w.Close()
	if err := w.Baseline(ctx, 100*time.Millisecond); err != nil {
		return err
	}
	var out bytes.Buffer
	cmd := exec.Command("/proc/self/exe", strconv.Itoa(leastMS()), strconv.Itoa(leastWrites), file)
	cmd.Env = append(os.Environ(), "PANDO_TEST_LOAD=fdatasync", "PANDO_TEST_WATCH=")
	cmd.Stdout, cmd.Stderr = &out, os.Stderr
	if err := w.Start(cmd); err != nil {
		return err
	}
	if err := w.Sample(ctx, 50*time.Millisecond); err != nil {
		return err
	}
	if err := cmd.Wait(); err != nil {
		return err
	}
	e, err := w.Stop()
	if err != nil {
		return err
	}
	if len(args) > 1 && args[1] == "counts" {
		e.Forget()
	}
	var l loaded
	if err := json.Unmarshal(out.Bytes(), &l); err != nil {
		return fmt.Errorf("%w: %s", err, out.String())
	}
	return json.NewEncoder(os.Stdout).Encode(e.Judge(proof.Load{Call: "fdatasync", Syncs: l.Syncs, Writers: 1,
		P50: l.P50}))
}
