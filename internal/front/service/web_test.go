package service

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"pando/client"
	"pando/internal/base/ref"
	"pando/internal/driver/plain"
	"pando/internal/driver/reflink"
)

// askJSON reads an answer of a route.
func askJSON[T any](t *testing.T, h http.Handler, path string) (out T) {
	t.Helper()
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, nil))
	if w.Code != http.StatusOK {
		t.Fatalf("%s: %d %s", path, w.Code, w.Body)
	}
	must(t, json.Unmarshal(w.Body.Bytes(), &out))
	return out
}

// loginFor is a page that only signs in.
type loginFor struct {
	http.Handler
	caller Caller
}

// Login remembers the caller.
func (l *loginFor) Login(c Caller) (string, time.Time) {
	l.caller = c
	return "http://x/open/y", time.Now()
}

// TestLogin: the page gets the caller whom the kernel names, with the groups of the process.
func TestLogin(t *testing.T) {
	u := withUsers(t, usersPolicyForWeb)
	page := &loginFor{}
	u.SetWeb(page)
	if a := u.person(alice, members).post("/v1/web/logins", ""); a.Status != http.StatusOK ||
		!strings.Contains(a.Body, "/open/y") {
		t.Fatalf("%+v", a)
	}
	groups := []uint32{members, alice.GID}
	if c := page.caller; !c.Local || c.UID != alice.UID || !slices.Equal(c.Groups, groups) {
		t.Errorf("the page acts for %+v", c)
	}
	if a := u.person(outsider).post("/v1/web/logins", ""); a.Status != http.StatusForbidden {
		t.Errorf("an outsider: %+v", a)
	}

	// In the name of the caller, the API answers as it does to the caller.
	u.volumeOf(alice, "web", "hers")
	u.volumeOf(bob, "web", "his")
	page2 := askJSON[VolumePage](t, u.As(page.caller), "/v1/volumes")
	if len(page2.Items) != 1 || page2.Items[0].Name != "hers" {
		t.Errorf("%+v", page2)
	}
	sums := askJSON[Lineage](t, u.As(page.caller), "/v1/lineage")
	for _, s := range sums.Items {
		if s.Golden != "web" || s.Kind == "volume" && s.Objects != 1 {
			t.Errorf("lineage: %+v", s)
		}
	}
	if status := askJSON[Status](t, u.As(page.caller), "/v1/service"); status.AllRights {
		t.Errorf("%+v", status)
	}
}

const usersPolicyForWeb = `
[[rule]]
groups = ["64800"]
goldens = ["web"]
mounts = ["DIR/{uid}"]
`

// TestRevokedToken: what acts for a token ends with it.
func TestRevokedToken(t *testing.T) {
	s := serve(t, newPool(t, plain.Name))
	file := filepath.Join(t.TempDir(), "tokens")
	_, err := AddToken(file, ref.MustName("ci"))
	must(t, err)
	s.Tokens, err = ReadTokens(file)
	must(t, err)
	ci := s.As(Caller{Token: "ci"})
	if status := askJSON[Status](t, ci, "/v1/service"); !status.AllRights || status.Caller != "token ci" {
		t.Errorf("%+v", status)
	}

	must(t, os.WriteFile(file, nil, 0o600), s.Tokens.Reload())
	w := httptest.NewRecorder()
	ci.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/v1/service", nil))
	if w.Code != http.StatusForbidden {
		t.Errorf("%d %s", w.Code, w.Body)
	}
}

// TestVolumeFilters finds volumes by name, state and generation, page by page.
func TestVolumeFilters(t *testing.T) {
	s := withGolden(t, reflink.Name)
	ctx := t.Context()
	_, err := s.c.Import(ctx, "web", archive(t, map[string]string{"file": "v2"}),
		client.ImportOptions{SizeBytes: 64 << 20, Update: true})
	must(t, err)
	for i, name := range []string{"job-1", "job-2", "job-3", "other"} {
		from := fmt.Sprintf("web@%d", i%2+1)
		_, err := s.c.Clone(ctx, client.CloneRequest{From: from, Name: name, Make: client.Make{Mount: i > 1}})
		must(t, err)
	}

	for query, want := range map[string]string{
		"": "job-1 job-2 job-3 other", "name=job-*": "job-1 job-2 job-3", "name=*3": "job-3", "name=job-[12]": "job-1 job-2",
		"name=JOB-*": "", "state=mounted": "job-3 other", "state=idle": "job-1 job-2", "golden=web@1": "job-1 job-3",
		"golden=web@2&state=mounted": "other", "golden=web": "job-1 job-2 job-3 other", "golden=web@9": "", "golden=none": "",
		"name=job-?&state=idle&golden=web@2": "job-2",
	} {
		for limit := 1; limit <= 5; limit += 2 {
			var names []string
			for after := ""; ; {
				page := askJSON[VolumePage](t, s.As(LocalCaller(0, 0, 1)),
					fmt.Sprintf("/v1/volumes?limit=%d&after=%s&%s", limit, after, query))
				for _, v := range page.Items {
					names = append(names, v.Name)
				}
				if after = page.Next; after == "" {
					break
				}
			}
			if got := strings.Join(names, " "); got != want {
				t.Errorf("%s, %d at a time: got %q, want %q", query, limit, got, want)
			}
		}
	}
	if status, text := s.raw("GET", "/v1/volumes?name=[", ""); status != http.StatusBadRequest {
		t.Errorf("%d %s", status, text)
	}
}

// TestLineage adds up what descends from each generation.
func TestLineage(t *testing.T) {
	s := withGolden(t, plain.Name)
	for _, name := range []string{"a", "b"} {
		_, err := s.c.Clone(t.Context(), client.CloneRequest{From: "web", Name: name})
		must(t, err)
	}
	_, err := s.c.Snapshot(t.Context(), "a", client.SnapshotRequest{Name: "s"})
	must(t, err)
	got := map[string]int{}
	for _, sum := range askJSON[Lineage](t, s.As(LocalCaller(0, 0, 1)), "/v1/lineage").Items {
		got[fmt.Sprintf("%s@%d %s", sum.Golden, sum.Generation, sum.Kind)] = sum.Objects
	}
	if fmt.Sprint(got) != "map[web@1 generation:1 web@1 snapshot:1 web@1 volume:2]" {
		t.Errorf("%v", got)
	}
}

// TestRemains: what was destroyed and could not be removed is listed with the reason.
func TestRemains(t *testing.T) {
	s := withGolden(t, reflink.Name)
	if all := askJSON[RemainsList](t, s.As(LocalCaller(0, 0, 1)), "/v1/remains"); len(all.Items) != 0 {
		t.Errorf("%+v", all)
	}
	s.keepDestroyed()
	all := askJSON[RemainsList](t, s.As(LocalCaller(0, 0, 1)), "/v1/remains")
	if len(all.Items) != 1 || all.Items[0].Ref != "kept" || all.Items[0].Kind != "trash" || len(all.Items[0].Why) != 1 {
		t.Errorf("%+v", all)
	}
}

// TestSpace: the space is remembered, the newest point last, and not too many.
func TestSpace(t *testing.T) {
	s := serve(t, newPool(t, plain.Name))
	h := askJSON[SpaceHistory](t, s.As(LocalCaller(0, 0, 1)), "/v1/pool/space")
	if len(h.Items) != 1 || h.Items[0].TotalBytes < h.Items[0].UsedBytes || h.Items[0].TotalBytes == 0 {
		t.Fatalf("%+v", h)
	}

	var l spaceLog
	now := time.Now()
	for i := range 3000 {
		l.points = append(l.points, SpacePoint{now.Add(time.Duration(i-3000) * time.Minute), int64(i % 100), 100})
	}
	must(t, l.note(t.Context(), s.Service, 0))
	if n := len(l.points); n < 1400 || n > 1450 {
		t.Errorf("%d points of a day are kept", n)
	}
	if points := l.list(10); len(points) > 10 || points[0].UsedBytes != 99 {
		t.Errorf("%+v", points)
	}
}

// TestWatchVolume: samples say whether the volume is mounted, and how long its syncs take.
func TestWatchVolume(t *testing.T) {
	s := withGolden(t, reflink.Name)
	_, err := s.c.Clone(t.Context(), client.CloneRequest{From: "web", Name: "job"})
	must(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	resp, err := s.c.Do(ctx, client.Request{Method: "GET", Path: "/v1/volumes/job/iostat",
		Query: map[string][]string{"interval_seconds": {"0.1"}}})
	must(t, err)
	defer resp.Body.Close()
	lines := bufio.NewScanner(resp.Body)
	until := func(what string, is func(VolumeActivity) bool) {
		t.Helper()
		for lines.Scan() {
			text, ok := strings.CutPrefix(lines.Text(), "data: ")
			var a VolumeActivity
			if ok && json.Unmarshal([]byte(text), &a) == nil && is(a) {
				return
			}
		}
		t.Fatalf("no sample %s: %v", what, lines.Err())
	}

	until("of a volume that is not mounted", func(a VolumeActivity) bool { return !a.Mounted })
	v, err := s.c.Mount(t.Context(), "job", client.MountRequest{})
	must(t, err)
	until("of a mounted volume", func(a VolumeActivity) bool { return a.Mounted })
	f, err := os.Create(filepath.Join(v.Mountpoint, "synced"))
	must(t, err)
	defer f.Close()
	until("with syncs", func(a VolumeActivity) bool {
		_, err := f.Write([]byte("x"))
		must(t, err, f.Sync())
		return a.Syncs != nil && a.Syncs.Count > 0 && a.Syncs.Latency != nil && a.WrittenBytes != nil
	})
	must(t, f.Close())
	_, err = s.c.Unmount(t.Context(), "job")
	must(t, err)
	until("after it was unmounted", func(a VolumeActivity) bool { return !a.Mounted })
	must(t, s.c.Destroy(t.Context(), "job", ""))
	for lines.Scan() {
		if strings.Contains(lines.Text(), "event: error") {
			return
		}
	}
	t.Errorf("the stream of a destroyed volume does not end: %v", lines.Err())
}
