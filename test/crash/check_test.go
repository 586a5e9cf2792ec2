//go:build linux && (amd64 || arm64)

package crash

import (
	"database/sql"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"pando/internal/driver"
	"pando/internal/driver/drivertest"
	"pando/internal/driver/objdir"
	"pando/internal/linux/kernel"
	"pando/internal/linux/mount"
	"pando/internal/testing/testfs"

	"golang.org/x/sys/unix"
	_ "modernc.org/sqlite"
)

// check compares the pool with its catalogue, from outside: every object has a
// row and every row an object, nobody is at work, nothing waits to be removed,
// and only what is mounted has a loop device, a mount and a mount point.
func (w *world) check() {
	w.t.Helper()
	db, err := sql.Open("sqlite", "file:"+filepath.Join(w.dir, "catalog.db"))
	if err != nil {
		w.t.Fatal(err)
	}
	defer db.Close()
	column := func(q string) []string {
		w.t.Helper()
		rows, err := db.Query(q)
		if err != nil {
			w.t.Fatal(err)
		}
		defer rows.Close()
		out := []string{}
		for rows.Next() {
			var s string
			if err := rows.Scan(&s); err != nil {
				w.t.Fatal(err)
			}
			out = append(out, s)
		}
		slices.Sort(out)
		return out
	}
	if m := column("SELECT op || ' ' || id FROM marks"); len(m) > 0 {
		w.t.Errorf("LEAK: marks of dead processes: %v", m)
	}
	if m := column("SELECT ref FROM tombstones WHERE reclaimed = 0"); len(m) > 0 {
		w.t.Errorf("LEAK: destroyed and not reclaimed: %v", m)
	}
	rows := column("SELECT id FROM objects")
	said := w.objects()
	if ids := slices.Sorted(maps.Keys(said)); !slices.Equal(ids, rows) {
		w.t.Errorf("LEAK: objects %v\nrows %v", ids, rows)
	}
	w.checkIdentities(column, said)
	w.checkGoldens(column, said)
	for _, m := range column("SELECT mountpoint FROM attachments JOIN objects USING (id) " +
		"WHERE mount_id <> 0 AND loop >= 0 AND lower = ''") {
		if frozen(w.t, m) {
			w.t.Errorf("LEAK: the filesystem at %s is frozen", m)
		}
	}
	for _, n := range column("SELECT loop FROM attachments JOIN objects USING (id) WHERE loop >= 0 AND lower <> ''") {
		if frozenUpper(w.t, "/dev/loop"+n) {
			w.t.Errorf("LEAK: the upper layer on loop device %s is frozen", n)
		}
	}

	below := w.dir + "/mnt/" // a volume that was renamed is still mounted under its former name
	mounted := column(fmt.Sprintf("SELECT substr(mountpoint, %d) FROM attachments WHERE mountpoint LIKE '%s%%'",
		len(below)+1, below))
	entries, err := os.ReadDir(filepath.Join(w.dir, "mnt"))
	if err != nil {
		w.t.Fatal(err)
	}
	points := []string{}
	for _, e := range entries {
		points = append(points, e.Name())
	}
	if !slices.Equal(points, mounted) {
		w.t.Errorf("LEAK: mount points %v, mounted %v", points, mounted)
	}
	attached := column("SELECT mountpoint FROM attachments")
	lowers := column("SELECT DISTINCT lower FROM attachments JOIN objects USING (id) WHERE lower <> ''")
	var loops, mounts []string
	for _, leak := range testfs.Leaks(w.dir, 0) {
		switch {
		case strings.Contains(leak, "/data/objects/"):
			loops = append(loops, leak)
		case !strings.HasSuffix(leak, " mounted at "+w.dir+"/data") && !strings.Contains(leak, "backing.xfs"):
			mounts = append(mounts, leak)
		}
	}
	own := w.ownDir()
	if isMounted(w.t, own) {
		mounts = append(mounts, own)
	} else if _, err := os.Lstat(own); err == nil {
		w.t.Errorf("LEAK: %s is there but not mounted", own)
	}
	if isMounted(w.t, w.live()) {
		mounts = append(mounts, w.live())
	}
	w.checkAsides()
	if len(mounts) != len(attached) {
		w.t.Errorf("LEAK: mounts %v, attachments %v", mounts, attached)
	}
	if w.kind.name == "reflink" && len(loops) != len(attached)+len(lowers) {
		w.t.Errorf("LEAK: loop devices %v, attachments %v, lower layers %v", loops, attached, lowers)
	}
}

// objects returns the identity, as text, of everything that lies in the pool, by ID.
// What should not be there is an error.
func (w *world) objects() map[string]string {
	w.t.Helper()
	if w.kind.objects != nil {
		return w.kind.objects(w)
	}
	dir := filepath.Join(w.dir, "data", "objects")
	entries, err := os.ReadDir(dir)
	if err != nil {
		w.t.Fatal(err)
	}
	out, files := map[string]string{}, map[string]int{}
	for _, e := range entries {
		if len(e.Name()) < driver.IDLength || !driver.ValidID(e.Name()[:driver.IDLength]) {
			w.t.Errorf("LEAK: %s among the objects", e.Name())
			continue
		}
		id := e.Name()[:driver.IDLength]
		out[id] = drivertest.ReadMeta(filepath.Join(dir, id+".meta"))
		files[id]++
	}
	for id, n := range files {
		if n != 2 {
			w.t.Errorf("LEAK: %d files of object %s, wanted 2", n, id)
		}
	}
	return out
}

// checkIdentities compares what the pool says of each object with the catalogue.
func (w *world) checkIdentities(column func(string) []string, objects map[string]string) {
	w.t.Helper()
	for _, row := range column("SELECT id || ' ' || kind || ' ' || name || ' ' || volume || ' ' || (pinned > 0) || ' ' " +
		"|| (expires_at > 0) || ' ' || consistency || ' ' || golden || ' ' || labels FROM objects") {
		id, err := objdir.Decode([]byte(objects[row[:driver.IDLength]]))
		pinned, expires := "0", "0"
		if !id.Pinned.IsZero() {
			pinned = "1"
		}
		if !id.ExpiresAt.IsZero() {
			expires = "1"
		}
		labels := id.Labels.Text()
		if id.Kind == driver.Generation { // its golden has them: see checkGoldens
			labels = ""
		}
		if said := strings.Join([]string{string(id.ID), string(id.Kind), id.Name, string(id.Volume), pinned,
			expires, string(id.Consistency), id.Golden, labels}, " "); err != nil || said != row {
			w.t.Errorf("the pool says %q, the catalogue %q, %v", said, row, err)
		}
	}
}

// checkGoldens compares the labels of goldens with the identities of their current generations.
func (w *world) checkGoldens(column func(string) []string, objects map[string]string) {
	w.t.Helper()
	for _, row := range column("SELECT o.id || ' ' || g.labels FROM goldens g JOIN objects o " +
		"ON o.kind = 'generation' AND o.golden = g.name AND o.generation = g.current") {
		id, err := objdir.Decode([]byte(objects[row[:driver.IDLength]]))
		if said := string(id.ID) + " " + id.Labels.Text(); err != nil || said != row {
			w.t.Errorf("the pool says of a golden %q, the catalogue %q, %v", said, row, err)
		}
	}
}

// frozen reports whether a mounted filesystem is frozen: if not, it can be.
func frozen(t testing.TB, path string) bool {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	err = kernel.Freeze(f)
	if errors.Is(err, unix.EBUSY) {
		return true
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := kernel.Thaw(f); err != nil {
		t.Fatal(err)
	}
	return false
}

// frozenUpper is frozen for the upper layer of an overlay, which is mounted nowhere but in the overlay.
func frozenUpper(t testing.TB, device string) bool {
	t.Helper()
	m, err := mount.Device("ext4", device, nil, false)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	dir, err := m.Open()
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	return frozen(t, fmt.Sprintf("/proc/self/fd/%d", dir.Fd()))
}

func isMounted(t testing.TB, path string) bool {
	t.Helper()
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	return strings.Contains(string(b), " "+path+" ")
}

// nothingLeft checks that a removed pool is gone.
func (w *world) nothingLeft() {
	w.t.Helper()
	if _, err := os.Lstat(w.dir); err == nil {
		w.t.Errorf("LEAK: %s is still there", w.dir)
	}
	if w.kind.left != nil {
		w.kind.left(w)
	}
	for _, l := range testfs.Leaks(filepath.Dir(w.dir), time.Second) {
		w.t.Errorf("LEAK: %s", l)
	}
	for _, path := range testfs.OpenFiles(w.t, w.dir) {
		w.t.Errorf("LEAK: this process still has %s open", path)
	}
}
