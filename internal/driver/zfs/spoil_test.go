package zfs_test

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"pando/internal/driver"
	"pando/internal/driver/drivertest"
	driverzfs "pando/internal/driver/zfs"
	"pando/internal/linux/zfs"
)

// spoiler breaks objects by their user properties.
type spoiler struct {
	t    testing.TB
	root string
}

func newSpoiler(t testing.TB, dir string) drivertest.Spoiler {
	root, err := os.Readlink(filepath.Join(dir, driverzfs.Link))
	if err != nil {
		t.Fatal(err)
	}
	return spoiler{t, root}
}

// at is where the identity of an object is.
func (s spoiler) at(id driver.ObjectID) string {
	ds := s.root + "/" + string(id)
	if own := ds + "@" + string(id); zfs.ZFS.Do(context.Background(), "list", own) == nil {
		return own
	}
	return ds
}

func (s spoiler) Identity(id driver.ObjectID) string {
	rows, err := zfs.ZFS.Rows(context.Background(), 1, "get", "-Hp", "-o", "value", "pando:identity", s.at(id))
	if err != nil {
		s.t.Fatal(err)
	}
	return rows[0][0]
}

func (s spoiler) Put(id driver.ObjectID, text string) {
	zdo(s.t, "set", "pando:identity="+text, s.at(id))
}
func (s spoiler) Remove(id driver.ObjectID)       { zdo(s.t, "inherit", "pando:identity", s.at(id)) }
func (s spoiler) RemoveData(driver.ObjectID) bool { return false }
func (s spoiler) More() map[string]func(id driver.ObjectID) bool {
	return map[string]func(driver.ObjectID) bool{}
}

func (s spoiler) Foreign(id driver.ObjectID) func() {
	ds := s.root + "/" + string(id)
	foreign := []string{
		s.root + "/other", s.root + "/other/deep", s.root + "/other@snap", s.root + "/" + strings.ToUpper(string(id)),
		s.root + "/with space",
		s.root + "/other/" + string(driver.NewID()), s.root + "@daily", s.root + "@" + string(driver.NewID()),
	}
	for _, n := range foreign {
		if strings.Contains(n, "@") {
			zdo(s.t, "snapshot", n)
		} else {
			zdo(s.t, "create", n)
		}
	}
	zdo(s.t, "snapshot", ds+"@daily") // goes where the content goes
	return func() {
		rows, err := zfs.ZFS.Rows(context.Background(), 1, "list", "-Hp", "-r", "-t", "all", "-o", "name", s.root)
		if err != nil {
			s.t.Fatal(err)
		}
		var names []string
		daily := ""
		for _, r := range rows {
			names = append(names, r[0])
			if r[0] != s.root+"@daily" && strings.HasSuffix(r[0], "@daily") {
				daily = r[0]
			}
		}
		for _, n := range foreign {
			if !slices.Contains(names, n) {
				s.t.Errorf("somebody else's %q is gone: there are %q", n, names)
			}
		}
		if daily == "" {
			s.t.Errorf("somebody else's snapshot of a volume is gone: there are %q", names)
		} else {
			zdo(s.t, "destroy", daily)
		}
		zdo(s.t, "destroy", "-r", s.root+"/other")
		for _, n := range []string{foreign[3], foreign[4], s.root + "@daily", foreign[7]} {
			zdo(s.t, "destroy", n)
		}
		// With the snapshot gone the graveyard can be emptied.
		d, err := driverzfs.Open(context.Background(), s.dir(), "conformance-test-pool", false)
		if err != nil {
			s.t.Fatal(err)
		}
		if n, err := d.(driver.Tied).Reap(context.Background()); n != 1 || err != nil {
			s.t.Errorf("reaped %d, %v", n, err)
		}
		zdo(s.t, "destroy", s.root+"/graveyard")
	}
}

// dir is a directory with the link to the root.
func (s spoiler) dir() string {
	dir := s.t.TempDir()
	if err := os.Symlink(s.root, filepath.Join(dir, driverzfs.Link)); err != nil {
		s.t.Fatal(err)
	}
	return dir
}
