package service

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"pando/client"
	"pando/internal/driver"
	"pando/internal/engine"
)

// TestVolumesOfUsers: a user owns the files of a volume, even of an overlay, and set-user-ID programs and devices of
// the golden do nothing there.
func TestVolumesOfUsers(t *testing.T) {
	u := withUsers(t, matrixPolicy)
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	program, err := os.ReadFile("/usr/bin/id")
	must(t, err)
	for _, h := range []*tar.Header{{Name: "file", Mode: 0o600, Typeflag: tar.TypeReg},
		{Name: "id", Mode: 0o4755, Size: int64(len(program)), Typeflag: tar.TypeReg},
		{Name: "null", Mode: 0o666, Typeflag: tar.TypeChar, Devmajor: 1, Devminor: 3}} {
		must(t, w.WriteHeader(h))
		if h.Size > 0 {
			must2[int](t)(w.Write(program))
		}
	}
	must(t, w.Close())
	_, err = u.c.Import(t.Context(), "web", &b, client.ImportOptions{Update: true, SizeBytes: 64 << 20})
	must(t, err)

	a := u.person(alice, members)
	for _, overlay := range []bool{false, true} {
		name := fmt.Sprint("v", overlay)
		out := a.clone(name, fmt.Sprintf(`,"mount":true,"overlay":%v`, overlay))
		var v engine.Info
		must(t, json.Unmarshal([]byte(out.Body), &v))
		dir := filepath.Join(u.dir, fmt.Sprint(alice.UID), name)
		if out.Status != 201 || v.Mountpoint != dir || v.Owner == nil || *v.Owner != alice || v.Overlay != overlay {
			t.Fatalf("%d %s", out.Status, out.Body)
		}

		for command, want := range map[string]string{
			"stat -c %u:%g " + dir + "/file":                 alice.String(),
			"echo new >" + dir + "/file; cat " + dir + "/*e": "new",
			dir + "/id -u": fmt.Sprint(alice.UID),
			"echo x >" + dir + "/null || echo refused":               "refused",
			"findmnt -no OPTIONS " + dir + " | grep -c nosuid,nodev": "1",
		} {
			if got, err := as(alice, command); err != nil || !strings.HasSuffix(got, want) {
				t.Errorf("overlay %v: %s: %q, %v, wanted %s", overlay, command, got, err, want)
			}
		}
		if got, err := as(bob, "cat "+dir+"/file"); err == nil {
			t.Errorf("bob reads %q", got)
		}

		// Mounted again, it stays where it is.
		if again := a.post("/v1/volumes/"+name+"/mount", `{}`); again.Status != 200 {
			t.Errorf("%d %s", again.Status, again.Body)
		}
		if gone := a.do(call{Method: "DELETE", Path: "/v1/volumes/" + name}); gone.Status != 204 {
			t.Errorf("%d %s", gone.Status, gone.Body)
		}
	}

	// Root's rights, other owners and other places are refused.
	before := u.state()
	for more, want := range map[string]int{
		`,"mount":true,"suid":true`:                       403,
		`,"mount":true,"dev":true`:                        403,
		`,"owner":{"uid":64721,"gid":64722}`:              403,
		`,"owner":{"uid":64711,"gid":0}`:                  403,
		`,"mount":true,"mount_dir":"/tmp/x"`:              403,
		`,"mount":true,"mount_dir":"DIR/64721/x"`:         403,
		`,"mount":true,"mount_dir":"DIR/64711"`:           403,
		`,"mount":true,"mount_dir":"DIR/64711/../64721"`:  400,
		`,"mount":true,"mount_dir":"DIR/64711/./x"`:       400,
		`,"mount":true,"mount_dir":"x"`:                   400,
		`,"mount":true,"mount_dir":"DIR/64711/\u001b[2J"`: 400,
		`,"mount":true,"mount_dir":"DIR/64711/a\nb"`:      400,
		`,"mount":true,"mount_dir":"DIR/64711/no/x"`:      400,
	} {
		if out := a.clone("v", strings.ReplaceAll(more, "DIR", u.dir)); out.Status != want || out.problem(t).Kind == "" {
			t.Errorf("%s: %d %s, wanted %d", more, out.Status, out.Body, want)
		}
	}
	if after := u.state(); after != before {
		t.Errorf("refused, and changed\n%s to\n%s", before, after)
	}
}

// TestLinksInMountDirs: a user cannot lead root's mount to another directory.
func TestLinksInMountDirs(t *testing.T) {
	u := withUsers(t, matrixPolicy)
	a := u.person(alice, members)
	own := filepath.Join(u.dir, fmt.Sprint(alice.UID))
	target := t.TempDir() // of root
	for _, command := range []string{"ln -s " + target + " " + own + "/link", "ln -s " + own + "/real " + own + "/loop",
		"mkdir " + own + "/real " + own + "/full && touch " + own + "/full/file"} {
		if out, err := as(alice, command); err != nil {
			t.Fatal(out, err)
		}
	}
	must(t, os.Mkdir(own+"/roots", 0o755), os.Mkdir(own+"/roots/below", 0o755))
	for _, dir := range []string{"link", "link/x", "loop", "loop/x", "roots", "roots/below", "roots/x"} {
		if out := a.clone("v", fmt.Sprintf(`,"mount":true,"mount_dir":"%s/%s"`, own, dir)); out.Status != 403 {
			t.Errorf("%s: %d %s", dir, out.Status, out.Body)
		}
	}
	if out := a.clone("v", fmt.Sprintf(`,"mount":true,"mount_dir":"%s/full"`, own)); out.Status != 400 {
		t.Errorf("%d %s", out.Status, out.Body)
	}
	if all := u.state(); strings.Count(all, "\n") != 1 {
		t.Errorf("it made %s", all)
	}

	// While the service works, the directory is a link now and then.
	if out, err := as(alice, "mkdir "+own+"/d"); err != nil {
		t.Fatal(out, err)
	}
	stop := make(chan struct{})
	var swaps sync.WaitGroup
	swaps.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
				_, _ = as(alice, fmt.Sprintf("cd %s; for i in 1 2 3 4 5 6 7 8 9; do mv -T d e; ln -s %s d; rm d; mv -T e d; done",
					own, target))
			}
		}
	})
	mounted := 0
	for i := range 60 {
		name := fmt.Sprint("r", i)
		out := a.clone(name, fmt.Sprintf(`,"mount":true,"mount_dir":"%s/d/%s"`, own, name))
		if out.Status == 201 {
			mounted++
			var v engine.Info
			must(t, json.Unmarshal([]byte(out.Body), &v))
			if !strings.HasPrefix(v.Mountpoint, own+"/") {
				t.Errorf("mounted at %s", v.Mountpoint)
			}
		} else if out.Status != 403 && out.Status != 400 && out.Status != 409 && out.Status != 404 {
			t.Errorf("%d %s", out.Status, out.Body)
		}
		if left, _ := os.ReadDir(target); len(left) > 0 {
			t.Fatalf("root's directory has %v", left)
		}
	}
	close(stop)
	swaps.Wait()
	t.Logf("%d of 60 were mounted", mounted)
	if out := a.post("/v1/destroy", `{"what":["r*"]}`); mounted > 0 && (out.Status != 200 || !strings.Contains(out.Body,
		`"failed":[]`)) {
		t.Errorf("%d %s", out.Status, out.Body)
	}
}

// TestDefaultMountDir: without a directory, volumes of users are mounted in a directory that only they can enter.
func TestDefaultMountDir(t *testing.T) {
	u := withUsers(t, strings.ReplaceAll(matrixPolicy, `mounts = ["DIR/{uid}"]`, ""))
	dir := fmt.Sprintf("/run/pando/%d", alice.UID)
	_, err := os.Stat("/run/pando")
	t.Cleanup(func() {
		must(t, os.Remove(dir))
		if err != nil {
			must(t, os.Remove("/run/pando"))
		}
	})
	must(t, os.MkdirAll(dir, 0o700), os.Chown(dir, int(alice.UID), int(alice.GID))) // as earlier versions left it
	a := u.person(alice, members)
	for _, more := range []string{"", fmt.Sprintf(`,"mount_dir":"%s/other"`, dir)} {
		if out := a.clone("v", `,"mount":true`+more); out.Status != 201 || !strings.Contains(out.Body, `"`+dir+`/`) {
			t.Fatalf("%d %s", out.Status, out.Body)
		}
		if got, err := as(alice, "cd "+dir+"; stat -c %u .; ls; touch v/file || touch other/file"); err != nil ||
			!strings.HasPrefix(got, "0\n") {
			t.Errorf("%s, %v", got, err)
		}
		for _, try := range []string{"touch " + dir + "/file", "mkdir " + dir + "/new", "chmod 777 " + dir,
			"rmdir " + dir + "/v", "mv " + dir + "/v " + dir + "/w"} {
			if got, err := as(alice, try); err == nil {
				t.Errorf("alice can %s: %s", try, got)
			}
		}
		if got, err := as(bob, "ls "+dir); err == nil {
			t.Errorf("bob sees %s", got)
		}
		if out := a.do(call{Method: "DELETE", Path: "/v1/volumes/v"}); out.Status != 204 {
			t.Errorf("%d %s", out.Status, out.Body)
		}
	}
}

// TestMountsOfNameless: a directory with the name of the user is none for a user without a name.
func TestMountsOfNameless(t *testing.T) {
	u := withUsers(t, matrixPolicy)
	a := u.person(alice, members)
	u.setPolicy(strings.ReplaceAll(matrixPolicy, "{uid}", "{user}"))
	if out := a.clone("v", `,"mount":true`); out.Status != 403 || !strings.Contains(out.Body, "mount") {
		t.Errorf("%d %s", out.Status, out.Body)
	}
	u.setPolicy(strings.ReplaceAll(matrixPolicy, `["DIR/{uid}"]`, `["DIR/{user}", "DIR/{uid}"]`))
	if out := a.clone("v", `,"mount":true`); out.Status != 201 || strings.Contains(out.Body, `"mountpoint":""`) {
		t.Errorf("%d %s", out.Status, out.Body)
	}
}

const limitsPolicy = `
[[rule]]
users = ["64711"]
goldens = ["web"]
max_volumes = 3
max_bytes = "260M"
max_ttl = "1h"

[[rule]]
users = ["64721"]
goldens = ["*"]
see_all = true
`

// TestLimits: clones that many processes make at once do not exceed the limits.
func TestLimits(t *testing.T) {
	u := withUsers(t, limitsPolicy)
	u.volumeOf(driver.Owner{}, "web", "roots") // does not count
	const clients = 8
	answers := make([]answer, 5*clients)
	var all sync.WaitGroup
	for i := range clients {
		p := u.person(alice)
		all.Go(func() {
			for n := range 5 {
				answers[5*i+n] = p.clone(fmt.Sprintf("v%d-%d", i, n), "")
			}
		})
	}
	all.Wait()
	made := 0
	for _, a := range answers {
		switch {
		case a.Status == 201 && strings.Contains(a.Body, `"expires_at":"2`):
			made++
		case a.Status != 507 || !strings.Contains(a.Body, "the policy allows you 3 volumes"):
			t.Errorf("%d %s", a.Status, a.Body)
		}
	}
	if made != 3 {
		t.Errorf("%d were made", made)
	}
	if state := u.state(); strings.Count(state, "\nv") != 3 {
		t.Errorf("the pool has %s", state)
	}

	// Failed and destroyed ones do not count; each of the three has 64 MiB, and a snapshot as much.
	a := u.person(alice)
	var page VolumePage
	must(t, json.Unmarshal([]byte(a.get("/v1/volumes").Body), &page))
	first, second := page.Items[0].Name, page.Items[1].Name
	const bytes = "allows your volumes and snapshots 260 MiB"
	steps := []struct {
		q    call
		want int
		text string
	}{
		{call{Method: "DELETE", Path: "/v1/volumes/" + first}, 204, ""},
		{call{Method: "POST", Path: "/v1/volumes", Body: `{"from":"nothing","name":"n"}`}, 404, "no volume or golden"},
		{call{Method: "POST", Path: "/v1/volumes", Body: `{"from":"web","name":"n","size_bytes":140000000}`}, 507, bytes},
		{call{Method: "POST", Path: "/v1/volumes", Body: `{"from":"web","name":"n","size_bytes":9000000000000000000}`}, 507,
			bytes},
		{call{Method: "POST", Path: "/v1/volumes", Body: `{"from":"web","name":"n"}`}, 201, ""},
		{call{Method: "POST", Path: "/v1/volumes/n/resize", Body: `{"size_bytes":140000000}`}, 507, bytes},
		{call{Method: "POST", Path: "/v1/volumes/n/snapshots", Body: `{"name":"a"}`}, 201, ""},
		{call{Method: "POST", Path: "/v1/volumes/n/snapshots", Body: `{"name":"b"}`}, 507, bytes},
		{call{Method: "POST", Path: "/v1/volumes/n/rewind", Body: `{"snapshot":"a"}`}, 507, bytes},
		{call{Method: "POST", Path: "/v1/volumes/n/fork", Body: `{"name":"m"}`}, 507, "3 volumes"},
		{call{Method: "POST", Path: "/v1/volumes", Body: `{"from":"web","name":"m","ttl_seconds":3601}`}, 403, "at most 1h"},
		{call{Method: "PUT", Path: "/v1/pins/n", Body: `{"seconds":1}`}, 403, "pin"},
		{call{Method: "PUT", Path: "/v1/volumes/n/ttl", Body: `{}`}, 403, "live for 1h"},
		{call{Method: "PUT", Path: "/v1/volumes/n/ttl", Body: `{"seconds":3601}`}, 403, "live for 1h"},
		{call{Method: "PUT", Path: "/v1/volumes/n/ttl", Body: `{"seconds":60}`}, 200, ""},
	}
	for _, s := range steps {
		before := u.state()
		if out := a.do(s.q); out.Status != s.want || !strings.Contains(out.Body, s.text) {
			t.Errorf("%+v: %d %s", s.q, out.Status, out.Body)
		}
		if after := u.state(); s.want >= 400 && after != before {
			t.Errorf("%+v was refused, and changed\n%s to\n%s", s.q, before, after)
		}
	}
	if state := u.state(); strings.Contains(state, "\nm ") || !strings.Contains(state, "\n"+second+" ") {
		t.Errorf("the pool has %s", state)
	}
}

// TestSeeAll: who may see volumes of others can change none of them, nor read their files.
func TestSeeAll(t *testing.T) {
	u := withUsers(t, limitsPolicy)
	u.volumeOf(alice, "web", "hers")
	b := u.person(bob)
	for _, path := range []string{"/v1/volumes/hers", "/v1/volumes/hers/snapshots", "/v1/labels/hers",
		"/v1/history?ref=hers"} {
		if out := b.get(path); out.Status != 200 || !strings.Contains(out.Body, "hers") && !strings.Contains(path, "labels") {
			t.Errorf("%s: %d %s", path, out.Status, out.Body)
		}
	}
	if out := b.get("/v1/volumes"); !strings.Contains(out.Body, `"hers"`) {
		t.Errorf("%s", out.Body)
	}

	// Only the owner of a volume learns its golden if the rule does not show that.
	u.setPolicy(strings.ReplaceAll(limitsPolicy, `goldens = ["*"]`, `goldens = ["web"]`))
	u.volumeOf(alice, "secret", "deep")
	u.volumeOf(bob, "secret", "own")
	for _, path := range []string{"/v1/volumes/deep", "/v1/volumes/deep/snapshots", "/v1/objects/deep@s",
		"/v1/volumes?limit=1", "/v1/history?ref=deep"} {
		if out := b.get(path); out.Status != 200 || strings.Contains(out.Body, "secret") ||
			!strings.Contains(out.Body, "deep") {
			t.Errorf("%s: %d %s", path, out.Status, out.Body)
		}
	}
	if out := b.get("/v1/volumes?golden=secret"); !strings.Contains(out.Body, `"own"`) ||
		strings.Contains(out.Body, `"deep"`) {
		t.Errorf("volumes of a golden that does not show: %s", out.Body)
	}
	if out := b.get("/v1/volumes?golden=web"); !strings.Contains(out.Body, `"hers"`) {
		t.Errorf("volumes of a golden that shows: %s", out.Body)
	}
	if out := b.get("/v1/volumes/own"); !strings.Contains(out.Body, `"base":"secret@1"`) {
		t.Errorf("%s", out.Body)
	}

	before := u.state()
	for _, q := range []call{{Method: "DELETE", Path: "/v1/volumes/hers"}, {Method: "GET", Path: "/v1/exports/hers"},
		{Method: "GET", Path: "/v1/diff?a=hers@s&b=hers"},
		{Method: "POST", Path: "/v1/volumes/hers/fork", Body: `{"name":"x"}`},
		{Method: "POST", Path: "/v1/volumes", Body: `{"from":"hers@s","name":"x"}`},
		{Method: "PATCH", Path: "/v1/labels/hers", Body: `{"set":{"a":"b"}}`},
		{Method: "POST", Path: "/v1/rename", Body: `{"ref":"hers@s","name":"x"}`}} {
		if out := b.do(q); out.Status != 403 || !strings.Contains(out.Body, "belongs to another user") {
			t.Errorf("%+v: %d %s", q, out.Status, out.Body)
		}
	}
	if out := b.post("/v1/destroy", `{"what":["h*"]}`); out.Status != 404 {
		t.Errorf("%d %s", out.Status, out.Body)
	}
	d, err := u.c.Volume(t.Context(), "hers")
	must(t, err)
	if out := b.post("/v1/destroy", `{"what":["hers"],"ids":["`+d.ID+`"]}`); out.Status != 200 ||
		!strings.Contains(out.Body, `"destroyed":[]`) {
		t.Errorf("by its ID: %d %s", out.Status, out.Body)
	}
	if after := u.state(); after != before {
		t.Errorf("refused, and changed\n%s to\n%s", before, after)
	}
}
