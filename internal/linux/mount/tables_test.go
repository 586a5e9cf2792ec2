package mount_test

import (
	"os/exec"
	"syscall"
	"testing"

	"pando/internal/linux/mount"

	"golang.org/x/sys/unix"
)

// Mount tables show the copy that another namespace has, and only that, for as long as it lasts:
// whether the kernel lists the namespaces or they are found by their processes.
func TestTables(t *testing.T) {
	for name, read := range map[string]func(t *testing.T) *mount.Tables{
		"listed": func(t *testing.T) *mount.Tables {
			tables, err := mount.ReadTables(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			return tables
		},
		"living": func(t *testing.T) *mount.Tables {
			tables, err := mount.ReadLivingTables(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			return tables
		},
	} {
		t.Run(name, func(t *testing.T) {
			forms(t, func(t *testing.T, h held) {
				found := func() []mount.Holder {
					t.Helper()
					out, err := read(t).Mounts(h.query)
					if err != nil {
						t.Fatal(err)
					}
					return out
				}
				if f := found(); len(f) > 0 {
					t.Fatalf("mounted once, but %+v", f)
				}
				p := startRole(t, "wait", func(c *exec.Cmd) {
					c.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
				})
				ns := namespace(t, p.String())
				if f := found(); len(f) != 1 || f[0].MountNS != ns || f[0].Mountpoint != h.dir {
					t.Errorf("%+v, want the copy in namespace %d", f, ns)
				}
				p.stop()
				if f := found(); len(f) > 0 {
					t.Errorf("the copy is gone, but %+v", f)
				}
			})
		})
	}
}

// What cannot be seen must not be taken for absent.
func TestTablesComplete(t *testing.T) {
	needRoot(t)
	tables, err := mount.ReadTables(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		t.Fatal(err)
	}
	t.Logf("Linux %s, complete: %v", unix.ByteSliceToString(u.Release[:]), tables.Complete())
	living, err := mount.ReadLivingTables(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if living.Complete() {
		t.Error("namespaces that were found by their processes count as all that there are")
	}
}
