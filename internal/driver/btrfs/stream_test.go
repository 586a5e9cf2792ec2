package btrfs_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/driver/btrfs"
	"pando/internal/linux/btrfsstream"
	"pando/internal/linux/kernel"
	"pando/internal/testing/faulttest"
	"pando/internal/testing/testfs"
	"pando/internal/testing/treetest"

	"golang.org/x/sys/unix"
)

func snapshot(t *testing.T, d *btrfs.Driver, from driver.ObjectID) driver.ObjectID {
	t.Helper()
	id := identity(driver.Snapshot)
	if err := d.Snapshot(t.Context(), from, id); err != nil {
		t.Fatal(err)
	}
	return id.ID
}

func send(t *testing.T, d *btrfs.Driver, from, base driver.ObjectID) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := d.Send(t.Context(), from, base, &b); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func receive(t *testing.T, d *btrfs.Driver, base driver.ObjectID, stream []byte) driver.ObjectID {
	t.Helper()
	id := identity(driver.Snapshot)
	if err := d.Receive(t.Context(), id, base, bytes.NewReader(stream)); err != nil {
		t.Fatal(err)
	}
	return id.ID
}

func infoOf(t *testing.T, tree string) kernel.SubvolInfo {
	t.Helper()
	f, err := os.Open(tree)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	info, err := kernel.SubvolInfoOf(f)
	if err != nil {
		t.Fatal(err)
	}
	return info
}

// btrfsProgram runs btrfs(8), the reference.
func btrfsProgram(t *testing.T, stdin io.Reader, args ...string) []byte {
	t.Helper()
	cmd := exec.Command("btrfs", args...)
	var out, stderr bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = stdin, &out, &stderr
	if err := cmd.Run(); err != nil {
		t.Fatalf("btrfs %q: %v: %s", args, err, stderr.String())
	}
	return out.Bytes()
}

// TestStreamsOfPrograms: what btrfs-send(8) sends can be received, in each version
// of the format, and what the driver sends btrfs-receive(8) can, with the same
// result.
func TestStreamsOfPrograms(t *testing.T) {
	if _, err := exec.LookPath("btrfs"); err != nil {
		t.Skip("SKIPPED: there is no program btrfs: run make deps")
	}
	a, b := pool(t, testfs.Btrfs(t, 512<<20)), pool(t, testfs.Btrfs(t, 1<<30))
	theirs := testfs.Btrfs(t, 1<<30)
	vol, tree := create(t, a)
	treetest.Build(t, tree)
	snaps := []driver.ObjectID{snapshot(t, a, vol)}
	for _, change := range []func(){
		func() {
			write(t, filepath.Join(tree, "size/4096"), []byte("other"))
			_ = os.Rename(filepath.Join(tree, "dirs"), filepath.Join(tree, "renamed"))
		},
		func() {
			_ = os.RemoveAll(filepath.Join(tree, "renamed/wide"))
			_ = os.Rename(filepath.Join(tree, "names"), filepath.Join(tree, "renamed/names"))
		},
	} {
		change()
		snaps = append(snaps, snapshot(t, a, vol))
	}
	for _, version := range []string{"1", "2"} {
		base := driver.ObjectID("")
		for i, s := range snaps {
			args := []string{"send", "-q", "--proto", version}
			if version == "2" {
				args = append(args, "--compressed-data")
			}
			if i > 0 {
				args = append(args, "-p", treeOf(t, a, snaps[i-1]))
			}
			base = receive(t, b, base, btrfsProgram(t, nil, append(args, treeOf(t, a, s))...))
			treetest.Compare(t, treeOf(t, a, s), treeOf(t, b, base), 0)
		}
	}
	for i, s := range snaps {
		parent := driver.ObjectID("")
		if i > 0 {
			parent = snaps[i-1]
		}
		btrfsProgram(t, bytes.NewReader(send(t, a, s, parent)), "receive", theirs)
		// The program leaves the times of the root as its work has made them.
		treetest.Compare(t, treeOf(t, a, s), filepath.Join(theirs, string(s)+".subvol"), treetest.Root)
	}
}

// TestStreamNested: subvolumes inside cannot be sent, and must not be left out in
// silence.
func TestStreamNested(t *testing.T) {
	d := pool(t, testfs.Btrfs(t, 512<<20))
	vol, tree := create(t, d)
	plain := snapshot(t, d, vol)
	subvol(t, filepath.Join(tree, "var/lib/machines"))
	inside := snapshot(t, d, vol)
	stream := send(t, d, plain, "")
	for what, err := range map[string]error{
		"send":                 d.Send(t.Context(), inside, "", io.Discard),
		"send with it as base": d.Send(t.Context(), plain, inside, io.Discard),
		"receive onto it":      d.Receive(t.Context(), identity(driver.Snapshot), inside, bytes.NewReader(stream)),
	} {
		if !errs.Is(err, errs.Unsupported) || errs.HintOf(err) == "" || !strings.Contains(err.Error(), "var/lib/machines") {
			t.Errorf("%s: %v with hint %q", what, err, errs.HintOf(err))
		}
	}
}

// TestReceivedUUID: what was received says so, what is made of it to be written
// does not, or increments would be built on what has changed.
func TestReceivedUUID(t *testing.T) {
	a, b := pool(t, testfs.Btrfs(t, 128<<20)), pool(t, testfs.Btrfs(t, 256<<20))
	vol, tree := create(t, a)
	write(t, filepath.Join(tree, "f"), []byte("x"))
	s0 := snapshot(t, a, vol)
	write(t, filepath.Join(tree, "f"), []byte("y"))
	s1 := snapshot(t, a, vol)
	whole, diff := send(t, a, s0, ""), send(t, a, s1, s0)
	r0 := receive(t, b, "", whole)
	if got, want := infoOf(t, treeOf(t, b, r0)).ReceivedUUID, infoOf(t, treeOf(t, a, s0)).UUID; got != want {
		t.Errorf("what was received is noted as received from %x, not %x", got, want)
	}
	// Also of what was received.
	same := snapshot(t, b, r0)
	receive(t, b, same, diff)

	clone := identity(driver.Volume)
	if err := b.Clone(t.Context(), r0, clone); err != nil {
		t.Fatal(err)
	}
	if got := infoOf(t, treeOf(t, b, clone.ID)).ReceivedUUID; got != [16]byte{} {
		t.Errorf("a clone is noted as received from %x", got)
	}
	// A snapshot that becomes a volume and again a snapshot is another.
	for name, change := range map[string]func(driver.Identity) error{
		"SetIdentity": func(id driver.Identity) error { return b.SetIdentity(t.Context(), id) },
		"Restore":     func(id driver.Identity) error { return b.Restore(t.Context(), id) },
	} {
		flipped := identity(driver.Snapshot)
		if err := b.Receive(t.Context(), flipped, "", bytes.NewReader(whole)); err != nil {
			t.Fatal(err)
		}
		if err := change(flipped); err != nil { // which changes nothing
			t.Fatal(err)
		}
		receive(t, b, flipped.ID, diff)
		flipped.Kind = driver.Volume
		if err := change(flipped); err != nil {
			t.Fatal(err)
		}
		write(t, filepath.Join(treeOf(t, b, flipped.ID), "f"), []byte("changed"))
		flipped.Kind = driver.Snapshot
		if err := change(flipped); err != nil {
			t.Fatal(err)
		}
		if err := b.Receive(t.Context(), identity(driver.Snapshot), flipped.ID, bytes.NewReader(diff)); !errs.Is(err,
			errs.Conflict) {
			t.Errorf("%s: an increment on what has changed: %v, want a conflict", name, err)
		}
	}
}

// TestReceivedOften receives one stream more often than the kernel can note, which
// would make some kernels give up the filesystem.
func TestReceivedOften(t *testing.T) {
	dir := testfs.Btrfs(t, 512<<20)
	a := pool(t, dir)
	vol, tree := create(t, a)
	write(t, filepath.Join(tree, "f"), []byte("x"))
	s0 := snapshot(t, a, vol)
	stream := send(t, a, s0, "")
	f, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	uuid := infoOf(t, treeOf(t, a, s0)).UUID
	for i := range 405 {
		id := identity(driver.Snapshot)
		id.Ephemeral = true // quicker
		if err := a.Receive(t.Context(), id, "", bytes.NewReader(stream)); err != nil {
			t.Fatalf("number %d: %v", i, err)
		}
		noted := infoOf(t, treeOf(t, a, id.ID)).ReceivedUUID == uuid
		if want := i < 400; noted != want {
			t.Fatalf("number %d is noted: %v, want %v", i, noted, want)
		}
		if n, err := kernel.BtrfsReceivedCount(f, uuid); err != nil || n != min(i+1, 400) {
			t.Fatalf("after number %d, %d are noted, %v", i, n, err)
		}
	}
}

// TestStreamImmutableFlags: a file that must not be changed, here, has been changed
// where there are no such flags, and comes back.
func TestStreamImmutableFlags(t *testing.T) {
	a, b := pool(t, testfs.Btrfs(t, 128<<20)), pool(t, testfs.Btrfs(t, 128<<20))
	vol, tree := create(t, a)
	write(t, filepath.Join(tree, "dir/fixed"), []byte("x"))
	write(t, filepath.Join(tree, "dir/log"), []byte("x"))
	s0 := snapshot(t, a, vol)
	r0 := receive(t, b, "", send(t, a, s0, ""))
	fork := identity(driver.Volume)
	if err := b.Clone(t.Context(), r0, fork); err != nil {
		t.Fatal(err)
	}
	ft := treeOf(t, b, fork.ID)
	write(t, filepath.Join(ft, "dir/fixed"), []byte("changed"))
	if err := errors.Join(os.Rename(filepath.Join(ft, "dir/log"), filepath.Join(ft, "log")),
		os.Remove(filepath.Join(ft, "log"))); err != nil {
		t.Fatal(err)
	}
	stream := send(t, b, snapshot(t, b, fork.ID), r0)

	// The same content, with flags, under the same UUID: as if it had been so.
	sealed := treeOf(t, a, s0)
	flag := func(name string, flags int) {
		t.Helper()
		f, err := os.Open(filepath.Join(sealed, name))
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if err := unix.IoctlSetPointerInt(int(f.Fd()), unix.FS_IOC_SETFLAGS, flags); err != nil {
			t.Fatal(err)
		}
	}
	setWritable(t, sealed)
	flag("dir/fixed", 0x10)
	flag("dir/log", 0x20)
	flag("dir", 0x10)
	setReadOnly(t, sealed)
	back := treeOf(t, a, receive(t, a, s0, stream))
	wantFiles(t, back, map[string]string{"dir/fixed": "changed"})
}

func setWritable(t *testing.T, path string) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := kernel.SubvolSetReadOnly(f, false); err != nil {
		t.Fatal(err)
	}
}

// TestStreamCompressed: compressed data travels compressed, and lies so afterwards.
func TestStreamCompressed(t *testing.T) {
	a, b := pool(t, testfs.Btrfs(t, 256<<20)), pool(t, testfs.Btrfs(t, 256<<20))
	vol, tree := create(t, a)
	if err := unix.Setxattr(tree, "btrfs.compression", []byte("zstd"), 0); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(tree, "f"), bytes.Repeat([]byte("all the same "), 1<<20))
	s0 := snapshot(t, a, vol)
	stream := send(t, a, s0, "")
	if len(stream) > 2<<20 {
		t.Skipf("SKIPPED: the stream of 13 MiB that compress well has %d bytes: this kernel cannot send compressed data",
			len(stream))
	}
	r0 := receive(t, b, "", stream)
	treetest.Compare(t, treeOf(t, a, s0), treeOf(t, b, r0), 0)
	// Sent on, it is as it was.
	if again := send(t, b, r0, ""); len(again) > 2<<20 {
		t.Errorf("received and sent again, the stream has %d bytes, was %d", len(again), len(stream))
	}
}

// The variables by which the test program becomes a child that uses a pool.
const (
	childVariable = "PANDO_TEST_STREAM_CHILD" // "send" or "receive"
	childRequest  = "PANDO_TEST_STREAM_REQUEST"
)

// request is what a child is to do.
type request struct {
	Dir  string
	ID   driver.Identity // what to make, or the ID of what to send
	Base driver.ObjectID
}

// TestChild is no test: see childVariable.
func TestChild(t *testing.T) {
	what := os.Getenv(childVariable)
	if what == "" {
		t.Skip("it is only for other tests")
	}
	fail := func(err error) {
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(3)
		}
	}
	var r request
	fail(json.Unmarshal([]byte(os.Getenv(childRequest)), &r))
	d, err := btrfs.Open(context.Background(), r.Dir, "pool", false)
	fail(err)
	if what == "send" {
		fail(d.(driver.Streamer).Send(context.Background(), r.ID.ID, r.Base, os.Stdout))
	} else {
		fail(d.(driver.Streamer).Receive(context.Background(), r.ID, r.Base, os.Stdin))
	}
	os.Exit(0) // before the test framework prints
}

// childCommand is the command line and the environment of a child.
func childCommand(t *testing.T, what string, r request) ([]string, []string) {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	b, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	return []string{exe, "-test.run=^TestChild$"}, append(os.Environ(), childVariable+"="+what, childRequest+"="+string(b))
}

// TestReceiveKilled kills a receive before and after each of its system calls, and
// makes each fail. What is left is the whole object, or half of it that Destroy
// removes, or nothing, and nothing but it.
func TestReceiveKilled(t *testing.T) {
	if err := faulttest.Available(); err != nil {
		t.Skipf("SKIPPED: %v", err)
	}
	a := pool(t, testfs.Btrfs(t, 128<<20))
	vol, tree := create(t, a)
	write(t, filepath.Join(tree, "gone"), []byte("x"))
	write(t, filepath.Join(tree, "dir/kept"), []byte("x"))
	s0 := snapshot(t, a, vol)
	write(t, filepath.Join(tree, "dir/new"), make([]byte, 100_000))
	if err := errors.Join(os.Remove(filepath.Join(tree, "gone")), os.Chmod(filepath.Join(tree, "dir/kept"), 0o600),
		os.Symlink("x", filepath.Join(tree, "l"))); err != nil {
		t.Fatal(err)
	}
	s1 := snapshot(t, a, vol)
	whole, diff := send(t, a, s0, ""), send(t, a, s1, s0)

	dir := testfs.Btrfs(t, 256<<20)
	b := pool(t, dir)
	base := receive(t, b, "", whole)
	before := count(t, dir)
	for _, plan := range []faulttest.Plan{
		{Mode: faulttest.KillBefore}, {Mode: faulttest.KillAfter}, {Mode: faulttest.Fail,
			Errno: unix.EIO}, {Mode: faulttest.Fail, Errno: unix.ENOSPC},
	} {
		plan.PathPrefix = []string{dir}
		t.Run(plan.Mode.String()+" "+unix.ErrnoName(plan.Errno), func(t *testing.T) {
			var id driver.Identity
			wholes, halves, nothings := 0, 0, 0
			last := faulttest.Sweep{Plan: plan}.Each(t, func(p faulttest.Plan) faulttest.Result {
				id = identity(driver.Snapshot)
				cmd, env := childCommand(t, "receive", request{Dir: dir, ID: id, Base: base})
				res, err := faulttest.Run(t.Context(), cmd, faulttest.Options{Plan: p, Env: env, Stdin: bytes.NewReader(diff)})
				if err != nil {
					t.Fatal(err)
				}
				return res
			}, func(res faulttest.Result) {
				found := 0
				for o, err := range b.List(t.Context()) {
					if err != nil {
						t.Fatal(err)
					}
					switch {
					case o.ID == base:
					case o.ID != id.ID:
						t.Errorf("there is an object that nobody made: %+v", o)
					case o.Whole:
						found, wholes = 1, wholes+1
						treetest.Compare(t, treeOf(t, a, s1), treeOf(t, b, id.ID), 0)
						if _, err := b.Attachment(t.Context(), id.ID); err != nil || !readOnly(t, treeOf(t, b, id.ID)) {
							t.Errorf("whole, but not as it must be: %v", err)
						}
					default:
						found, halves = 1, halves+1
						if o.Err != nil {
							t.Errorf("half an object cannot be read: %v", o.Err)
						}
					}
				}
				if found == 0 {
					nothings++
				}
				if plan.Mode == faulttest.Fail && found == 1 && res.ExitCode != 0 {
					t.Errorf("it failed with %q, and something was left", res.Stderr)
				}
				if plan.Mode == faulttest.Fail && res.ExitCode == 0 && found == 0 {
					t.Error("it succeeded, and there is nothing")
				}
				for range 2 {
					if err := b.Destroy(t.Context(), id.ID); err != nil {
						t.Fatal(err)
					}
				}
				if n := count(t, dir); n != before {
					t.Errorf("%d subvolumes after it was destroyed, %d before it was made", n, before)
				}
			})
			if last.ExitCode != 0 {
				t.Errorf("left alone, it fails: %s", last.Stderr)
			}
			if err := b.Destroy(t.Context(), id.ID); err != nil {
				t.Fatal(err)
			}
			t.Logf("%d steps in all; whole objects were left %d times, halves %d, nothing %d", len(last.Steps), wholes, halves,
				nothings)
			kills := plan.Mode != faulttest.Fail
			if len(last.Steps) < 20 || plan.Mode != faulttest.KillAfter && nothings == 0 || kills &&
				(halves == 0 || wholes == 0) {
				t.Error("that is not what a receive looks like")
			}
		})
	}
}

// TestSendStopped stops a process that sends and lets it go on, which may make the
// kernel begin anew. Either the stream is whole, or it says that it is not.
func TestSendStopped(t *testing.T) {
	dir := testfs.Btrfs(t, 256<<20)
	a := pool(t, dir)
	vol, tree := create(t, a)
	big := make([]byte, 24<<20)
	for i := range big {
		big[i] = byte(i * i >> 7)
	}
	write(t, filepath.Join(tree, "big"), big)
	s0 := snapshot(t, a, vol)
	broken := 0
	for range 4 {
		args, env := childCommand(t, "send", request{Dir: dir, ID: driver.Identity{ID: s0}})
		cmd := exec.Command(args[0], args[1:]...)
		cmd.Env = env
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		var stream bytes.Buffer
		for range 6 {
			if _, err := io.CopyN(&stream, out, 1<<20); err != nil && err != io.EOF {
				t.Fatal(err)
			}
			time.Sleep(20 * time.Millisecond) // its pipes are full again
			if err := errors.Join(cmd.Process.Signal(unix.SIGSTOP), cmd.Process.Signal(unix.SIGCONT)); err != nil {
				break // it has ended
			}
		}
		if _, err := io.Copy(&stream, out); err != nil {
			t.Fatal(err)
		}
		ended := cmd.Wait()
		s, err := btrfsstream.NewReader(&stream)
		if err == nil {
			err = s.Drain()
		}
		if (err == nil) != (ended == nil) {
			t.Errorf("it ended with %v: %s; reading its stream, with %v", ended, &stderr, err)
		}
		if ended != nil {
			broken++
			if !strings.Contains(stderr.String(), "the kernel did not send a valid stream") {
				t.Errorf("%s", &stderr)
			}
		}
	}
	t.Logf("%d of 4 were broken, and said so", broken)
}

// TestSendSignals sends while signals come in, which must not break the stream.
func TestSendSignals(t *testing.T) {
	d := pool(t, testfs.Btrfs(t, 256<<20))
	vol, tree := create(t, d)
	write(t, filepath.Join(tree, "big"), make([]byte, 1<<20)) // not a hole
	for i := range 8 {
		b := make([]byte, 3<<20)
		for j := range b {
			b[j] = byte(j * (i + j) >> 5)
		}
		write(t, filepath.Join(tree, fmt.Sprint("f", i)), b)
	}
	s0 := snapshot(t, d, vol)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() {
		for ctx.Err() == nil {
			// To each thread, as the runtime does with those that it preempts.
			tasks, _ := os.ReadDir("/proc/self/task")
			for _, task := range tasks {
				var tid int
				_, _ = fmt.Sscan(task.Name(), &tid)
				_ = unix.Tgkill(os.Getpid(), tid, unix.SIGURG)
			}
			time.Sleep(time.Millisecond)
		}
	}()
	for range 3 {
		if err := d.Send(t.Context(), s0, "", slowWriter{}); err != nil {
			t.Fatal(err)
		}
	}
}

// slowWriter keeps pipes full.
type slowWriter struct{}

func (slowWriter) Write(b []byte) (int, error) {
	time.Sleep(2 * time.Millisecond)
	return len(b), nil
}

// BenchmarkStream sends and receives large files, and many small ones.
func BenchmarkStream(b *testing.B) {
	d, err := btrfs.Open(b.Context(), testfs.Btrfs(b, 4<<30), "pool", true)
	if err != nil {
		b.Fatal(err)
	}
	defer d.(*btrfs.Driver).Close()
	s := d.(driver.Streamer)
	for _, c := range []struct {
		name        string
		files, size int
	}{{"large", 4, 64 << 20}, {"small", 20_000, 2000}} {
		vol, snap := identity(driver.Volume), identity(driver.Snapshot)
		if err := d.Create(b.Context(), vol); err != nil {
			b.Fatal(err)
		}
		a, err := d.Attachment(b.Context(), vol.ID)
		if err != nil {
			b.Fatal(err)
		}
		data := make([]byte, c.size)
		for i := range data {
			data[i] = byte(i*i>>9 ^ i)
		}
		for i := range c.files {
			dir := filepath.Join(a.Tree, fmt.Sprint(i%100))
			if err := errors.Join(os.MkdirAll(dir, 0o755),
				os.WriteFile(filepath.Join(dir, fmt.Sprint(i)), data, 0o644)); err != nil {
				b.Fatal(err)
			}
		}
		if err := d.Snapshot(b.Context(), vol.ID, snap); err != nil {
			b.Fatal(err)
		}
		var stream bytes.Buffer
		b.Run(c.name+"/send", func(b *testing.B) {
			for b.Loop() {
				stream.Reset()
				if err := s.Send(b.Context(), snap.ID, "", &stream); err != nil {
					b.Fatal(err)
				}
				b.SetBytes(int64(stream.Len()))
			}
		})
		b.Run(c.name+"/receive", func(b *testing.B) {
			b.SetBytes(int64(stream.Len()))
			for b.Loop() {
				id := identity(driver.Snapshot)
				if err := s.Receive(b.Context(), id, "", bytes.NewReader(stream.Bytes())); err != nil {
					b.Fatal(err)
				}
				b.StopTimer()
				if err := d.Destroy(b.Context(), id.ID); err != nil {
					b.Fatal(err)
				}
				b.StartTimer()
			}
		})
	}
}
