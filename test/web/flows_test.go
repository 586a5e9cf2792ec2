package web

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"pando/client"
)

// TestFlows does what people do all day: it finds volumes, acts on several at once, reads why something is not
// possible, follows what others do, and destroys.
func TestFlows(t *testing.T) {
	s := newPool(t)
	s.withVolumes()
	s.serve()
	b := newBrowser(t)
	origin := s.signIn(b)

	t.Run("overview", func(t *testing.T) {
		b.t = t
		for _, text := range []string{"Where the bytes are", "Space over time", "Deleted, and still there", "as root",
			"orders"} {
			b.says(text)
		}
		b.until(`document.querySelectorAll('svg.areas a').length >= 2`)
		b.until(`document.querySelector('pando-live').dataset.state === 'on'`)
	})

	t.Run("filter", func(t *testing.T) {
		b.t = t
		b.open(origin + "/volumes")
		b.keys("/")
		b.keys("review{Enter}")
		b.until(`new URL(location).searchParams.get('name') === 'review'`)
		b.says("review-1")
		if text := b.text(); strings.Contains(text, "orders") {
			t.Errorf("the filter shows: %s", text)
		}
		b.open(origin + "/volumes?label=team%3Ddata")
		b.says("orders")
		b.open(origin + "/volumes?state=mounted")
		b.says("by root")
		if n := b.eval("document.querySelectorAll('#rows tr').length"); n != 2.0 {
			t.Errorf("%v volumes are mounted", n)
		}
	})

	t.Run("select by keyboard", func(t *testing.T) {
		b.t = t
		b.open(origin + "/volumes?name=review")
		b.keys("j")
		b.keys("x")
		b.keys("j")
		b.keys("x")
		b.until(`new URL(location).searchParams.get('select') === 'review-1,review-2'`)
		b.says("2 volumes selected. Unmount: none of them is mounted. Unpin: none of them is pinned.")

		// The selection is in the address: it survives a reload.
		b.eval("location.reload()")
		b.until(`document.querySelectorAll('#rows input:checked').length === 2`)
		b.click("button[value=snapshot]")
		b.says("snapshot review-2@")
		for _, name := range []string{"review-1", "review-2"} {
			snapshots, err := s.c.Snapshots(t.Context(), name)
			if err != nil || len(snapshots) != 1 {
				t.Errorf("%s: %v, %v", name, snapshots, err)
			}
		}
	})

	t.Run("live", func(t *testing.T) { b.t = t; s.testLive(b, origin) })
	t.Run("volume", func(t *testing.T) { b.t = t; s.testVolume(b, origin) })
	t.Run("operations", func(t *testing.T) {
		b.t = t
		b.open(origin + "/operations")
		b.eval(`document.querySelector('.action summary').click()`)
		b.click(".action[open] button")
		b.says("gc has begun")
		b.until(`document.querySelector('#ended .chip.done')`)
	})
	t.Run("lineage", func(t *testing.T) {
		b.t = t
		b.open(origin + "/lineage")
		b.eval(`document.querySelector('a[aria-label="Open postgres"]').click()`)
		b.until(`document.querySelector('a[aria-label="Open postgres@1"]')`)
		b.eval(`document.querySelector('a[aria-label="Open postgres@1"]').click()`)
		b.until(`document.querySelector('a[aria-label="Open orders"]')`)
		b.eval(`document.querySelector('a[aria-label="Open orders"]').click()`)
		b.says("orders@nightly")
		b.until(`new URL(location).searchParams.get('open') === 'orders,postgres,postgres@1'`)
	})
	t.Run("destroy", func(t *testing.T) { b.t = t; s.testDestroy(b, origin) })

	b.t = t
	b.checkQuiet(origin)
}

// testLive: what others do is visible at once, and does not disturb.
func (s *site) testLive(b *browser, origin string) {
	t := b.t
	b.open(origin + "/volumes")
	b.until(`document.querySelector('pando-live').dataset.state === 'on'`)
	b.keys("j")
	b.eval(`document.querySelector('input[value=orders]').click()`)
	focused := b.eval("document.activeElement.textContent")

	// Another program makes a volume, and mounts it.
	_, err := s.c.Clone(context.Background(), client.CloneRequest{From: "web", Name: "aaa-new"})
	must(t, err)
	took := b.until(`[...document.querySelectorAll('#rows a')].some((a) => a.textContent === 'aaa-new')`)
	t.Logf("a new volume was visible after %v", took)
	_, err = s.c.Mount(context.Background(), "aaa-new", client.MountRequest{})
	must(t, err)
	took = b.until(`document.querySelector('input[value=aaa-new]').closest('tr').dataset.state === 'mounted'`)
	t.Logf("its mount was visible after %v", took)
	if now := b.eval("document.activeElement.textContent"); now != focused {
		t.Errorf("the focus was at %v, and is at %v", focused, now)
	}
	if b.eval(`document.querySelector('input[value=orders]').checked`) != true {
		t.Error("the selection is lost")
	}

	must(t, s.c.Destroy(context.Background(), "aaa-new", ""))
	b.until(`!document.querySelector('input[value=aaa-new]')`)
}

// testVolume: reasons, actions, and the chart of syncs.
func (s *site) testVolume(b *browser, origin string) {
	t := b.t
	b.open(origin + "/volumes/orders")
	open := func(title string) {
		b.eval(`[...document.querySelectorAll('#actions summary')].find((s) => s.firstChild.data === '` + title + `')
			.click()`)
	}
	open("Rewind")
	b.until(`document.querySelector('.action[open] .why')?.textContent.includes('unmount it first')`)

	// The chart shows syncs of programs.
	v, err := s.c.Volume(t.Context(), "orders")
	must(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	synced := make(chan error)
	go func() { synced <- syncUntil(ctx, filepath.Join(v.Mountpoint, "log")) }()
	b.until(`/[1-9][0-9.]* syncs\/s · p50 .* · p99 .* · max/
		.test(document.querySelector('pando-syncs .figures').textContent)`)
	b.until(`document.querySelector('path.p99').getAttribute('d').length > 20`)
	cancel()
	must(t, <-synced)

	open("Unmount")
	b.click(".action[open] button")
	b.says("unmounted")
	b.says("It is not mounted.")
	open("Rewind")
	b.click(".action[open] button")
	b.says("rewound; its state before is orders@before-rewind")

	open("Label")
	b.click(".action[open] input[name=set]")
	b.keys("note=<img/src=x/onerror=alert(1)>{Enter}")
	b.says("note=<img/src=x/onerror=alert(1)>")
	b.eval(`window.alert = () => { document.title = 'script ran' }`)
	b.open(origin + "/volumes")
	b.says("note=<img/src=x/onerror=alert(1)>")
	if b.eval("document.images.length") != 0.0 || b.eval("document.title") == "script ran" {
		t.Error("a label has become markup")
	}
}

// syncUntil writes and syncs until ctx ends.
func syncUntil(ctx context.Context, name string) error {
	f, err := os.Create(name)
	if err != nil {
		return err
	}
	defer f.Close()
	for ctx.Err() == nil {
		if _, err := f.WriteAt(make([]byte, 4096), 0); err != nil {
			return err
		}
		if err := f.Sync(); err != nil {
			return err
		}
		time.Sleep(10 * time.Millisecond) // a rate that leaves something for others
	}
	return nil
}

// testDestroy: what is pinned is not destroyed, and what is destroyed was confirmed.
func (s *site) testDestroy(b *browser, origin string) {
	t := b.t
	b.open(origin + "/volumes?select=billing,review-1,review-2")
	b.click("button[value=destroy]")
	b.says("3 objects will be gone")
	b.click(".confirm a.button")
	b.until(`location.pathname === '/volumes'`)
	if _, err := s.c.Volume(t.Context(), "review-1"); err != nil {
		t.Errorf("it was not confirmed: %v", err)
	}

	b.open(origin + "/volumes?select=billing,review-1,review-2")
	b.click("button[value=destroy]")
	b.says("3 objects will be gone")
	b.click(".confirm button")
	b.says("pando unpin billing")
	b.says("review-1 destroyed")
	_, gone := s.c.Volume(t.Context(), "review-1")
	_, kept := s.c.Volume(t.Context(), "billing")
	if !client.IsKind(gone, client.NotFound) || kept != nil {
		t.Errorf("review-1: %v; billing: %v", gone, kept)
	}
}

// TestWithoutScript reads every view and uses a form in a browser that runs no scripts.
func TestWithoutScript(t *testing.T) {
	s := newPool(t)
	s.withVolumes()
	s.serve()
	b := newBrowser(t)
	b.do("script", false)
	b.open(s.login())
	b.until(`document.querySelector('#facts')`)
	origin := b.eval("location.origin").(string)
	for path, text := range map[string]string{"/": "Where the bytes are", "/volumes": "review-1",
		"/volumes/orders": "nightly", "/goldens/web": "web@1", "/lineage?open=web,web%401": "review-2",
		"/operations": "Clean up", "/activity": "import"} {
		b.open(origin + path)
		b.says(text)
	}

	b.open(origin + "/volumes/review-1")
	b.click("#actions summary")
	b.click("#actions details[open] button")
	b.says("mounted at")
	v, err := s.c.Volume(t.Context(), "review-1")
	if err != nil || v.Mountpoint == "" {
		t.Errorf("%+v, %v", v, err)
	}
	b.checkQuiet(origin)
}

// TestUI: without a service, `pando ui` serves the page itself.
func TestUI(t *testing.T) {
	s := newPool(t)
	s.withVolumes()
	cmd := exec.Command(pando, "--pool", s.pool, "ui")
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	line := make([]byte, 300)
	n, err := out.Read(line)
	must(t, err)
	b := newBrowser(t)
	b.open(strings.TrimSpace(string(line[:n])))
	b.until(`document.querySelector('#facts')`)
	b.says("orders")

	must(t, cmd.Process.Signal(os.Interrupt), cmd.Wait())
	b.until(`document.querySelector('pando-live').dataset.state === 'off'`)
}
