package restore

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/driver/plain"
	"pando/internal/engine"
	"pando/internal/remote/replicate"
	"pando/internal/testing/pooltest"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// TestPull: what is pulled is labeled and mounted; what fails after the pull leaves what was pulled, and says so.
func TestPull(t *testing.T) {
	ctx := t.Context()
	e := pooltest.New(t, engine.Drivers{plain.Name: plain.Open}, plain.Name, t.TempDir())

	// Push a clone, and with it its golden.
	src := t.TempDir()
	must(t, os.WriteFile(filepath.Join(src, "file"), []byte("content"), 0o600))
	_, err := e.Import(ctx, engine.ImportRequest{Name: ref.MustName("g"), Source: src})
	must(t, err)
	_, err = e.Clone(ctx, engine.CloneRequest{From: ref.Ref{Name: "g"}, Name: ref.MustName("v")})
	must(t, err)
	_, err = replicate.Add(ctx, e, replicate.AddRequest{Name: "far", URL: "file:" + filepath.Join(t.TempDir(), "r")},
		replicate.Access{})
	must(t, err)
	far, err := replicate.Find("push", e.Dir(), "", replicate.Access{})
	must(t, err)
	_, err = replicate.Push(ctx, e, far, replicate.PushRequest{Refs: []ref.Ref{{Name: "v"}}})
	must(t, err)

	labels, err := driver.NewLabels("", map[string]string{"team": "search"})
	must(t, err)
	q := Request{Pull: replicate.PullRequest{Ref: ref.Ref{Name: "v"}, As: ref.MustName("w")}, Labels: labels, Mount: true,
		MountDir: filepath.Join(t.TempDir(), "here")}
	out, err := Pull(ctx, e, far, q)
	must(t, err)
	content, err := os.ReadFile(filepath.Join(out.Mountpoint, "file"))
	must(t, err)
	w, err := e.Show(ctx, ref.Ref{Name: "w"})
	must(t, err)
	if out.Name != "w" || out.Mountpoint != q.MountDir || string(content) != "content" || out.Labels != labels ||
		w.Labels != labels || w.Mountpoint != q.MountDir {
		t.Errorf("pulled %+v with %q; shown as %+v", out, content, w)
	}

	// Labels that are too many do not keep the volume from being mounted.
	many := map[string]string{}
	for i := range 63 {
		many[fmt.Sprint("k", i)] = ""
	}
	_, err = e.SetLabels(ctx, engine.LabelRequest{Ref: ref.Ref{Name: "w"}, Set: many})
	must(t, err)
	_, err = e.Umount(ctx, engine.UmountRequest{Volume: ref.MustName("w")})
	must(t, err)
	again := q
	again.Pull.Update = true
	again.Labels, err = driver.NewLabels("", map[string]string{"one": "more"})
	must(t, err)
	if out, err = Pull(ctx, e, far, again); !errs.Is(err, errs.Invalid) || !out.Unchanged || out.Mountpoint != q.MountDir {
		t.Errorf("with too many labels: %+v, %v", out, err)
	}

	// The volume is there though it cannot be mounted: the directory has a file.
	q.Pull.As, q.MountDir = ref.MustName("x"), src
	out, err = Pull(ctx, e, far, q)
	if !errs.Is(err, errs.Invalid) || out.Name != "x" || out.Mounted() || out.Labels != labels {
		t.Errorf("into a directory with files: %+v, %v", out, err)
	}

	// A golden has labels, and cannot be mounted.
	q.Pull = replicate.PullRequest{Ref: ref.Ref{Name: "g"}, As: ref.MustName("h")}
	out, err = Pull(ctx, e, far, q)
	if !errs.Is(err, errs.Invalid) || out.Golden != "h" || out.Labels != labels {
		t.Errorf("a golden: %+v, %v", out, err)
	}

	// Without a pull there is nothing.
	q.Pull = replicate.PullRequest{Ref: ref.Ref{Name: "none"}}
	if out, err = Pull(ctx, e, far, q); !errs.Is(err, errs.NotFound) || out.Ref != "" {
		t.Errorf("what does not exist: %+v, %v", out, err)
	}
}
