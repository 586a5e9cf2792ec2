package web

import (
	"encoding/json"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"pando/client"
)

// views are the views of a pool with the volumes of withVolumes, by the names of their pictures.
var views = map[string]string{
	"overview": "/", "volumes": "/volumes?select=review-1", "volume": "/volumes/orders", "golden": "/goldens/web",
	"lineage": "/lineage?open=postgres,postgres%401,orders,web,web%401", "operations": "/operations",
	"activity": "/activity",
}

// axe is what checks that a page is accessible.
func axe(t *testing.T) string {
	t.Helper()
	out, err := exec.Command("../../scripts/axe.sh").Output()
	if err != nil {
		t.Skipf("SKIPPED: there is no axe-core: run make deps: %v", err)
	}
	script, err := os.ReadFile(strings.TrimSpace(string(out)))
	must(t, err)
	return string(script)
}

// TestAccessible checks every view with axe-core, in light and in dark, also on a small window, and that all can be
// reached by the keyboard.
func TestAccessible(t *testing.T) {
	script := axe(t)
	s := newPool(t)
	s.withVolumes()
	s.serve()
	b := newBrowser(t)
	origin := s.signIn(b)
	op, err := s.c.GC(t.Context())
	must(t, err)
	_, err = s.c.Wait(t.Context(), op.ID, nil)
	must(t, err)

	for name, path := range views {
		t.Run(name, func(t *testing.T) {
			b.t = t
			b.open(origin + path)
			b.eval(`document.querySelector('.action summary')?.click()`)
			for _, dark := range []bool{true, false} {
				b.do("dark", dark)
				checkAxe(b, script)
			}
		})
	}

	t.Run("confirm", func(t *testing.T) {
		b.t = t
		b.open(origin + "/volumes?select=review-1,review-2")
		b.click("button[value=destroy]")
		b.says("2 objects will be gone")
		checkAxe(b, script)
	})
	t.Run("signed out", func(t *testing.T) {
		b.t = t
		b.open("http://localhost:" + s.port + "/")
		checkAxe(b, script)
	})
	t.Run("keyboard", func(t *testing.T) { b.t = t; testKeyboard(b, origin) })
}

// checkAxe fails for each rule that the page violates. Tools may evaluate what the policy of the page forbids it.
func checkAxe(b *browser, script string) {
	b.t.Helper()
	if b.eval("typeof axe") == "undefined" {
		b.eval(script + "; 0")
	}
	text := b.eval(`axe.run(document, {resultTypes: ['violations']}).then((r) => JSON.stringify(r.violations.map((v) =>
		({id: v.id, help: v.help, nodes: v.nodes.map((n) => n.html.slice(0, 200) + ' ' + n.failureSummary)}))))`).(string)
	var violations []struct {
		ID, Help string
		Nodes    []string
	}
	must(b.t, json.Unmarshal([]byte(text), &violations))
	for _, v := range violations {
		b.t.Errorf("%s: %s\n%s", v.ID, v.Help, strings.Join(v.Nodes[:min(3, len(v.Nodes))], "\n"))
	}
}

// testKeyboard reaches everything on a page with Tab, in the order in which it is read.
func testKeyboard(b *browser, origin string) {
	b.open(origin + "/volumes/orders")
	want := b.eval(`[...document.querySelectorAll('a[href], button, summary, input:not([type=hidden])')]
		.filter((e) => e.checkVisibility()).length`).(float64)
	b.eval("window.seen = new Set()")
	for range int(want) + 5 {
		b.keys("{Tab}")
		b.eval("seen.add(document.activeElement), 0")
	}
	seen := b.eval("[...seen].filter((e) => e !== document.body).length").(float64)
	if seen < want {
		b.t.Errorf("Tab reaches %v of %v", seen, want)
	}
	b.open(origin + "/volumes/orders")
	b.keys("{Tab}")
	if text := b.eval("document.activeElement.textContent"); text != "Skip to content" {
		b.t.Errorf("the first is %v", text)
	}
}

// TestPictures takes a picture of each view, light and dark. PANDO_UPDATE=1 puts them into the documentation.
func TestPictures(t *testing.T) {
	place, update := t.TempDir(), os.Getenv("PANDO_UPDATE") != ""
	if update {
		place = "/mnt" // what readers see in paths; here, in a namespace of its own
		must(t, exec.Command("mount", "-t", "tmpfs", "pictures", place).Run())
		t.Cleanup(func() { must(t, exec.Command("umount", place).Run()) })
	}
	s := newPoolIn(t, place)
	s.withVolumes()
	s.serve()
	b := newBrowser(t)
	origin := s.signIn(b)
	s.forPictures()

	dir, long := t.TempDir(), "30" // of the line in the chart
	if update {
		dir, long = "../../docs/img", "180"
	}
	b.do("size", []int{1120, 700})
	for _, name := range slices.Sorted(maps.Keys(views)) { // the overview late: it has a history by then
		b.open(origin + views[name])
		b.until(`document.querySelector('pando-live').dataset.state === 'on'`)
		if name == "volume" {
			b.until(`document.querySelector('path.p99')?.getAttribute('d')?.length > ` + long)
		}
		for _, scheme := range []string{"light", "dark"} {
			b.do("dark", scheme == "dark")
			file := filepath.Join(dir, "web-"+name+"-"+scheme+".png")
			b.do("screenshot", file)
			if update {
				shrink(t, file)
			}
			info, err := os.Stat(file)
			if err != nil || info.Size() < 8<<10 {
				t.Errorf("%s: %v, %v: is it empty?", file, info, err)
			}
		}
	}
	b.checkQuiet(origin)
}

// forPictures adds what makes pictures tell something.
func (s *site) forPictures() {
	s.t.Helper()
	for _, name := range []string{"build", "orders"} {
		v, err := s.c.Volume(s.t.Context(), name)
		must(s.t, err, os.WriteFile(filepath.Join(v.Mountpoint, "own"), make([]byte, 0), 0o644))
		text := make([]byte, 5<<20)
		for i := range text {
			text[i] = byte(i * 13)
		}
		must(s.t, os.WriteFile(filepath.Join(v.Mountpoint, "own"), text, 0o644))
		_, err = s.c.Volume(s.t.Context(), name)
		must(s.t, err)
	}
	op, err := s.c.Publish(s.t.Context(), "web", client.PublishRequest{Volume: "build"})
	must(s.t, err)
	_, err = s.c.Wait(s.t.Context(), op.ID, nil)
	must(s.t, err)

	v, err := s.c.Volume(s.t.Context(), "orders")
	must(s.t, err)
	ended := make(chan error)
	ctx := s.t.Context()
	go func() { ended <- syncUntil(ctx, filepath.Join(v.Mountpoint, "log")) }()
	s.t.Cleanup(func() { must(s.t, <-ended) }) // the context of a test ends before its cleanups
}
