package engine_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"testing"
	"time"

	"pando/internal/base/ref"
	"pando/internal/base/warnings"
	"pando/internal/driver"
	"pando/internal/driver/plain"
	"pando/internal/driver/reflink"
	"pando/internal/engine"
	"pando/internal/testing/testfs"

	"golang.org/x/sys/unix"
)

// events returns what happened in a pool, each as VERB:NAME. Names that contain a time have * in its place.
func events(t *testing.T, dir, name string) []string {
	t.Helper()
	h, err := engine.ReadHistory(dir, engine.HistoryQuery{Ref: name})
	must(t, err)
	var out []string
	for _, e := range h.Events {
		out = append(out, e.Verb+":"+timeInName.ReplaceAllString(e.Name, "*"))
	}
	return out
}

var timeInName = regexp.MustCompile(`[0-9]{8}T[0-9.]+Z`)

// silent are the methods of Engine that change nothing that users see of an object.
var silent = map[string]string{
	"Diff": "reads", "Close": "", "Dir": "", "PoolID": "", "Caps": "", "Export": "reads", "Volumes": "reads",
	"Labels": "reads", "LabelsInUse": "reads", "Finds": "reads", "MadeBy": "reads", "VolumePage": "reads",
	"Mountpoints": "reads", "VolumeNames": "reads", "Show": "reads", "Goldens": "reads", "Pool": "reads", "Sync": "",
	"SnapshotNames": "reads", "GoldenSource": "reads", "LockSource": "locks", "Point": "reads", "NamesOf": "reads",
	"PointByID": "reads", "Points": "reads", "OpenImage": "reads", "SendStream": "reads", "PlanStream": "reads",
	"ReceivesRaw": "", "Key": "reads", "SamePoint": "reads", "Links": "reads", "PutLink": "a hint", "DropLink": "a hint",
	"DropLinks": "a hint", "RemoteHeads": "reads", "PutRemoteHead": "a hint", "SeeRemoteHeads": "a hint",
	"DropRemoteHead": "a hint", "HoldPoint": "locks", "CanUpdate": "reads", "SendsStreams": "", "SendTree": "reads",
	"CanReceive": "", "CheckPush": "reads",
	"BuildBase": "reads", "CachedBuild": "reads", "BuildLog": "reads", "LockBuild": "locks",
	"LinkOf": "reads", "SpendReserve": "", "HasReserve": "", "ResizePool": "no object of the pool",
	"BeginTask": "locks", "FreeSpace": "reads", "SnapshotsWith": "reads",
	"Metrics": "reads", "NotePushed": "a hint", "Lineage": "reads", "Remains": "reads",
	"GC": "removes only what was destroyed before, and what Maintain does",
}

// TestEveryVerbHasEvents runs every method of Engine that changes something, and finds it in the history. A new method
// must get a step here, or a reason in silent.
func TestEveryVerbHasEvents(t *testing.T) {
	e := newPool(t, testfs.New(t, "xfs", 1<<30).Dir(), engine.InitRequest{Driver: reflink.Name})
	ctx, name, src := t.Context(), ref.MustName, source(t)
	at := func(r string) ref.Ref {
		out, err := ref.Parse("test", r)
		must(t, err)
		return out
	}

	covered := map[string]bool{}
	seen := 0
	step := func(method string, err error, want ...string) {
		t.Helper()
		must(t, err)
		covered[method] = true
		all := events(t, e.Dir(), "")
		if got := all[seen:]; strings.Join(got, " ") != strings.Join(want, " ") {
			t.Errorf("%s: got %q, want %q", method, got, want)
		}
		seen = len(all)
	}

	importTree(t, e, "g", src)
	step("Import", nil, "import:g@1")
	clone(t, e, "g", "v", true)
	step("Clone", nil, "clone:v", "mount:v")
	_, err := e.Clone(ctx, engine.CloneRequest{From: at("g"), Name: name("many"), Count: 2})
	step("Clone", err, "clone:many-1", "clone:many-2")
	_, err = e.Fork(ctx, engine.CloneRequest{From: at("v"), Name: name("f")})
	step("Fork", err, "fork:f")
	_, err = e.Snapshot(ctx, engine.SnapshotRequest{Volume: name("v"), Name: name("s")})
	step("Snapshot", err, "snapshot:v@s")
	_, err = e.SnapshotGroup(ctx, engine.SnapshotGroupRequest{Volumes: []ref.Name{name("v"), name("f")}, Name: name("t")})
	step("SnapshotGroup", err, "snapshot:v@t", "snapshot:f@t")
	_, err = e.Destroy(ctx, toDestroy("v@t", "f@t"))
	step("Destroy", err, "destroy:v@t", "destroy:f@t")
	_, err = e.Publish(ctx, engine.PublishRequest{Golden: name("g"), Volume: name("v")})
	step("Publish", err, "publish:g@2")
	for _, r := range []string{"v", "v@s", "g"} {
		_, err = e.SetLabels(ctx, engine.LabelRequest{Ref: at(r), Set: map[string]string{"team": "web"}})
		step("SetLabels", err, "label:"+r)
	}
	_, err = e.Rename(ctx, engine.RenameRequest{Ref: at("v"), Name: name("w")})
	step("Rename", err, "rename:w")
	_, err = e.Rename(ctx, engine.RenameRequest{Ref: at("w@s"), Name: name("z")})
	step("Rename", err, "rename:w@z")
	_, err = e.Rename(ctx, engine.RenameRequest{Ref: at("g"), Name: name("h")})
	step("Rename", err, "rename:h")
	_, err = e.Umount(ctx, engine.UmountRequest{Volume: name("w")})
	step("Umount", err, "umount:w")
	_, err = e.Mount(ctx, engine.MountRequest{Volume: name("w")})
	step("Mount", err, "mount:w")
	_, err = e.Mount(ctx, engine.MountRequest{Volume: name("w")})
	step("Mount", err) // it is mounted already
	_, err = e.Umount(ctx, engine.UmountRequest{Volume: name("w")})
	step("Umount", err, "umount:w")
	_, err = e.Shell(ctx, engine.ShellRequest{Volume: name("w"), Command: []string{"true"}, Env: os.Environ()})
	step("Shell", err, "mount:w", "umount:w")
	_, err = e.Rewind(ctx, engine.RewindRequest{Volume: name("w"), Snapshot: name("z")})
	step("Rewind", err, "rewind:w", "snapshot:w@before-rewind-*")
	_, err = e.Rebase(ctx, engine.RebaseRequest{Volume: name("many-1"), Onto: at("h@2")})
	step("Rebase", err, "rebase:many-1", "snapshot:many-1@before-rebase-*")
	_, err = e.Resize(ctx, engine.ResizeRequest{Volume: name("w"), SizeBytes: 320 << 20})
	step("Resize", err, "resize:w")
	_, err = e.Pin(ctx, at("w"), time.Hour)
	step("Pin", err, "pin:w")
	_, err = e.Unpin(ctx, at("w"))
	step("Unpin", err, "unpin:w")
	_, err = e.SetTTL(ctx, name("w"), time.Hour)
	step("SetTTL", err, "set:w")
	_, err = e.Keep(ctx, engine.KeepRequest{Golden: name("h"), Generations: 1})
	step("Keep", err, "keep:h", "destroy:h@1")
	overlay(t, e, "h", "o", false)
	step("Clone", nil, "clone:o")
	_, err = e.Flatten(ctx, engine.FlattenRequest{Volume: name("o")})
	step("Flatten", err, "flatten:o", "snapshot:o@before-flatten-*", "destroy:o@before-flatten-*")
	never := driver.OverlayNever
	_, err = e.SetGolden(ctx, engine.SetRequest{Golden: name("h"), Overlay: &never})
	step("SetGolden", err, "set:h")
	_, err = e.Run(ctx, engine.RunRequest{From: at("h"), Name: name("r"),
		Do: func(context.Context, engine.Info) error { return nil }})
	step("Run", err, "clone:r", "mount:r", "destroy:r")
	build := engine.BuildRequest{Golden: name("b"), From: at("h"), Key: "k", Command: []string{"true"}, Env: buildEnv}
	_, err = e.Build(ctx, build)
	step("Build", err, "build:b@1")
	build.Key = "l"
	_, err = e.PublishFetched(ctx, build, at("b@1"))
	step("PublishFetched", err, "build:b@2")
	_, err = e.RemoveGolden(engine.Unrecorded(ctx), at("b"))
	step("RemoveGolden", err)
	_, err = e.Receive(ctx, receiveRaw("p", func(context.Context, engine.Target) error { return nil }))
	step("Receive", err, "pull:p", "pull:p@s")
	point, err := e.Point(ctx, at("p@s"))
	must(t, err)
	step("PutPushedLink", e.PutPushedLink(ctx, engine.Link{Repo: "r", Manifest: "m", Object: point.ID}, "backup"),
		"push:p@s")
	_, err = e.Destroy(engine.Unrecorded(ctx), toDestroy("p"))
	step("Destroy", err)
	_, err = e.Destroy(ctx, toDestroy("w"))
	step("Destroy", err, "destroy:w@before-rewind-*", "destroy:w@z", "destroy:w")

	_, err = e.Clone(ctx, engine.CloneRequest{From: at("h"), Name: name("brief"), TTL: time.Nanosecond})
	step("Clone", err, "clone:brief")
	_, err = e.Maintain(ctx)
	step("Maintain", err, "expire:brief")
	_, err = e.Clone(ctx, engine.CloneRequest{From: at("h"), Name: name("brief"), TTL: time.Nanosecond})
	step("Clone", err, "clone:brief")
	_, err = e.WatchExpiry().DestroyDue(ctx)
	step("WatchExpiry", err, "expire:brief")
	_, err = e.Prune(ctx, engine.PruneRequest{KeepFreePercent: 99.9})
	step("Prune", err, "prune:many-2", "prune:f", "prune:many-1@before-rebase-*", "prune:many-1", "prune:o")
	_, err = e.RemoveGolden(ctx, at("h"))
	step("RemoveGolden", err, "destroy:h@2")

	for i := range reflect.TypeOf(e).NumMethod() {
		m := reflect.TypeOf(e).Method(i).Name
		if _, ok := silent[m]; !ok && !covered[m] {
			t.Errorf("Engine.%s: add a step for its events, or a reason in silent", m)
		}
	}
	if t.Failed() {
		return
	}

	// By names that objects had, and after they are gone.
	for name, want := range map[string]string{
		"v": "clone:v mount:v snapshot:v@s snapshot:v@t destroy:v@t label:v label:v@s rename:w rename:w@z umount:w " +
			"mount:w umount:w mount:w umount:w rewind:w snapshot:w@before-rewind-* resize:w pin:w unpin:w set:w " +
			"destroy:w@before-rewind-* destroy:w@z destroy:w",
		"w@z": "snapshot:v@s label:v@s rename:w@z destroy:w@z",
		"g":   "import:g@1 publish:g@2 label:g rename:h keep:h destroy:h@1 set:h destroy:h@2",
		"h@1": "import:g@1 destroy:h@1",
	} {
		if got := strings.Join(events(t, e.Dir(), name), " "); got != want {
			t.Errorf("%s: got %s, want %s", name, got, want)
		}
	}
}

// TestHistoryNeverFailsAnOperation: a log that cannot be written is a warning.
func TestHistoryNeverFailsAnOperation(t *testing.T) {
	e := newPool(t, testfs.New(t, "ext4", 256<<20).Dir(), engine.InitRequest{Driver: plain.Name})
	importTree(t, e, "g", source(t))
	log := filepath.Join(e.Dir(), "history.log")
	setImmutable(t, log, true)
	defer setImmutable(t, log, false)

	said := &warnings.List{}
	ctx := warnings.Collect(t.Context(), said)
	_, err := e.Clone(ctx, engine.CloneRequest{From: ref.Ref{Name: "g"}, Name: ref.MustName("v")})
	must(t, err)
	if w := said.Messages(); len(w) != 1 || !strings.Contains(string(w[0]), "history") {
		t.Errorf("warnings: %q", w)
	}

	setImmutable(t, log, false)
	destroy(t, e, "v")
	if got := strings.Join(events(t, e.Dir(), ""), " "); got != "import:g@1 destroy:v" {
		t.Errorf("got %s", got)
	}
}

// TestHistoryOnAFullDisk: a full disk costs events, and nothing else.
func TestHistoryOnAFullDisk(t *testing.T) {
	e := newPool(t, testfs.New(t, "ext4", 64<<20).Dir(), engine.InitRequest{Driver: plain.Name})
	importTree(t, e, "g", source(t))
	g, err := e.Point(t.Context(), ref.Ref{Name: "g"})
	must(t, err)
	link := engine.Link{Repo: "r", Manifest: "m", Object: g.ID} // needs no room outside the catalogue

	must(t, os.Remove(filepath.Join(e.Dir(), "history.log"))) // it will need a block
	filler := filepath.Join(filepath.Dir(e.Dir()), "filler")
	t.Cleanup(func() { os.Remove(filler) })
	fillDisk(t, filler)

	said := &warnings.List{}
	ctx := warnings.Collect(t.Context(), said)
	must(t, e.PutPushedLink(ctx, link, "backup"))
	if w := said.Messages(); len(w) > 0 {
		t.Errorf("warnings: %q", w)
	}
	if got := events(t, e.Dir(), ""); len(got) > 0 {
		t.Fatalf("the disk was not full: %q", got)
	}

	must(t, os.Remove(filler))
	must(t, e.PutPushedLink(ctx, link, "backup"))
	if got := strings.Join(events(t, e.Dir(), "g"), " "); got != "push:g@1" {
		t.Errorf("got %s", got)
	}
}

// fillDisk writes a file until there is no room for another byte.
func fillDisk(t *testing.T, path string) {
	t.Helper()
	f, err := os.Create(path)
	must(t, err)
	defer f.Close()
	for _, piece := range []int{1 << 20, 4 << 10, 1} {
		for err == nil {
			_, err = f.Write(make([]byte, piece))
		}
		if !errors.Is(err, unix.ENOSPC) {
			t.Fatal(err)
		}
		err = nil
	}
	must(t, f.Sync())
}

// TestHistoryNamesWho: events name the user behind sudo, and only the program of the command.
func TestHistoryNamesWho(t *testing.T) {
	e := newPool(t, t.TempDir(), engine.InitRequest{Driver: plain.Name})
	uid := uint32(1000)
	ctx := engine.ActAs(t.Context(), engine.Actor{SudoUID: &uid, SudoUser: "ann", Command: "pando golden import",
		Why: "a test"})
	_, err := e.Import(ctx, engine.ImportRequest{Name: ref.MustName("g"), Source: source(t)})
	must(t, err)
	_, err = e.Pin(t.Context(), ref.Ref{Name: "g"}, 0)
	must(t, err)

	h, err := engine.ReadHistory(e.Dir(), engine.HistoryQuery{})
	must(t, err)
	if len(h.Events) != 2 {
		t.Fatalf("got %+v", h.Events)
	}
	first, second := h.Events[0], h.Events[1]
	if first.By() != "ann" || first.Command != "pando golden import" || first.Why != "a test" ||
		first.PID != os.Getpid() || first.UID != uint32(os.Getuid()) {
		t.Errorf("got %+v", first)
	}
	if second.SudoUID != nil || second.Command != "" || second.Why != "" || second.Until != nil {
		t.Errorf("got %+v", second)
	}
}
