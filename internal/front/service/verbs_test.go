package service

import (
	"archive/tar"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"pando/client"
	"pando/internal/driver/plain"
	"pando/internal/driver/reflink"
)

// onPools runs a test on a pool of images and on one of trees.
func onPools(t *testing.T, test func(t *testing.T, s *served)) {
	for _, name := range []string{reflink.Name, plain.Name} {
		t.Run(name, func(t *testing.T) { test(t, withGolden(t, name)) })
	}
}

// TestLife uses every synchronous verb as a program would.
func TestLife(t *testing.T) {
	onPools(t, func(t *testing.T, s *served) {
		ctx, c := t.Context(), s.c
		object := must2[*client.Object](t)

		// Clone, and write into the clone.
		v := object(c.Clone(ctx, client.CloneRequest{From: "web", Name: "job",
			Make: client.Make{Mount: true, Labels: map[string]string{"team": "search"}}}))
		if v.Name != "job" || v.Mountpoint == "" || v.Origin != "web@1" || v.Labels["team"] != "search" || v.ETag == "" {
			t.Errorf("clone: %+v", v)
		}
		must(t, os.WriteFile(filepath.Join(v.Mountpoint, "own"), []byte("mine"), 0o644))
		_, err := c.Clone(ctx, client.CloneRequest{From: "web", Name: "job"})
		want(t, "a second clone of the same name", err, client.Exists, http.StatusConflict)
		_, err = c.Clone(ctx, client.CloneRequest{From: "nix", Name: "job2"})
		want(t, "a clone of nothing", err, client.NotFound, http.StatusNotFound)

		// Snapshot, change, compare, rewind.
		snap := object(c.Snapshot(ctx, "job", client.SnapshotRequest{Name: "v1"}))
		if snap.Name != "job@v1" || snap.Kind != "snapshot" {
			t.Errorf("snapshot: %+v", snap)
		}
		must(t, os.WriteFile(filepath.Join(v.Mountpoint, "later"), []byte("x"), 0o644))
		diff := must2[*client.Difference](t)(c.Diff(ctx, "job@v1", "job"))
		if len(diff.Changes) != 1 || diff.Changes[0].Path != "later" && diff.Changes[0].Path != "/later" {
			t.Errorf("diff: %+v", diff.Changes)
		}
		_, err = c.Rewind(ctx, "job", "v1", false)
		want(t, "a rewind of a mounted volume", err, client.InUse, http.StatusConflict)
		if e, ok := err.(*client.Error); ok && !strings.Contains(e.Hint, "POST /v1/volumes/job/unmount") {
			t.Errorf("hint: %q", e.Hint)
		}
		back := must2[*client.Rewound](t)(c.Rewind(ctx, "job", "v1", true))
		if back.Before == "" || back.Mountpoint != v.Mountpoint {
			t.Errorf("rewind: %+v", back)
		}
		if _, err := os.Stat(filepath.Join(v.Mountpoint, "later")); err == nil {
			t.Error("the rewind has kept a later file")
		}
		snaps := must2[[]client.Object](t)(c.Snapshots(ctx, "job"))
		if len(snaps) != 2 {
			t.Errorf("%d snapshots", len(snaps))
		}
		must2[*client.Details](t)(c.ShowSnapshot(ctx, "job", "v1"))

		// Fork, group, pin, rename.
		object(c.Fork(ctx, "job", client.ForkRequest{Name: "copy"}))
		group := must2[*client.SnapshotGroup](t)(c.SnapshotGroup(ctx, []string{"copy"}, client.SnapshotRequest{Name: "g"}))
		if len(group.Snapshots) != 1 || group.Name != "g" {
			t.Errorf("group: %+v", group)
		}
		object(c.Pin(ctx, "copy", 3600))
		want(t, "destroying what is pinned", c.Destroy(ctx, "copy", ""), client.InUse, http.StatusConflict)
		object(c.Unpin(ctx, "copy"))
		if r := object(c.Rename(ctx, "copy", "task", "")); r.Name != "task" {
			t.Errorf("rename: %+v", r)
		}
		object(c.SetLabels(ctx, "task", map[string]string{"a": "b"}, nil, ""))
		if l, err := c.Labels(ctx, "task"); err != nil || l["a"] != "b" {
			t.Errorf("labels: %v, %v", l, err)
		}

		// Unmount, mount, show.
		object(c.Unmount(ctx, "job"))
		object(c.Mount(ctx, "job", client.MountRequest{}))
		d := must2[*client.Details](t)(c.Volume(ctx, "job"))
		if d.State != "mounted" || len(d.Snapshots) != 2 || d.Base != "web@1" {
			t.Errorf("show: %+v", d)
		}
		_, err = c.Volume(ctx, "web")
		want(t, "a golden as a volume", err, client.NotFound, http.StatusNotFound)

		// Goldens.
		goldens := must2[[]client.Golden](t)(c.Goldens(ctx))
		if len(goldens) != 1 || goldens[0].Name != "web" || goldens[0].Generations != 1 {
			t.Errorf("goldens: %+v", goldens)
		}
		two := 2
		set := must2[*client.GoldenSet](t)(c.SetGolden(ctx, "web", client.GoldenProperties{Keep: &two}, ""))
		if set.Keep != 2 {
			t.Errorf("set: %+v", set)
		}
		if g := must2[*client.Details](t)(c.Golden(ctx, "web")); g.Keep != 2 || len(g.Generations) != 1 {
			t.Errorf("golden: %+v", g)
		}

		// Export what is in the volume.
		tarball, err := c.Export(ctx, "job", "tar")
		must(t, err)
		names := namesIn(t, tarball)
		if !slices.Contains(names, "own") || slices.Contains(names, "later") {
			t.Errorf("exported %q", names)
		}
		_, err = c.Export(ctx, "nix", "tar")
		want(t, "an export of nothing", err, client.NotFound, http.StatusNotFound)

		// Destroy.
		must(t, c.DestroySnapshot(ctx, "job", "v1", ""))
		must(t, c.Destroy(ctx, "job", ""))
		report := must2[*client.DestroyReport](t)(c.DestroyMany(ctx, []string{"t*"}, []string{"a=b"}))
		if len(report.Destroyed) != 2 || len(report.Failed) != 0 {
			t.Errorf("destroyed: %+v", report)
		}
		must(t, c.RemoveGolden(ctx, "web", ""))
		for v, err := range c.Volumes(ctx, client.VolumeFilter{}) {
			t.Errorf("left: %v, %v", v, err)
		}

		// The history says who.
		events := must2[[]client.Event](t)(c.History(ctx, client.HistoryFilter{Ref: "job", Limit: 1000}))
		if len(events) < 5 || events[0].Verb != "clone" || events[0].Command != "pando serve: clone-volume" ||
			events[0].ForUID == nil || int(*events[0].ForUID) != os.Getuid() {
			t.Errorf("history: %+v", events)
		}
		p := must2[*client.Pool](t)(c.Pool(ctx))
		if p.TotalBytes == 0 || p.Volumes != 0 {
			t.Errorf("pool: %+v", p)
		}
	})
}

func namesIn(t *testing.T, r io.ReadCloser) []string {
	t.Helper()
	defer r.Close()
	var out []string
	for a := tar.NewReader(r); ; {
		h, err := a.Next()
		if err == io.EOF {
			return out
		}
		must(t, err)
		out = append(out, strings.TrimPrefix(h.Name, "./"))
	}
}

// TestPages lists volumes page by page, while others appear.
func TestPages(t *testing.T) {
	s := withGolden(t, plain.Name)
	ctx := t.Context()
	for i := range 7 {
		_, err := s.c.Clone(ctx, client.CloneRequest{From: "web", Name: fmt.Sprint("v", i),
			Make: client.Make{Labels: map[string]string{"odd": fmt.Sprint(i % 2)}}})
		must(t, err)
	}
	list := func(f client.VolumeFilter) (out []string) {
		for v, err := range s.c.Volumes(ctx, f) {
			must(t, err)
			out = append(out, v.Name)
		}
		return out
	}
	for page := 1; page < 9; page++ {
		if got := list(client.VolumeFilter{Page: page}); len(got) != 7 || !slices.IsSorted(got) {
			t.Errorf("pages of %d: %q", page, got)
		}
		if got := list(client.VolumeFilter{Page: page, Labels: []string{"odd=1"}}); len(got) != 3 {
			t.Errorf("odd ones in pages of %d: %q", page, got)
		}
	}
	if got := list(client.VolumeFilter{Golden: "other"}); len(got) != 0 {
		t.Errorf("of another golden: %q", got)
	}
	status, body := s.raw("GET", "/v1/volumes?limit=2&after=v3", "")
	if status != 200 || !strings.Contains(body, `"next":"v5"`) {
		t.Errorf("%d %s", status, body)
	}
	for _, bad := range []string{"?limit=0", "?limit=1001", "?limit=x", "?label=", "?nix=1"} {
		if status, body := s.raw("GET", "/v1/volumes"+bad, ""); status != 400 && bad != "?label=" {
			t.Errorf("%s: %d %s", bad, status, body)
		}
	}
}

// TestConditions: a change with an ETag that is no longer right changes nothing.
func TestConditions(t *testing.T) {
	s := withGolden(t, plain.Name)
	ctx, c := t.Context(), s.c
	v, err := c.Clone(ctx, client.CloneRequest{From: "web", Name: "job"})
	must(t, err)
	old := v.ETag
	set := map[string]string{"a": "b"}
	v, err = c.SetLabels(ctx, "job", set, nil, old)
	must(t, err)
	if v.ETag == old || v.ETag == "" {
		t.Errorf("the tag is still %s", v.ETag)
	}

	changed := func(what string, err error) {
		t.Helper()
		want(t, what, err, client.Conflict, http.StatusPreconditionFailed)
		if !client.IsChanged(err) {
			t.Errorf("%s: not IsChanged: %v", what, err)
		}
	}
	_, err = c.SetLabels(ctx, "job", map[string]string{"a": "c"}, nil, old)
	changed("labels", err)
	_, err = c.Rename(ctx, "job", "task", old)
	changed("rename", err)
	changed("destroy", c.Destroy(ctx, "job", old))
	if l, err := c.Labels(ctx, "job"); err != nil || l["a"] != "b" {
		t.Errorf("after refused changes: %v, %v", l, err)
	}

	// A golden, too.
	g, err := c.Golden(ctx, "web")
	must(t, err)
	three := 3
	_, err = c.SetGolden(ctx, "web", client.GoldenProperties{Keep: &three}, g.ETag)
	must(t, err)
	_, err = c.SetGolden(ctx, "web", client.GoldenProperties{Keep: &three}, g.ETag)
	changed("golden", err)
	_, err = c.Rename(ctx, "web", "site", g.ETag)
	changed("rename of a golden", err)
	changed("golden rm", c.RemoveGolden(ctx, "web", g.ETag))

	// What GET says is what counts, whatever was measured or mounted since.
	d, err := c.Volume(ctx, "job")
	must(t, err)
	_, err = c.Mount(ctx, "job", client.MountRequest{})
	must(t, err)
	must(t, c.Destroy(ctx, "job", d.ETag))
	g, err = c.Golden(ctx, "web")
	must(t, err)
	must(t, c.RemoveGolden(ctx, "web", g.ETag))
}
