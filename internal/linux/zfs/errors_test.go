package zfs_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/linux/zfs"
)

// TestTable provokes what zfs and zpool complain of, with the real programs.
func TestTable(t *testing.T) {
	p := newPool(t, 256<<20)
	d := func(name string) string { return p + "/" + name }
	key := filepath.Join(t.TempDir(), "key")
	if err := os.WriteFile(key, []byte(strings.Repeat("k", 32)), 0o600); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for _, args := range [][]string{
		{"create", d("a")},
		{"create", d("a/child")},
		{"snapshot", d("a@s")},
		{"clone", d("a@s"), d("clone")},
		{"snapshot", d("clone@s2")}, {"snapshot", d("a@s0")},
		{"snapshot", d("a@held")},
		{"hold", "tag", d("a@held")},
		{"create", "-s", "-V", "16m", d("vol")},
		{"snapshot", d("vol@v")},
		{"create", "-o", "encryption=on", "-o", "keyformat=raw", "-o", "keylocation=file://" + key, d("enc1")},
		{"create", d("enc1/in")},
		{"snapshot", d("enc1/in@s")},
		{"create", "-o", "encryption=on", "-o", "keyformat=raw", "-o", "keylocation=file://" + key, d("enc2")},
		{"create", "-o", "encryption=on", "-o", "keyformat=raw", "-o", "keylocation=file://" + key, d("locked")},
		{"snapshot", d("locked@s")},
		{"create", "-o", "mountpoint=" + t.TempDir(), "-o", "canmount=noauto", d("locked/low")},
		{"unload-key", d("locked")},
		{"create", "-o", "mountpoint=" + dir, d("busy")},
		{"create", "-o", "quota=1m", d("small")},
		// Two clones of one name's snapshots, to be promoted into each other.
		{"create", d("x")}, {"snapshot", d("x@one")}, {"clone", d("x@one"), d("y")}, {"snapshot", d("y@one")},
	} {
		do(t, zfs.ZFS, args...)
	}
	f, err := os.Create(filepath.Join(dir, "open"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()

	seen := map[zfs.Reason]bool{}
	for _, c := range []struct {
		reason zfs.Reason
		kind   errs.Kind
		tool   zfs.Tool
		args   string
	}{
		{zfs.Absent, errs.NotFound, zfs.ZFS, "destroy P/nothing"},
		{zfs.Absent, errs.NotFound, zfs.ZFS, "destroy P/a@nothing"},
		{zfs.Absent, errs.NotFound, zfs.ZFS, "destroy -d P/a@nothing"},
		{zfs.Absent, errs.NotFound, zfs.ZFS, "clone P/a@nothing P/b"},
		{zfs.Absent, errs.NotFound, zfs.ZFS, "list -Hp P/nothing"},
		{zfs.Absent, errs.NotFound, zfs.ZFS, "get -Hp all nopool/x"},
		{zfs.Absent, errs.NotFound, zfs.ZFS, "set a:b=c P/nothing"},
		{zfs.Absent, errs.NotFound, zfs.ZFS, "rename P/nothing P/other"},
		{zfs.Absent, errs.NotFound, zfs.ZFS, "snapshot P/nothing@s"},
		{zfs.Absent, errs.NotFound, zfs.ZFS, "promote P/nothing"},
		{zfs.Absent, errs.NotFound, zfs.Zpool, "get -Hp all nopool"},
		{zfs.Absent, errs.NotFound, zfs.Zpool, "sync nopool"},
		{zfs.NoParent, errs.NotFound, zfs.ZFS, "create P/no/such"},
		{zfs.NoParent, errs.NotFound, zfs.ZFS, "clone P/a@s P/no/such"},
		{zfs.NoParent, errs.NotFound, zfs.ZFS, "rename P/y P/no/such"},
		{zfs.Taken, errs.Exists, zfs.ZFS, "create P/a"},
		{zfs.Taken, errs.Exists, zfs.ZFS, "snapshot P/a@s"},
		{zfs.Taken, errs.Exists, zfs.ZFS, "clone P/a@s P/vol"},
		{zfs.Taken, errs.Exists, zfs.ZFS, "rename P/y P/x"},
		{zfs.HasChildren, errs.InUse, zfs.ZFS, "destroy P/a"},
		{zfs.HasChildren, errs.InUse, zfs.ZFS, "destroy P/vol"},
		{zfs.HasChildren, errs.InUse, zfs.ZFS, "destroy P/x"},
		{zfs.HasClones, errs.InUse, zfs.ZFS, "destroy P/a@s"},
		{zfs.Held, errs.InUse, zfs.ZFS, "destroy P/a@held"},
		{zfs.SameSnapshot, errs.Exists, zfs.ZFS, "promote P/y"},
		{zfs.NotAClone, errs.Invalid, zfs.ZFS, "promote P/x"},
		{zfs.Busy, errs.InUse, zfs.ZFS, "destroy P/busy"},
		{zfs.Busy, errs.InUse, zfs.ZFS, "unmount P/busy"},
		{zfs.Full, errs.NoSpace, zfs.ZFS, "set reservation=1t P/a"},
		{zfs.Full, errs.NoSpace, zfs.ZFS, "create -V 64m P/small/vol"},
		{zfs.KeyMissing, errs.Permission, zfs.ZFS, "create P/locked/in"},
		{zfs.WrongType, errs.Invalid, zfs.ZFS, "set volsize=32m P/a"},
		{zfs.WrongType, errs.Invalid, zfs.ZFS, "create P/vol/in"},
		{zfs.BadName, errs.Invalid, zfs.ZFS, "promote P/a@s"},
		{zfs.KeyMissing, errs.Permission, zfs.ZFS, "mount P/locked/low"},
		{zfs.OtherKey, errs.Unsupported, zfs.ZFS, "rename P/enc1/in P/enc2/in"},
		{zfs.BadValue, errs.Invalid, zfs.ZFS, "create -s -V 16m -b 5000 P/v2"},
		{zfs.BadValue, errs.Invalid, zfs.ZFS, "create -s -V 0 P/v2"},
		{zfs.BadValue, errs.Invalid, zfs.ZFS, "set volsize=100000 P/vol"},
		{zfs.BadValue, errs.Invalid, zfs.ZFS, "set atime=perhaps P/a"},
		{zfs.BadValue, errs.Invalid, zfs.ZFS, "set used=1 P/a"},
		{zfs.BadValue, errs.Invalid, zfs.ZFS, "set quota=x P/a"},
		{zfs.BadValue, errs.Invalid, zfs.ZFS, "set LONG P/a"},
		{zfs.BadName, errs.Invalid, zfs.ZFS, "create P/%"},
		{zfs.BadName, errs.Invalid, zfs.ZFS, "create P//x"},
		{zfs.BadName, errs.Invalid, zfs.ZFS, "create P/NAME"},
		{zfs.TooOld, errs.Unsupported, zfs.ZFS, "snapshot P/a"},
		{zfs.TooOld, errs.Unsupported, zfs.ZFS, "list -~"},
		{zfs.TooOld, errs.Unsupported, zfs.ZFS, "create -o nosuchproperty=on P/b"},
		{zfs.TooOld, errs.Unsupported, zfs.ZFS, "get -Hp nosuchproperty P"},
		{zfs.TooOld, errs.Unsupported, zfs.ZFS, "list -Hp -o name,nosuchproperty P"},
		{zfs.TooOld, errs.Unsupported, zfs.ZFS, "nosuchverb"},
		{zfs.TooOld, errs.Unsupported, zfs.Zpool, "set feature@nosuch=enabled P"},
		{zfs.BadName, errs.Invalid, zfs.Zpool, "create P2 /dev/full"},
		{zfs.NotAncestor, errs.Unsupported, zfs.ZFS, "send -i P/x@one P/a@held"},
		{zfs.NotAncestor, errs.Unsupported, zfs.ZFS, "send -i P/a@held P/a@s"},
	} {
		var args []string
		for a := range strings.FieldsSeq(c.args) {
			a = strings.ReplaceAll(a, "P", p)
			a = strings.ReplaceAll(a, "NAME", strings.Repeat("n", 300))
			a = strings.ReplaceAll(a, "LONG", "a:b="+strings.Repeat("v", 9000))
			args = append(args, a)
		}
		err := c.tool.Do(t.Context(), args...)
		if c.reason == zfs.Held && zfs.ReasonOf(err) == zfs.Busy {
			// 2.1 does not tell them apart: "cannot destroy snapshot X: dataset is busy".
			seen[zfs.Held] = true
		} else if zfs.ReasonOf(err) != c.reason || errs.KindOf(err) != c.kind {
			t.Errorf("%s %s: %q of kind %q, wanted %q of kind %q:\n%v", c.tool, c.args, zfs.ReasonOf(err), errs.KindOf(err),
				c.reason, c.kind, err)
		} else if testing.Verbose() {
			t.Logf("%s %.60s: %.150v", c.tool, c.args, err)
		}
		seen[c.reason] = true
	}

	// What another user may not do, and what is refused on the way.
	reason, kind, hint, text := as(t, 1000, zfs.ZFS, "create", d("denied"))
	if reason != zfs.Denied || kind != errs.Permission || !strings.Contains(hint, "zfs allow -u 1000 ") {
		t.Errorf("as another user: %q of kind %q with hint %q: %s", reason, kind, hint, text)
	}
	seen[reason] = true

	// A pool that may only be read.
	ro := filepath.Join(t.TempDir(), "vdev")
	makeFile(t, ro, 128<<20)
	do(t, zfs.Zpool, "create", "-O", "mountpoint=none", "pandoro", ro)
	do(t, zfs.Zpool, "export", "pandoro")
	do(t, zfs.Zpool, "import", "-o", "readonly=on", "-d", filepath.Dir(ro), "pandoro")
	err = zfs.ZFS.Do(t.Context(), "create", "pandoro/x")
	if !zfs.Is(err, zfs.ReadOnly) || !errs.Is(err, errs.Permission) || errs.HintOf(err) == "" {
		t.Errorf("read-only pool: %q, %v", zfs.ReasonOf(err), err)
	}
	seen[zfs.ReasonOf(err)] = true
	do(t, zfs.Zpool, "destroy", "pandoro")

	// No /dev/zfs, as in a container, or without the modules.
	t.Setenv("ZFS_MODULE_TIMEOUT", "0")
	if err := os.Rename("/dev/zfs", "/dev/zfs.away"); err != nil {
		t.Fatal(err)
	}
	err = zfs.ZFS.Do(t.Context(), "list")
	if err := os.Rename("/dev/zfs.away", "/dev/zfs"); err != nil {
		t.Fatal(err)
	}
	if !zfs.Is(err, zfs.NoModules) || !errs.Is(err, errs.Unsupported) ||
		!strings.Contains(errs.HintOf(err), "modprobe zfs") {
		t.Errorf("without /dev/zfs: %q, %v", zfs.ReasonOf(err), err)
	}
	seen[zfs.ReasonOf(err)] = true

	elsewhere := map[zfs.Reason]string{
		zfs.BadStream:    "provoked by the tests of Pipe",
		zfs.Suspended:    "a pool that has lost its disk hangs this kernel's programs for good",
		zfs.BadDisk:      "needs a disk that returns nonsense",
		zfs.ElsewhereUse: "needs two hosts with one disk",
		zfs.Interrupted:  "needs a signal at the right moment",
	}
	for _, r := range zfs.TableReasons() {
		if !seen[r] && elsewhere[r] == "" {
			t.Errorf("nothing has provoked %q", r)
		}
	}
}
