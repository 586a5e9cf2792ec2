package engine_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/principal"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine"
	"pando/internal/engine/catalog"
	"pando/internal/testing/pooltest"
)

// asUser is a context of calls that a user asks for.
func asUser(t *testing.T, uid uint32) context.Context {
	return principal.With(t.Context(), principal.Principal{UID: uid})
}

// unasked are the methods that ask no policy about an object, and why.
var unasked = map[string]string{
	"HasReserve": "for tests", "SpendReserve": "for tests",
	"Caps": "no call", "Close": "no call", "Shutdown": "no call",
	"Dir": "no call", "PoolID": "no call", "SetPolicy": "no call", "Transfer": "no call", "Begin": "no call",
	"Maintain": "the pool's own work", "Sync": "changes nothing",
	"CanReceive": "about the driver", "ReceivesRaw": "about the driver", "SendsStreams": "about the driver",
	"Links": "records of a remote", "PutLink": "records of a remote", "DropLink": "records of a remote",
	"DropLinks": "records of a remote", "RemoteHeads": "records of a remote", "PutRemoteHead": "records of a remote",
	"SeeRemoteHeads": "records of a remote", "DropRemoteHead": "records of a remote",
	"ScanVolumes": "a list", "MeasuresVolumes": "a number",
	"Volumes": "a list", "Goldens": "a list", "LabelsInUse": "a list",
	"History":    "a list",
	"PlanStream": "needs ZFS", "SendStream": "needs btrfs or ZFS", "SamePoint": "needs ZFS",
}

// TestPolicyIsAsked: each call asks the policy about each object that it is given and each name that it wants, and
// changes nothing if that says no to one of them. What may not be seen is not listed.
func TestPolicyIsAsked(t *testing.T) {
	oneKind(t, func(t *testing.T, e *engine.Engine, top string) {
		importTree(t, e, "g", source(t))
		clone(t, e, "g", "v", false)
		clone(t, e, "g", "w", false)
		snapshot(t, e, "v", "s")
		clone(t, e, "g", "mounted", true)
		_, err := e.SetLabels(t.Context(), engine.LabelRequest{Ref: reference(t, "v"), Set: map[string]string{"k": "x"}})
		must(t, err)
		calls := callsOf(t, e, top)

		var asked []engine.Access
		no := ""
		e.SetPolicy(func(a engine.Access) error {
			asked = append(asked, a)
			if a.Ref == no || no == "*" {
				return errs.New(errs.Permission, a.Op, a.Ref, "no")
			}
			return nil
		})
		ctx := asUser(t, 1234)

		tested := map[string]bool{}
		for _, c := range calls {
			method, _, _ := strings.Cut(c.name, " ")
			tested[method] = true
			for _, r := range c.refs {
				before := everything(t, e)
				no, asked = r, nil
				err := c.call(ctx)
				if !errs.Is(err, errs.Permission) {
					t.Errorf("%s, refused for %q: %v", c.name, r, err)
				}
				for _, a := range asked {
					if a.Who.UID != 1234 || a.Op == "" || a.Ref == "g" && a.Kind != api.KindGolden {
						t.Errorf("%s asks %+v", c.name, a)
					}
				}
				sameDump(t, c.name+", refused for "+r, before, everything(t, e))
			}
			if err := c.call(t.Context()); !errs.Is(err, errs.Internal) {
				t.Errorf("%s, asked by nobody: %v", c.name, err)
			}
		}

		all := reflect.TypeFor[*engine.Transfer]()
		for i := range all.NumMethod() {
			name := all.Method(i).Name
			if (unasked[name] == "") != tested[name] {
				t.Errorf("%s must be either in the list of calls or in that of the others", name)
			}
		}

		no = "*"
		volumes, err1 := e.Volumes(ctx, engine.VolumesRequest{})
		names, err2 := pooltest.VolumeNames(ctx, e)
		mounts, err3 := e.Mountpoints(ctx, "ls")
		goldens, err4 := e.Goldens(ctx)
		labels, err5 := e.LabelsInUse(ctx)
		h, err6 := e.History(ctx, engine.HistoryRequest{})
		must(t, err1, err2, err3, err4, err5, err6)
		if len(h.Events) != 1 || h.Events[0].Event != "init" {
			t.Errorf("events %v", h.Events)
		}
		must(t, e.ScanVolumes(ctx, engine.VolumeScan{By: engine.ByName}, func(v api.Object) bool {
			volumes = append(volumes, v)
			return true
		}))
		if n := len(volumes) + len(names) + len(mounts) + len(goldens) + len(labels); n > 0 {
			t.Errorf("listed: %v %v %v %v %v", volumes, names, mounts, goldens, labels)
		}
		for _, q := range []engine.DestroyRequest{toDestroy("*"), {Labels: selector(t, "k")}} {
			if _, err := e.Destroy(ctx, q); !errs.Is(err, errs.NotFound) {
				t.Errorf("destroys what it may not see: %v", err)
			}
		}
		no = "w"
		if names, err := pooltest.VolumeNames(ctx, e); err != nil || !slices.Equal(names, []string{"mounted", "v"}) {
			t.Errorf("%q, %v", names, err)
		}
		no = "none"
		if names, err := pooltest.VolumeNames(t.Context(), e); !errs.Is(err, errs.Internal) {
			t.Errorf("asked by nobody: %q, %v", names, err)
		}
	})
}

// everything is what the pool holds: the catalogue, its last event, and the names and sizes of all files.
func everything(t *testing.T, e *engine.Engine) []string {
	t.Helper()
	out := append(dump(t, e.Dir()), fmt.Sprint("last event ", catalog.LastEvent(t.Context(), e.Dir(), e.PoolID())))
	must(t, filepath.WalkDir(filepath.Join(e.Dir(), "data"), func(path string, d os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		fi, err := d.Info()
		out = append(out, fmt.Sprint(path, fi.Mode(), fi.Size(), fi.ModTime()))
		return err
	}))
	return out
}

// policyCall is a call of a method, with the objects and names that it must ask about.
type policyCall struct {
	name string   // method, and what is special about the call
	refs []string // objects and names; "": the pool
	call func(context.Context) error
}

// callsOf has calls of all methods that are given objects or names; their pool is that of TestPolicyIsAsked.
func callsOf(t *testing.T, e *engine.Engine, top string) (calls []policyCall) {
	name := ref.MustName
	at := func(s string) ref.Ref { return reference(t, s) }
	s := point(t, e, "v@s").ID
	src := source(t)
	tar := filepath.Join(top, "archive.tar")
	_, err := e.Export(t.Context(), engine.ExportRequest{From: at("g"), File: tar})
	must(t, err)
	archive, err := os.Open(tar)
	must(t, err)
	dir, err := os.Open(t.TempDir())
	must(t, err)
	t.Cleanup(func() { archive.Close(); dir.Close() })
	image := engine.Content{Image: func(context.Context, engine.Target) error { return nil }}
	receive := engine.ReceiveRequest{Volume: name("n"), Snapshot: name("t"), FS: driver.Ext4, SizeBytes: 256 << 20}
	update := receive
	update.Volume, update.Update, update.Base = name("v"), true, s
	golden := receive
	golden.Volume, golden.Snapshot, golden.Golden, golden.Update, golden.Generation = name("g"), ref.Name{}, true, true, 7
	one := 1
	add := func(method string, refs string, call func(ctx context.Context) error) {
		calls = append(calls, policyCall{method, strings.Fields(refs), call})
	}
	pool := func(method string, call func(ctx context.Context) error) {
		calls = append(calls, policyCall{method, []string{""}, call})
	}

	clone := engine.CloneRequest{From: at("g"), Name: name("n")}
	add("Clone", "g@1 n", func(ctx context.Context) error { _, err := e.Clone(ctx, clone); return err })
	add("CloneAndPrepare", "g@1 n", func(ctx context.Context) error {
		_, err := e.CloneAndPrepare(ctx, clone, func(context.Context, string, string) error { return nil })
		return err
	})
	add("Fork", "v n", func(ctx context.Context) error {
		_, err := e.Fork(ctx, engine.CloneRequest{From: at("v"), Name: name("n")})
		return err
	})
	run := engine.RunRequest{From: at("g"), Name: name("n"), Command: []string{"true"}}
	add("Run", "g@1 n", func(ctx context.Context) error { _, err := e.Run(ctx, run, engine.Terminal{}); return err })
	add("RunFunc", "g@1 n", func(ctx context.Context) error {
		_, err := e.RunFunc(ctx, run, func(context.Context, api.Object) error { return nil })
		return err
	})
	add("Destroy", "v w", func(ctx context.Context) error { _, err := e.Destroy(ctx, toDestroy("v", "w")); return err })
	add("Destroy a snapshot", "v@s", func(ctx context.Context) error {
		_, err := e.Destroy(ctx, toDestroy("v@s"))
		return err
	})
	add("Snapshot", "v", func(ctx context.Context) error {
		_, err := e.Snapshot(ctx, engine.SnapshotRequest{Volume: name("v"), Name: name("t")})
		return err
	})
	add("Match", "v v@s g@1", func(ctx context.Context) error {
		what, err := ref.ParsePatterns("ls", "v", "v@s", "g")
		if err == nil {
			_, err = e.Match(ctx, engine.MatchRequest{Op: "ls", What: what, Kinds: allKinds})
		}
		return err
	})
	add("Rewind", "v v@s", func(ctx context.Context) error {
		_, err := e.Rewind(ctx, engine.RewindRequest{Volume: name("v"), Snapshot: name("s")})
		return err
	})
	add("Rebase", "v g@1", func(ctx context.Context) error {
		_, err := e.Rebase(ctx, engine.RebaseRequest{Volume: name("v"), Onto: at("g")})
		return err
	})
	add("Resize", "v", func(ctx context.Context) error {
		_, err := e.Resize(ctx, engine.ResizeRequest{Volume: name("v"), SizeBytes: 300 << 20})
		return err
	})
	add("Flatten", "v", func(ctx context.Context) error {
		_, err := e.Flatten(ctx, engine.FlattenRequest{Volume: name("v")})
		return err
	})
	add("Rename", "v n", func(ctx context.Context) error {
		_, err := e.Rename(ctx, engine.RenameRequest{Ref: at("v"), Name: name("n")})
		return err
	})
	add("Rename a golden", "g@1 n", func(ctx context.Context) error {
		_, err := e.Rename(ctx, engine.RenameRequest{Ref: at("g"), Name: name("n")})
		return err
	})
	labels := engine.LabelRequest{Ref: at("v"), Set: map[string]string{"a": "b"}}
	add("SetLabels", "v", func(ctx context.Context) error { _, err := e.SetLabels(ctx, labels); return err })
	add("Labels", "v", func(ctx context.Context) error { _, err := e.Labels(ctx, at("v")); return err })
	add("Pin", "v", func(ctx context.Context) error { _, err := e.Pin(ctx, engine.PinRequest{Ref: at("v")}); return err })
	add("Unpin", "v", func(ctx context.Context) error { _, err := e.Unpin(ctx, at("v")); return err })
	add("Expire", "v", func(ctx context.Context) error {
		_, err := e.Expire(ctx, engine.ExpireRequest{Volume: name("v")})
		return err
	})
	add("Mount", "v", func(ctx context.Context) error {
		_, err := e.Mount(ctx, engine.MountRequest{Volume: name("v")})
		return err
	})
	add("MountOn", "v", func(ctx context.Context) error {
		_, err := e.MountOn(ctx, engine.MountRequest{Volume: name("v")}, dir)
		return err
	})
	add("Umount", "v", func(ctx context.Context) error {
		_, err := e.Umount(ctx, engine.UmountRequest{Volume: name("v")})
		return err
	})
	add("Mountpoints", "v w", func(ctx context.Context) error {
		_, err := e.Mountpoints(ctx, "ls", name("v"), name("w"))
		return err
	})
	add("Golden", "g", func(ctx context.Context) error {
		_, err := e.Golden(ctx, api.Detail{Object: api.Object{Golden: "g"}})
		return err
	})
	add("Show", "v@s", func(ctx context.Context) error { _, err := e.Show(ctx, at("v@s")); return err })
	add("Diff", "v w", func(ctx context.Context) error {
		_, err := e.Diff(ctx, engine.DiffRequest{A: at("v"), B: at("w")})
		return err
	})
	export := engine.ExportRequest{From: at("v"), File: filepath.Join(top, "out.tar")}
	add("Export", "v", func(ctx context.Context) error { _, err := e.Export(ctx, export); return err })
	add("ExportStream", "v", func(ctx context.Context) error {
		_, err := e.ExportStream(ctx, engine.ExportRequest{From: at("v"), Format: "tar"}, io.Discard)
		return err
	})

	// Goldens.
	add("Import", "n", func(ctx context.Context) error {
		_, err := e.Import(ctx, engine.ImportRequest{Name: name("n"), Source: src})
		return err
	})
	add("Import a generation", "g", func(ctx context.Context) error {
		_, err := e.Import(ctx, engine.ImportRequest{Name: name("g"), Source: src, Update: true})
		return err
	})
	add("ImportStream", "n", func(ctx context.Context) error {
		_, err := e.ImportStream(ctx, engine.ImportRequest{Name: name("n")}, strings.NewReader(""))
		return err
	})
	add("ImportFile", "n", func(ctx context.Context) error {
		_, err := e.ImportFile(ctx, engine.ImportRequest{Name: name("n")}, archive)
		return err
	})
	add("Publish", "v n", func(ctx context.Context) error {
		_, err := e.Publish(ctx, engine.PublishRequest{Golden: name("n"), Volume: name("v")})
		return err
	})
	add("Publish a generation", "v g", func(ctx context.Context) error {
		_, err := e.Publish(ctx, engine.PublishRequest{Golden: name("g"), Volume: name("v")})
		return err
	})
	add("RemoveGolden", "g@1", func(ctx context.Context) error { _, err := e.RemoveGolden(ctx, at("g")); return err })
	add("Keep", "g", func(ctx context.Context) error {
		_, err := e.Keep(ctx, engine.KeepRequest{Golden: name("g"), Generations: 1})
		return err
	})
	add("SetGolden", "g", func(ctx context.Context) error {
		_, err := e.SetGolden(ctx, engine.SetRequest{Golden: name("g"), Keep: &one})
		return err
	})
	add("GoldenSource", "g", func(ctx context.Context) error { _, err := e.GoldenSource(ctx, name("g")); return err })
	for _, golden := range []string{"g", "n"} {
		add("LockSource", golden, func(ctx context.Context) error {
			_, unlock, _, err := e.LockSource(ctx, name(golden))
			if err == nil {
				unlock()
			}
			return err
		})
	}

	// What push and pull need.
	add("Point", "v@s", func(ctx context.Context) error { _, err := e.Transfer().Point(ctx, at("v@s")); return err })
	add("PointByID", "v@s", func(ctx context.Context) error { _, err := e.Transfer().PointByID(ctx, s); return err })
	for _, r := range []string{"v", "g"} {
		add("Points", r, func(ctx context.Context) error { _, err := e.Transfer().Points(ctx, name(r)); return err })
		add("NamesOf", r, func(ctx context.Context) error { _, err := e.Transfer().NamesOf(ctx, r); return err })
	}
	read := engine.ReadRequest{Point: s}
	add("OpenImage", "v@s", func(ctx context.Context) error {
		m, err := e.Transfer().OpenImage(ctx, read)
		if err == nil {
			err = m.Close()
		}
		return err
	})
	add("SendTree", "v@s", func(ctx context.Context) error { return e.Transfer().SendTree(ctx, read, io.Discard) })
	add("Key", "v@s", func(ctx context.Context) error { _, err := e.Transfer().Key(ctx, s); return err })
	add("HoldPoint", "v@s", func(ctx context.Context) error {
		release, err := e.Transfer().HoldPoint(ctx, s)
		if err == nil {
			release()
		}
		return err
	})
	add("Receive", "n", func(ctx context.Context) error {
		_, err := e.Transfer().Receive(ctx, receive, image)
		return err
	})
	add("Receive an update", "v v@s", func(ctx context.Context) error {
		_, err := e.Transfer().Receive(ctx, update, image)
		return err
	})
	add("Receive a generation", "g", func(ctx context.Context) error {
		_, err := e.Transfer().Receive(ctx, golden, image)
		return err
	})
	add("CanUpdate", "v", func(ctx context.Context) error { return e.Transfer().CanUpdate(ctx, name("v")) })

	// The pool.
	pool("Pool", func(ctx context.Context) error { _, err := e.Pool(ctx, engine.PoolRequest{}); return err })
	pool("GC", func(ctx context.Context) error { _, err := e.GC(ctx, engine.GCRequest{}); return err })
	pool("Prune", func(ctx context.Context) error { _, err := e.Prune(ctx, engine.PruneRequest{Idle: 1}); return err })
	pool("ResizePool", func(ctx context.Context) error {
		_, err := e.ResizePool(ctx, engine.PoolResizeRequest{SizeBytes: 1 << 40})
		return err
	})
	return calls
}

// TestOwners: what somebody makes is theirs, and so is everything that becomes of it, whoever makes that.
func TestOwners(t *testing.T) {
	oneKind(t, func(t *testing.T, e *engine.Engine, _ string) {
		const alice, bob = 1000, 4294967294
		importTree(t, e, "g", source(t))
		name, as := ref.MustName, func(uid uint32) context.Context { return asUser(t, uid) }
		_, err := e.Clone(as(alice), engine.CloneRequest{From: reference(t, "g"), Name: name("v")})
		must(t, err)
		_, err = e.Fork(as(bob), engine.CloneRequest{From: reference(t, "v"), Name: name("fork")})
		must(t, err)
		_, err = e.Publish(as(bob), engine.PublishRequest{Golden: name("h"), Volume: name("v")})
		must(t, err)

		// Others change them.
		for _, uid := range []uint32{0, alice, bob} {
			snap := name(fmt.Sprint("s", uid))
			_, err = e.Snapshot(as(uid), engine.SnapshotRequest{Volume: name("v"), Name: snap})
			must(t, err)
			_, err = e.Rewind(as(uid), engine.RewindRequest{Volume: name("v"), Snapshot: snap})
			must(t, err)
			_, err = e.Publish(as(uid), engine.PublishRequest{Golden: name("h"), Volume: name("v"), Force: true})
			must(t, err)
			_, err = e.Import(as(uid), engine.ImportRequest{Name: name("g"), Source: source(t), Update: true})
			must(t, err)
		}
		_, err = e.Rebase(as(bob), engine.RebaseRequest{Volume: name("v"), Onto: reference(t, "g")})
		must(t, err)
		_, err = e.Flatten(as(bob), engine.FlattenRequest{Volume: name("v")})
		must(t, err)
		_, err = e.Resize(as(bob), engine.ResizeRequest{Volume: name("v"), SizeBytes: 64 << 20, Add: true})
		must(t, err)

		// It grows where it is, as only a mounted volume does.
		_, err = e.Import(as(0), engine.ImportRequest{Name: name("xfs"), Source: source(t), FS: driver.XFS,
			SizeBytes: 320 << 20})
		must(t, err)
		_, err = e.Clone(as(alice), engine.CloneRequest{From: reference(t, "xfs"), Name: name("x"), Mount: true})
		must(t, err)
		_, err = e.Resize(as(bob), engine.ResizeRequest{Volume: name("x"), SizeBytes: 64 << 20, Add: true})
		must(t, err)
		_, err = e.Umount(as(bob), engine.UmountRequest{Volume: name("x")})
		must(t, err)
		_, err = e.Rename(as(bob), engine.RenameRequest{Ref: reference(t, "h"), Name: name("made")})
		must(t, err)
		_, err = e.SetLabels(as(0), engine.LabelRequest{Ref: reference(t, "v"), Set: map[string]string{"a": "b"}})
		must(t, err)

		// Pull makes and changes them as well.
		from := point(t, e, "v@s0")
		q := request(from)
		q.Volume, q.Links = name("pulled"), nil
		content := engine.Content{Image: func(ctx context.Context, to engine.Target) error {
			return copyImage(ctx, e, from, "", true, to, &carried{})
		}}
		_, err = e.Transfer().Receive(as(alice), q, content)
		must(t, err)
		q.Update, q.Snapshot = true, name("later")
		_, err = e.Transfer().Receive(as(bob), q, content)
		must(t, err)
		q.Update, q.SnapshotOnly, q.Snapshot = false, true, name("more")
		_, err = e.Transfer().Receive(as(0), q, content)
		must(t, err)
		q = engine.ReceiveRequest{Volume: name("web"), Golden: true, Generation: 3, FS: from.FS, SizeBytes: from.SizeBytes}
		_, err = e.Transfer().Receive(as(alice), q, content)
		must(t, err)
		q.Generation, q.Update = 4, true
		_, err = e.Transfer().Receive(as(bob), q, content)
		must(t, err)

		want := map[string]uint32{"g": 0, "v": alice, "x": alice, "fork": bob, "made": bob, "pulled": alice, "web": alice}
		for _, rebuilt := range []bool{false, true} {
			if rebuilt {
				e.Close()
				_, err := engine.Rebuild(t.Context(), e.Dir(), drivers)
				must(t, err)
				e = open(t, e.Dir())
				defer e.Close()
			}
			for thing, uid := range want {
				d, err := e.Show(t.Context(), reference(t, thing))
				must(t, err)
				points := append([]api.Object{d.Object}, d.Snapshots...)
				if d.Kind == api.KindGeneration {
					g, err := e.Golden(t.Context(), d)
					must(t, err)
					points = append(points, g.Generations...)
				}
				for _, p := range points {
					if p.OwnerUID != uid {
						t.Errorf("rebuilt %v: %s, of %s, is %d's, not %d's", rebuilt, p.Ref, thing, p.OwnerUID, uid)
					}
				}
				if more := map[string]int{"v": 8, "pulled": 5, "web": 3}[thing]; more > 0 && len(points) < more {
					t.Errorf("%s has only %d snapshots: too few to show anything", thing, len(points)-1)
				}
			}
			if r := fsck(t, e.Dir(), false); len(r.Findings) > 0 {
				t.Error(findings(r))
			}
		}

		d, err := e.Show(t.Context(), reference(t, "v"))
		must(t, err)
		b, err := json.Marshal(d)
		if err != nil || !strings.Contains(string(b), `"owner_uid":1000`) {
			t.Errorf("%s, %v", b, err)
		}
	})
}
