package engine_test

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine"
	"pando/internal/linux/loopdev"
	"pando/internal/linux/mount"
	"pando/internal/testing/testfs"

	"golang.org/x/sys/unix"
)

// ephemeral makes an ephemeral clone of g that is mounted.
func ephemeral(t *testing.T, e *engine.Engine, name string) api.Object {
	t.Helper()
	out, err := e.Clone(t.Context(), engine.CloneRequest{From: ref.Ref{Name: "g"}, Name: ref.MustName(name), Mount: true,
		Ephemeral: true})
	if err != nil {
		t.Fatal(err)
	}
	return out[0]
}

// mountedDevice is the loop device of a mounted volume, and the options of its filesystem.
func mountedDevice(t *testing.T, v api.Object) (device string, super []string) {
	t.Helper()
	table, err := mount.Table("self")
	if err != nil {
		t.Fatal(err)
	}
	m, ok := mount.At(table, v.Mountpoint)
	if !ok || m.Point != v.Mountpoint {
		t.Fatalf("%s is not mounted", v.Mountpoint)
	}
	return filepath.Base(m.Source), strings.Split(m.Super, ",")
}

func loopSetting(t *testing.T, device, name string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("/sys/block", device, name))
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(b))
}

// flushesOf is how many flushes a loop device has been given; -1 if the kernel does not count them.
func flushesOf(t *testing.T, device string) int {
	t.Helper()
	stat := strings.Fields(loopSetting(t, device, "stat"))
	if len(stat) < 17 {
		return -1
	}
	n, err := strconv.Atoi(stat[15])
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// writeSynced writes n blocks of 8 KiB to a file, each with an fdatasync.
func writeSynced(t testing.TB, path string, n int) []byte {
	t.Helper()
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	all := bytes.Repeat([]byte("8 KiB of text..."), n<<13/16)
	for i := range n {
		if _, err := f.Write(all[i<<13 : (i+1)<<13]); err != nil {
			t.Fatal(err)
		}
		if err := unix.Fdatasync(int(f.Fd())); err != nil {
			t.Fatal(err)
		}
	}
	return all
}

// TestEphemeralMount: the syncs of an ephemeral ext4 flush nothing, those of other volumes do; whatever another program
// does with the loop device later flushes as usual.
func TestEphemeralMount(t *testing.T) {
	for _, fs := range []driver.FS{driver.Ext4, driver.XFS} {
		t.Run(string(fs), func(t *testing.T) {
			e := livePool(t, "xfs", fs)
			drops := fs == driver.Ext4

			for _, c := range []struct {
				v     api.Object
				drops bool
			}{{ephemeral(t, e, "e"), drops}, {clone(t, e, "g", "d", true), false}} {
				device, super := mountedDevice(t, c.v)
				if got := slices.Contains(super, "nobarrier") || slices.Contains(super, "barrier=0"); got != c.drops {
					t.Errorf("%s is mounted with %q", c.v.Name, super)
				}
				if got := slices.Contains(super, "commit=300"); got != c.drops {
					t.Errorf("%s is mounted with %q", c.v.Name, super)
				}
				if got := loopSetting(t, device, "queue/write_cache"); got != "write back" {
					t.Errorf("%s: the write cache of %s is %q", c.v.Name, device, got)
				}
				if got := loopSetting(t, device, "loop/dio"); c.drops && got != "0" {
					t.Errorf("%s: %s uses direct I/O: %q", c.v.Name, device, got)
				}

				before := flushesOf(t, device)
				writeSynced(t, filepath.Join(c.v.Mountpoint, "synced"), 20)
				if got := flushesOf(t, device) - before; before >= 0 && (got == 0) != c.drops {
					t.Errorf("%s: 20 syncs made %d flushes", c.v.Name, got)
				}
			}

			destroy(t, e, "e", "d")
		})
	}
}

// TestEphemeralRemount: an ephemeral volume keeps its data when it is unmounted, and its options when it is mounted
// again, also by an umount that is refused.
func TestEphemeralRemount(t *testing.T) {
	e := livePool(t, "xfs", driver.Ext4)
	v := ephemeral(t, e, "e")
	want := writeSynced(t, filepath.Join(v.Mountpoint, "synced"), 20)
	if err := os.WriteFile(filepath.Join(v.Mountpoint, "loose"), want, 0o600); err != nil {
		t.Fatal(err)
	}

	check := func(when string) {
		t.Helper()
		device, super := mountedDevice(t, v)
		if !slices.Contains(super, "nobarrier") && !slices.Contains(super, "barrier=0") {
			t.Errorf("%s: mounted with %q", when, super)
		}
		if got := loopSetting(t, device, "loop/dio"); got != "0" {
			t.Errorf("%s: direct I/O: %q", when, got)
		}
		for _, f := range []string{"synced", "loose"} {
			if got, err := os.ReadFile(filepath.Join(v.Mountpoint, f)); err != nil || !bytes.Equal(got, want) {
				t.Errorf("%s: %s has %d bytes, %v", when, f, len(got), err)
			}
		}
	}

	// While a process keeps the loop device, it is mounted again.
	device, _ := mountedDevice(t, v)
	held, err := os.Open("/dev/" + device)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := e.Umount(t.Context(), engine.UmountRequest{Volume: ref.MustName("e")}); !errs.Is(err, errs.InUse) {
		t.Errorf("umount while a process has the device open: %v", err)
	}
	held.Close()
	check("after a refused umount")

	// Unmounted, and mounted.
	if _, err := e.Umount(t.Context(), engine.UmountRequest{Volume: ref.MustName("e")}); err != nil {
		t.Fatal(err)
	}
	if v, err = e.Mount(t.Context(), engine.MountRequest{Volume: ref.MustName("e")}); err != nil {
		t.Fatal(err)
	}
	check("mounted again")
	destroy(t, e, "e")
}

// powerLost is a copy of a filesystem as it would be after a power loss at this moment.
func powerLost(t *testing.T, fs *testfs.FS, kind string) string {
	t.Helper()
	image, dir := filepath.Join(t.TempDir(), "image"), t.TempDir()
	fs.CopyTo(image)
	f, err := os.OpenFile(image, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	dev, err := loopdev.Attach(t.Context(), f, loopdev.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer dev.Close()

	options := map[string][]string{"xfs": {"nouuid"}}[kind]
	m, err := mount.Device(kind, dev.Path, options, false)
	if err != nil {
		log, _ := exec.Command("sh", "-c", "dmesg | tail -n 40").Output()
		t.Fatalf("%v; the kernel says:\n%s", err, log)
	}
	defer m.Close()
	if _, err := m.MoveTo(dir); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := mount.Unmount(dir); err != nil {
			t.Error(err)
		}
	})

	return dir
}

// TestDurableCopiesOfEphemeral: forks and generations made from an ephemeral volume have all its data, and survive a
// power loss right after the command, whether the volume is mounted or not. So does every other volume.
func TestDurableCopiesOfEphemeral(t *testing.T) {
	for _, inner := range []driver.FS{driver.Ext4, driver.XFS} {
		for _, c := range []struct {
			name    string
			mounted bool
			make    func(t *testing.T, e *engine.Engine) api.Object
		}{
			{"fork", true, func(t *testing.T, e *engine.Engine) api.Object { return clone(t, e, "e", "copy", false) }},
			{"fork-idle", false, func(t *testing.T, e *engine.Engine) api.Object {
				return clone(t, e, "e", "copy", false)
			}},
			{"fork-many", false, func(t *testing.T, e *engine.Engine) api.Object {
				out, err := e.Clone(t.Context(), engine.CloneRequest{From: ref.Ref{Name: "e"}, Name: ref.MustName("copy"),
					Count: 3})
				if err != nil {
					t.Fatal(err)
				}
				return out[2]
			}},
			{"fork-of-snapshot", true, func(t *testing.T, e *engine.Engine) api.Object {
				if _, err := e.Snapshot(t.Context(), engine.SnapshotRequest{Volume: ref.MustName("e"),
					Name: ref.MustName("s")}); err != nil {
					t.Fatal(err)
				}
				out, err := e.Clone(t.Context(), engine.CloneRequest{From: ref.Ref{Name: "e", At: "s"},
					Name: ref.MustName("copy")})
				if err != nil {
					t.Fatal(err)
				}
				return out[0]
			}},
			{"publish", true, func(t *testing.T, e *engine.Engine) api.Object {
				out, err := e.Publish(t.Context(), engine.PublishRequest{Golden: ref.MustName("made"),
					Volume: ref.MustName("e")})
				if err != nil {
					t.Fatal(err)
				}
				return out.Object
			}},
			{"publish-frozen", true, func(t *testing.T, e *engine.Engine) api.Object {
				out, err := e.Publish(t.Context(), engine.PublishRequest{Golden: ref.MustName("made"),
					Volume: ref.MustName("e"), Freeze: engine.FreezeAlways})
				if err != nil {
					t.Fatal(err)
				}
				return out.Object
			}},
		} {
			t.Run(string(inner)+"/"+c.name, func(t *testing.T) {
				fs := testfs.New(t, "xfs", 1<<30)
				e := newPool(t, fs.Dir(), engine.InitRequest{Driver: "reflink"})
				if _, err := e.Import(t.Context(), engine.ImportRequest{Name: ref.MustName("g"), Source: source(t), FS: inner,
					SizeBytes: 320 << 20}); err != nil {
					t.Fatal(err)
				}

				// Write to an ephemeral volume, partly without a sync.
				v := ephemeral(t, e, "e")
				want := writeSynced(t, filepath.Join(v.Mountpoint, "synced"), 400)
				if err := os.WriteFile(filepath.Join(v.Mountpoint, "loose"), want, 0o600); err != nil {
					t.Fatal(err)
				}
				if !c.mounted {
					if _, err := e.Umount(t.Context(), engine.UmountRequest{Volume: ref.MustName("e")}); err != nil {
						t.Fatal(err)
					}
				}

				// Copy it, and lose the power.
				id := driver.ObjectID(c.make(t, e).ID)
				after := powerLost(t, fs, "xfs")
				checkLost(t, filepath.Join(after, "pool", "data", "objects", string(id)+".img"), inner, want, "synced", "loose")
				if strings.HasPrefix(c.name, "publish") {
					checkImage(t, e, inner, id) // there is nothing to replay
				}
			})
		}
	}
}

// checkLost checks the files in an image that has lost the power, on a filesystem that may be changed.
func checkLost(t *testing.T, image string, inner driver.FS, want []byte, names ...string) {
	t.Helper()
	if err := os.Chmod(image, 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(image, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	dev, err := loopdev.Attach(t.Context(), f, loopdev.Options{SectorBytes: 4096})
	if err != nil {
		t.Fatal(err)
	}
	defer dev.Close()

	// Mount it, which replays its log.
	options := map[driver.FS][]string{driver.XFS: {"nouuid"}}[inner]
	m, err := mount.Device(string(inner), dev.Path, options, false)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	root, err := m.Open()
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()

	for _, name := range names {
		got, err := os.ReadFile(fmt.Sprintf("/proc/self/fd/%d/%s", root.Fd(), name))
		if err != nil || !bytes.Equal(got, want) {
			t.Errorf("after a power loss, %s has %d bytes, of %d, or others: %v", name, len(got), len(want), err)
		}
	}
}
