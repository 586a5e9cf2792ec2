//go:build linux && (amd64 || arm64)

package crash

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"pando/internal/driver"
	"pando/internal/testing/faulttest"
	"pando/internal/testing/testfs"
)

// In the guest of `make test-zfs`, where there is ZFS and everything is slow, the
// kinds of pools are those of ZFS.
func init() {
	if os.Getenv("PANDO_TEST_ZFS") != "" {
		kinds = []kind{
			{name: "zfs-zvol", init: []string{"--driver", "zfs"}, dir: zfsDir, more: zfsDataset, objects: zfsObjects,
				left: zfsLeft, size: []string{"--fs", "ext4", "--size", "64M"}},
			{name: "zfs-native", init: []string{"--driver", "zfs"}, dir: zfsDir, more: zfsDataset, objects: zfsObjects,
				left: zfsLeft},
		}
		sparsely, initEvery, slow = 24, 4, true
		drawn = drawSome
		if !testfs.Full() {
			faults = faults[:1]
		}
	}
}

// drawSome is one of the operations that have the most of ZFS in them; with PANDO_TEST_FULL all.
func drawSome(t *testing.T, all []operation) []operation {
	most := []string{"clone-mount", "destroy-mounted", "snapshot-mounted", "overlay-clone-mount",
		"overlay-destroy-mounted"}
	if !testfs.ZFSHasOverlays() {
		overlay := func(o operation) bool { return strings.HasPrefix(o.name, "overlay-") }
		all, most = slices.DeleteFunc(slices.Clone(all), overlay), most[:3]
	}
	if testfs.Full() {
		return all
	}
	one := most[faulttest.Draw(t, len(most))]
	return slices.DeleteFunc(slices.Clone(all), func(o operation) bool { return o.name != one })
}

func zfsDir(t *testing.T) string { return filepath.Join(t.TempDir(), "pool") }

func zfsDataset(t *testing.T) []string {
	return []string{"--zfs-dataset", testfs.ZFS(t, 1<<30) + "/pando"}
}

// zfsObjects asks ZFS what there is, without Pando's help: every dataset is an
// object with an identity, its own or that of its snapshot of the same name, and
// other snapshots go with what needs them.
func zfsObjects(w *world) map[string]string {
	w.t.Helper()
	root, err := os.Readlink(filepath.Join(w.dir, "data", "dataset"))
	if err != nil {
		w.t.Fatal(err)
	}
	// Not what is inherited: a snapshot without an identity would show its dataset's.
	cmd := exec.Command("zfs", "get", "-Hp", "-r", "-t", "filesystem,volume,snapshot", "-o", "name,property,value,source",
		"pando:identity,defer_destroy", root)
	out, err := cmd.Output()
	if err != nil {
		w.t.Fatalf("%v: %v", cmd, err)
	}
	said, deferred, there := map[string]string{}, map[string]bool{}, map[string]bool{}
	for line := range strings.Lines(string(out)) {
		f := strings.Split(strings.TrimSuffix(line, "\n"), "\t")
		name := strings.TrimPrefix(f[0], root+"/")
		there[name] = true
		switch {
		case f[1] == "pando:identity" && f[3] == "local":
			said[name] = f[2]
		case f[1] == "defer_destroy" && f[2] == "on":
			deferred[name] = true
		}
	}
	objects := map[string]string{}
	for name := range there {
		dataset, snap, isSnap := strings.Cut(name, "@")
		switch {
		case name == root || strings.HasPrefix(name, root+"@") || dataset == "graveyard":
		case isSnap && !deferred[name] && snap != dataset:
			w.t.Errorf("LEAK: the snapshot %s is nobody's, and would stay", name)
		case isSnap:
		case !driver.ValidID(dataset):
			w.t.Errorf("LEAK: %s among the objects", name)
		default:
			objects[dataset] = said[dataset]
			if own := dataset + "@" + dataset; there[own] && !deferred[own] {
				objects[dataset] = said[own]
			}
		}
	}
	return objects
}

// zfsLeft checks that a removed pool has left its zpool as it was.
func zfsLeft(w *world) {
	w.t.Helper()
	zpool, _, _ := strings.Cut(w.more[1], "/")
	out, err := exec.Command("zfs", "list", "-H", "-r", "-t", "all", "-o", "name", zpool).Output()
	if err != nil || string(out) != zpool+"\n" {
		w.t.Errorf("LEAK: %v, the zpool holds:\n%s", err, out)
	}
}
