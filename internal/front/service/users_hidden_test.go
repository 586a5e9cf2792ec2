package service

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"pando/client"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine"
)

// TestNamesOfOthersDoNotShow: nothing that a user can ask for tells the name of a volume of somebody else, or of a
// golden that the policy does not show.
func TestNamesOfOthersDoNotShow(t *testing.T) {
	u := withUsers(t, matrixPolicy)
	a, b := u.person(alice, members), u.person(bob, members)
	u.volumeOf(driver.Owner{}, "web", "roots-own")
	u.volumeOf(bob, "secret", "bobs-own")
	u.volumeOf(alice, "roots-own", "from-root") // its origin is root's
	u.volumeOf(alice, "bobs-own@s", "from-bob")
	u.volumeOf(alice, "web", "plain")
	if out := b.post("/v1/goldens/team-x/publish", `{"volume":"bobs-own"}`); out.Status != 200 {
		t.Fatalf("%d %s", out.Status, out.Body)
	}
	if out := b.post("/v1/rename", `{"ref":"bobs-own","name":"bobs-new"}`); out.Status != 200 {
		t.Fatalf("%d %s", out.Status, out.Body)
	}
	if out := a.clone("roots-own", ""); out.Status != 409 || strings.Contains(out.Body, "volume \\\"roots-own") {
		t.Errorf("a name that is taken: %d %s", out.Status, out.Body)
	}

	// Everything that alice can read, and the answers to what she changes.
	texts := map[string]string{}
	for _, path := range []string{"/v1/volumes", "/v1/volumes?limit=1", "/v1/volumes?golden=secret", "/v1/goldens",
		"/v1/volumes/from-root", "/v1/volumes/from-bob", "/v1/volumes/from-bob/snapshots", "/v1/volumes/from-bob/snapshots/s",
		"/v1/goldens/web", "/v1/goldens/team-x", "/v1/history", "/v1/events?after=0", "/v1/operations", "/v1/pool",
		"/v1/service", "/v1/diff?a=from-bob@s&b=from-bob", "/v1/labels/from-bob"} {
		out := a.get(path)
		if out.Status != 200 {
			t.Errorf("%s: %d %s", path, out.Status, out.Body)
		}
		texts[path] = out.Body
	}
	for _, q := range []call{
		{Method: "POST", Path: "/v1/volumes/from-bob/mount"}, {Method: "POST", Path: "/v1/volumes/from-bob/unmount"},
		{Method: "PATCH", Path: "/v1/labels/from-bob", Body: `{"set":{"origin":"mine"}}`},
		{Method: "PUT", Path: "/v1/pins/from-bob"}, {Method: "DELETE", Path: "/v1/pins/from-bob"},
		{Method: "POST", Path: "/v1/volumes/from-bob/rewind", Body: `{"snapshot":"s"}`},
		{Method: "POST", Path: "/v1/volumes/from-bob/fork", Body: `{"name":"fork"}`},
		{Method: "POST", Path: "/v1/volumes/from-bob/flatten"},
		{Method: "POST", Path: "/v1/goldens/team-y/publish", Body: `{"volume":"from-bob"}`},
		{Method: "POST", Path: "/v1/rename", Body: `{"ref":"from-bob","name":"mine"}`},
		{Method: "POST", Path: "/v1/destroy", Body: `{"what":["*"]}`}} {
		out := a.do(q)
		if out.Status >= 400 {
			t.Errorf("%+v: %d %s", q, out.Status, out.Body)
		}
		texts[q.Method+" "+q.Path] = out.Body
	}
	for what, text := range texts {
		for _, name := range []string{"roots-own", "bobs-own", "bobs-new"} {
			if strings.Contains(text, name) {
				t.Errorf("%s shows %s: %s", what, name, text)
			}
		}
		if strings.Contains(text, "secret@") && strings.Contains(what, "events") {
			t.Errorf("%s shows the golden secret: %s", what, text)
		}
	}
	// The number of clones of a golden counts none of others.
	for text, n := range map[string]int{texts["/v1/goldens"]: 1, b.get("/v1/goldens").Body: 0,
		u.root.get("/v1/goldens").Body: 1} {
		var l GoldenList
		must(t, json.Unmarshal([]byte(text), &l))
		for _, g := range l.Items {
			if g.Golden == "web" && g.Volumes != n {
				t.Errorf("web has %d volumes, not %d: %s", g.Volumes, n, text)
			}
		}
	}
	if text := texts["PATCH /v1/labels/from-bob"]; !strings.Contains(text, `"origin":"mine"`) {
		t.Errorf("a label is gone: %s", text)
	}
	if !strings.Contains(texts["/v1/volumes"], `"origin":"web@1"`) {
		t.Errorf("a golden that shows is gone: %s", texts["/v1/volumes"])
	}
	if left := u.state(); !strings.Contains(left, "roots-own") || !strings.Contains(left, "bobs-new") ||
		strings.Contains(left, "mine") {
		t.Errorf("a glob has left %s", left)
	}
}

// TestHiddenGoldens: a golden that no rule shows is like one that does not exist, also while it is being built.
func TestHiddenGoldens(t *testing.T) {
	u := withUsers(t, matrixPolicy)
	u.volumeOf(alice, "web", "v")
	a := u.person(alice, members)
	for _, q := range []call{
		{Method: "POST", Path: "/v1/volumes", Body: `{"from":"NAME","name":"x"}`},
		{Method: "POST", Path: "/v1/volumes", Body: `{"from":"NAME@1","name":"x","overlay":true}`},
		{Method: "POST", Path: "/v1/volumes/v/rebase", Body: `{"onto":"NAME"}`},
		{Method: "GET", Path: "/v1/diff?a=v&b=NAME"}, {Method: "GET", Path: "/v1/exports/NAME"},
		{Method: "GET", Path: "/v1/goldens/NAME"}, {Method: "GET", Path: "/v1/volumes/NAME"},
		{Method: "GET", Path: "/v1/labels/NAME"}, {Method: "PATCH", Path: "/v1/labels/NAME", Body: `{"remove":["a"]}`},
		{Method: "PATCH", Path: "/v1/labels/NAME", Body: `{"remove":["a"]}`, IfMatch: `"0123456789abcdef"`},
		{Method: "PUT", Path: "/v1/pins/NAME@1"}, {Method: "POST", Path: "/v1/volumes/NAME/mount"},
		{Method: "DELETE", Path: "/v1/volumes/NAME"}, {Method: "POST", Path: "/v1/destroy", Body: `{"what":["NAME@1"]}`},
		{Method: "GET", Path: "/v1/history?ref=NAME"},
		{Method: "POST", Path: "/v1/goldens/NAME/publish", Body: `{"volume":"v"}`},
		{Method: "POST", Path: "/v1/rename", Body: `{"ref":"NAME","name":"x"}`},
	} {
		var got [2]answer
		for i, name := range []string{"secret", "nosuch"} {
			one := q
			one.Path, one.Body = strings.ReplaceAll(q.Path, "NAME", name), strings.ReplaceAll(q.Body, "NAME", name)
			got[i] = a.do(one)
			got[i].Body = strings.ReplaceAll(got[i].Body, name, "NAME")
		}
		if got[0] != got[1] || got[0].Status < 400 {
			t.Errorf("%+v:\n%+v\n%+v", q, got[0], got[1])
		}
	}

	// Goldens that show can be cloned, but not changed.
	before := u.state()
	for _, q := range []call{{Method: "PATCH", Path: "/v1/labels/web", Body: `{"set":{"a":"b"}}`},
		{Method: "PUT", Path: "/v1/pins/web@1"}, {Method: "POST", Path: "/v1/rename", Body: `{"ref":"web","name":"x"}`},
		{Method: "POST", Path: "/v1/goldens/web/publish", Body: `{"volume":"v"}`},
		{Method: "POST", Path: "/v1/goldens/team-z/publish", Body: `{"volume":"v","keep":1}`},
		{Method: "POST", Path: "/v1/goldens/team-z/import?keep=1", Type: "application/x-tar"},
		{Method: "GET", Path: "/v1/pool?exact=true"}} {
		if out := a.do(q); out.Status != 403 {
			t.Errorf("%+v: %d %s", q, out.Status, out.Body)
		}
	}
	if after := u.state(); after != before {
		t.Errorf("refused, and changed\n%s to\n%s", before, after)
	}

	// Nobody waits for the first generation of a golden that is hidden.
	r, w := io.Pipe()
	imported := make(chan error)
	go func() {
		_, err := u.c.Import(t.Context(), "later", r, client.ImportOptions{SizeBytes: 64 << 20})
		imported <- err
	}()
	must2[int](t)(w.Write(make([]byte, 512)))
	for !strings.Contains(u.root.get("/v1/operations").Body, `"later"`) {
		time.Sleep(5 * time.Millisecond)
	}
	begin := time.Now()
	out := a.post("/v1/volumes", `{"from":"later","name":"x"}`)
	if out.Status != 404 || time.Since(begin) > 5*time.Second {
		t.Errorf("%d %s after %s", out.Status, out.Body, time.Since(begin))
	}
	_ = w.CloseWithError(io.ErrUnexpectedEOF)
	if <-imported == nil {
		t.Error("it was imported")
	}
}

// TestPagesOfUsers: the pages of a user have all of the user's volumes and no other, whatever lies between them.
func TestPagesOfUsers(t *testing.T) {
	u := withUsers(t, matrixPolicy)
	from, err := ref.Parse("test", "web")
	must(t, err)
	labels, err := driver.NewLabels("test", map[string]string{"k": "v"})
	must(t, err)
	for _, o := range []driver.Owner{{}, alice, {UID: alice.UID, GID: 7}, bob, {UID: 6471, GID: 1}} {
		name := ref.MustName(fmt.Sprintf("all-%d-%d", o.UID, o.GID))
		_, err := u.e.Clone(t.Context(), engine.CloneRequest{From: from, Name: name, Count: 15, Owner: o, Labels: labels})
		must(t, err)
	}

	a := u.person(alice, members)
	for _, more := range []string{"", "&label=k=v", "&golden=web"} {
		seen, after := map[string]bool{}, ""
		for pages := 1; ; pages++ {
			var page VolumePage
			must(t, json.Unmarshal([]byte(a.get("/v1/volumes?limit=4&after="+after+more).Body), &page))
			for _, v := range page.Items {
				if v.Name <= after || seen[v.Name] || v.Owner == nil || v.Owner.UID != alice.UID {
					t.Errorf("%s after %s", v.Name, after)
				}
				seen[v.Name] = true
				after = v.Name
			}
			if page.Next == "" {
				if len(seen) != 30 || pages != 8 {
					t.Errorf("%s: %d volumes on %d pages", more, len(seen), pages)
				}
				break
			}
			after = page.Next
		}
	}

	// A label that others have as well destroys only her own.
	out := a.post("/v1/destroy", `{"labels":["k=v"]}`)
	if out.Status != 200 || strings.Count(out.Body, `"reclaimed"`) != 30 {
		t.Errorf("%d %s", out.Status, out.Body)
	}
	if left := strings.Count(u.state(), "all-"); left != 45 {
		t.Errorf("%d are left", left)
	}
}

// TestOperationsOfUsers: users see, wait for and cancel only their own operations, and keys of requests are theirs.
func TestOperationsOfUsers(t *testing.T) {
	u := withUsers(t, matrixPolicy)
	a, b := u.person(alice, members), u.person(bob, members)
	u.volumeOf(alice, "web", "v")
	out := a.post("/v1/volumes/v/flatten", "")
	var op Operation
	must(t, json.Unmarshal([]byte(out.Body), &op))
	gc := u.root.post("/v1/gc", "")
	var byRoot Operation
	must(t, json.Unmarshal([]byte(gc.Body), &byRoot))

	if out := a.get("/v1/operations"); !strings.Contains(out.Body, op.ID) || strings.Contains(out.Body, byRoot.ID) {
		t.Errorf("hers: %s", out.Body)
	}
	if out := b.get("/v1/operations"); strings.Contains(out.Body, `"id"`) {
		t.Errorf("his: %s", out.Body)
	}
	for _, id := range []string{op.ID, byRoot.ID, "unknown"} {
		for _, q := range []call{{Method: "GET", Path: "/v1/operations/" + id},
			{Method: "DELETE", Path: "/v1/operations/" + id},
			{Method: "GET", Path: "/v1/operations/" + id + "/wait"}} {
			want := `operation ` + id + `: no such operation`
			if out := b.do(q); out.Status != 404 || !strings.Contains(out.Body, want) {
				t.Errorf("%+v: %d %s", q, out.Status, out.Body)
			}
		}
	}

	// The same key, of two callers and of one.
	q := call{Method: "POST", Path: "/v1/volumes", Body: `{"from":"web","name":"keyed"}`, Key: "k"}
	if first, again := a.do(q), a.do(q); first.Status != 201 || again.Status != 200 {
		t.Errorf("%d %s, %d %s", first.Status, first.Body, again.Status, again.Body)
	}
	if out := b.do(q); out.Status != 409 || strings.Contains(out.Body, `"id"`) {
		t.Errorf("%d %s", out.Status, out.Body)
	}
	x, y := Caller{Local: true, UID: 64_999}, Caller{Token: "x"}
	if x.Identity() == (Caller{Local: true, UID: 65_000}).Identity() || x.Identity() == y.Identity() {
		t.Error("callers are mixed up")
	}

	// Some operations of a user leave room for those of others.
	var works []*work
	for range maxRunningOfUser {
		w, err := u.operations.begin("test", "", Caller{Local: true, UID: bob.UID}, func() {})
		must(t, err)
		works = append(works, w)
	}
	u.volumeOf(bob, "web", "w")
	if out := b.post("/v1/volumes/w/flatten", ""); out.Status != 409 {
		t.Errorf("%d %s", out.Status, out.Body)
	}
	if out := a.post("/v1/volumes/v/flatten", ""); out.Status != 200 {
		t.Errorf("%d %s", out.Status, out.Body)
	}
	for _, w := range works {
		w.finish(httpWords{}, nil, nil)
		u.operations.running.Done()
	}
}

// TestPolicyChanges: a new policy holds for the next request of a connection that is open, and for a stream.
func TestPolicyChanges(t *testing.T) {
	u := withUsers(t, matrixPolicy)
	a := u.person(alice, members)
	if out := u.person(alice).get("/v1/volumes"); out.Status != 403 { // groups are those of the process
		t.Errorf("without the group: %d %s", out.Status, out.Body)
	}
	var many []uint32
	for g := range uint32(100) {
		many = append(many, 70_000+g)
	}
	if out := u.person(alice, append(many, members)...).get("/v1/volumes"); out.Status != 200 {
		t.Errorf("in many groups: %d %s", out.Status, out.Body)
	}
	if out := a.clone("v", ""); out.Status != 201 {
		t.Fatalf("%d %s", out.Status, out.Body)
	}

	ended := make(chan answer)
	follower := u.person(alice, members)
	go func() { ended <- follower.get("/v1/events") }()
	for open := 0; open == 0; time.Sleep(time.Millisecond) {
		u.streams.mu.Lock()
		open = u.streams.user[alice.UID]
		u.streams.mu.Unlock()
	}
	u.setPolicy("[[rule]]\nusers = [\"64721\"]\ngoldens = [\"web\"]\n")
	if out := a.get("/v1/volumes"); out.Status != 403 || !strings.Contains(out.Body, "no rule") {
		t.Errorf("%d %s", out.Status, out.Body)
	}
	u.SetPolicy(nil)
	if out := a.get("/v1/volumes"); out.Status != 403 || !strings.Contains(out.Body, "without a policy") {
		t.Errorf("%d %s", out.Status, out.Body)
	}
	if out := <-ended; out.Status != 200 || !strings.Contains(out.Body, "event: error") {
		t.Errorf("the stream goes on: %d %q", out.Status, out.Body)
	}
}
