package replicate

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver/btrfs"
	"pando/internal/driver/reflink"
	"pando/internal/testing/testfs"
)

// TestPullUnderTwoNames: a point that was pulled under several names is the same point under each, even when the links
// to it are lost, so that a take-over works.
func TestPullUnderTwoNames(t *testing.T) {
	w := newWorld(t)
	w.importImage("g", 64*mib, func(f *os.File) { noise(t, f, 1, 0, mib) })
	w.clone("g", "v")
	w.edit("v", func(f *os.File) { noise(t, f, 2, 2*mib, 65536) })
	w.push("v")
	point := w.pushSnapshots("v")[0]
	o := w.other(testfs.XFS(t, 1<<30), reflink.Name)
	as := func(name string) PullRequest { return PullRequest{As: ref.MustName(name), Update: true} }
	upToDate := func(when, volume string, q PullRequest) Pulled {
		p := o.pull("v", q)
		if !p.Unchanged || p.Snapshot != volume+"@"+point {
			t.Errorf("%s, %s is not up to date: %+v", when, volume, p)
		}
		return p
	}

	o.pull("v", PullRequest{})
	for _, name := range []string{"w", "x"} {
		o.pull("v@"+point, as(name))
	}
	for _, name := range []string{"v", "w", "x"} {
		upToDate("pulled under three names", name, as(name))
	}

	// The point is pushed again, under another manifest.
	if _, err := Push(t.Context(), w.e, w.r, PushRequest{Refs: []ref.Ref{refs(t, "v@"+point)}, Full: true}); err != nil {
		t.Fatal(err)
	}
	upToDate("pushed again", "v", as("v"))

	// No link is left. Then the standby host takes the volume over, and what it pushes builds upon the point.
	if err := o.e.Transfer().DropLinks(t.Context(), w.open().ID().String()); err != nil {
		t.Fatal(err)
	}
	upToDate("without links", "w", as("w"))
	if p := upToDate("at failover", "v", PullRequest{Update: true, TakeOver: true}); !p.TookOver {
		t.Errorf("not taken over: %+v", p)
	}
	o.edit("v", func(f *os.File) { noise(t, f, 3, 3*mib, 4096) })
	o.push("v")
	o.checkPoint(o.open(), "v", o.image("v"))

	// A golden still receives generations after it was pulled under another name.
	o.pull("g", PullRequest{As: ref.MustName("h")})
	w.publish("g", "v")
	w.push("g")
	if o.pull("g", PullRequest{}); o.sum("g@2") != w.sum("g@2") {
		t.Error("the second generation differs")
	}
}

// TestPullOverAnotherSnapshot: a different snapshot that has the name of the point stays, and the hint keeps both.
func TestPullOverAnotherSnapshot(t *testing.T) {
	w := newWorld(t)
	w.importImage("g", 8*mib, func(f *os.File) { noise(t, f, 1, 0, mib) })
	w.clone("g", "v")
	w.snapshot("v", "s")
	w.push("v@s")
	o := w.other(testfs.XFS(t, 1<<30), reflink.Name)
	o.importImage("h", 8*mib, func(f *os.File) { noise(t, f, 2, 0, mib) })
	o.clone("h", "v")
	o.snapshot("v", "s")

	before := o.state()
	_, err := o.tryPull("v", PullRequest{Update: true, TakeOver: true})
	if hint := errs.HintOf(err); !errs.Is(err, errs.Exists) || !strings.Contains(hint, "keeps both") {
		t.Errorf("%v (hint: %s)", err, hint)
	}
	if after := o.state(); after != before || w.head(w.open(), "v").Epoch != 1 {
		t.Errorf("a refused pull changed something:\n%s\n%s", before, after)
	}
	if p := o.pull("v", PullRequest{As: ref.MustName("v2"), TakeOver: true}); !p.TookOver || o.sum("v2") != w.sum("v") {
		t.Errorf("not taken over under another name: %+v", p)
	}
	if out := o.pushAs("v2", "v"); out.Base != "v@s" {
		t.Errorf("the next push of it: %+v", out)
	}
}

// TestUpdateAfterTwoPulls: a tree that was pulled under two names is updated from its own snapshot, and pushed as the
// difference from that, whichever name was pulled last.
func TestUpdateAfterTwoPulls(t *testing.T) {
	w := worldOn(t, testfs.Btrfs(t, 512<<20), btrfs.Name, "file:"+filepath.Join(t.TempDir(), "remote"))
	w.importTree("g", mib)
	w.clone("g", "v")
	w.push("v")
	first := "v@" + w.pushSnapshots("v")[0]
	o := w.other(testfs.Btrfs(t, 512<<20), btrfs.Name)
	o.pull("v", PullRequest{})
	o.pull("v", PullRequest{As: ref.MustName("w")})
	own, err := o.e.Transfer().Point(t.Context(), refs(t, first))
	if err != nil {
		t.Fatal(err)
	}

	p := &pusher{e: o.e.Transfer(), repoID: w.open().ID().String()}
	l, err := p.loadLinks(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	manifest := w.newest(w.open(), w.head(w.open(), "v")).Manifest
	x := &pointPush{p: p, pt: own}
	if o, ok := x.baseObject(t.Context(), l.object[manifest]); len(l.object[manifest]) != 2 || !ok || o.ID != own.ID {
		t.Errorf("of %v, the base of the next push would be %+v", l.object[manifest], o)
	}

	w.write("v", "new", 1, 4096)
	w.push("v")
	if got := o.pull("v", PullRequest{Update: true}); got.Base != first || !slices.Equal(o.files("v"), w.files("v")) {
		t.Errorf("updated from %s, not %s; files %v", got.Base, first, o.files("v"))
	}
}
