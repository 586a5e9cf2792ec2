package service

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"pando/client"
	"pando/internal/base/ref"
	"pando/internal/driver/plain"
	"pando/internal/engine"
)

// have returns for how many something is counted.
func (c *counts[K]) have() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.n)
}

// TestLimitsOfUsers: the connections and comparisons of a user leave room for those of others.
func TestLimitsOfUsers(t *testing.T) {
	u := withUsers(t, matrixPolicy)
	a, b := u.person(alice, members), u.person(bob, members)
	const diff = "/v1/diff?a=web&b=web@1"
	for range 3 {
		if out := a.get(diff); out.Status != 200 {
			t.Fatalf("%d %s", out.Status, out.Body)
		}
	}
	closed := func() {
		t.Helper()
		for end := time.Now().Add(10 * time.Second); u.connections.have() > 0; time.Sleep(time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("connections that were closed count: %v", u.connections.n)
			}
		}
	}
	if closed(); u.diffs.have() > 0 {
		t.Fatalf("comparisons that have ended count: %v", u.diffs.n)
	}

	var ends []func()
	for range maxDiffsOfUser {
		end, ok := u.diffs.add(alice.UID, maxDiffsOfUser)
		if ends = append(ends, end); !ok {
			t.Fatal("too many")
		}
	}
	if out := a.get(diff); out.Status != 409 {
		t.Errorf("one comparison more: %d %s", out.Status, out.Body)
	}
	closed()
	for range maxConnectionsOfUser {
		end, ok := u.connections.add(alice.UID, maxConnectionsOfUser)
		if ends = append(ends, end); !ok {
			t.Fatal("too many")
		}
	}
	var out answer
	if must(t, a.in.Encode(call{Method: "GET", Path: "/v1/service"}), a.out.Decode(&out)); out.Status != -1 {
		t.Errorf("one connection more: %d %s", out.Status, out.Body)
	}
	for name, p := range map[string]*person{"bob": b, "root": u.root} {
		if out := p.get(diff); out.Status != 200 {
			t.Errorf("%s: %d %s", name, out.Status, out.Body)
		}
	}
	for _, end := range ends {
		end()
	}
	if out := a.get(diff); out.Status != 200 {
		t.Errorf("%d %s", out.Status, out.Body)
	}
}

// TestStrangers: connections over TCP that send no valid token are few, and leave those that did alone.
func TestStrangers(t *testing.T) {
	defer func(was int) { maxStrangersOfHost = was }(maxStrangersOfHost)
	maxStrangersOfHost = 2
	file := filepath.Join(t.TempDir(), "tokens")
	token, err := AddToken(file, ref.MustName("ci"))
	must(t, err)
	tokens, err := ReadTokens(file)
	must(t, err)
	var logged atomic.Int64
	s := serve(t, newPool(t, plain.Name), func(o *Options) {
		o.Tokens = tokens
		o.Log = func(format string, _ ...any) {
			if strings.Contains(format, "without a valid token") {
				logged.Add(1)
			}
		}
	})
	l, err := ListenTCP("127.0.0.1:0", "", "")
	must(t, err)
	server := s.newServer(l)
	go func() { _ = server.Serve(l) }() // until it is closed
	defer server.Close()

	// One that is known, and keeps its connection.
	c, err := client.New(client.Options{URL: "http://" + l.Addr().String(), Token: token})
	must(t, err)
	defer c.Close()
	_, err = c.Service(t.Context())
	must(t, err)

	// As many strangers as may be: the next one is closed at once.
	var open []net.Conn
	closed := func() bool {
		conn, err := net.Dial("tcp", l.Addr().String())
		must(t, err)
		t.Cleanup(func() { _ = conn.Close() })
		open = append(open, conn)
		must(t, conn.SetReadDeadline(time.Now().Add(time.Second/2)))
		_, err = conn.Read(make([]byte, 1))
		return !errors.Is(err, os.ErrDeadlineExceeded)
	}
	for i, want := range []bool{false, false, true, true} {
		if got := closed(); got != want {
			t.Errorf("connection %d is closed: %v", i, got)
		}
	}
	if logged.Load() != 1 {
		t.Errorf("%d messages", logged.Load())
	}
	_, err = c.Service(t.Context())
	must(t, err)

	// The answer to a wrong token ends the connection, which makes room.
	_, err = io.WriteString(open[0], "GET /v1/service HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer x\r\n\r\n")
	must(t, err, open[0].SetReadDeadline(time.Now().Add(20*time.Second)))
	if b, err := io.ReadAll(open[0]); err != nil || !strings.Contains(string(b), " 401 ") {
		t.Errorf("%s, %v", b, err)
	}
	for end := time.Now().Add(20 * time.Second); closed(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("no room is made")
		}
	}
}

// TestResultsOfUsers: operations of a user take little memory after their end, and do not push out those of root.
func TestResultsOfUsers(t *testing.T) {
	s := withGolden(t, "plain")
	run := func(by Caller, result string) *work {
		w, err := s.operations.begin("test", "", by, func() {})
		must(t, err)
		w.finish(httpWords{}, result, nil)
		s.operations.running.Done()
		return w
	}
	root, user := Caller{Local: true}, Caller{Local: true, UID: alice.UID}
	first := run(root, "roots")
	const bytes = maxResult - 10
	for range maxFinished {
		run(user, "small")
	}
	for range 2 * maxResultsOfUser / bytes {
		run(user, strings.Repeat("x", bytes))
	}

	kept, all := 0, s.operations.list(user)
	for _, w := range all {
		text, _ := w.describe().Result.(json.RawMessage)
		kept += len(text)
	}
	if len(all) > maxFinishedOfUser || kept > maxResultsOfUser || kept < maxResultsOfUser-bytes {
		t.Errorf("%d operations are remembered, with %d bytes", len(all), kept)
	}
	if newest := all[0].describe(); newest.Result == nil || len(newest.Warnings) > 0 {
		t.Errorf("the newest result is gone: %v", newest.Warnings)
	}
	if oldest := all[len(all)-1].describe(); oldest.Result != nil || len(oldest.Warnings) != 1 {
		t.Errorf("nothing says that a result is gone: %v", oldest.Warnings)
	}
	if w, err := s.operations.find(first.op.ID, root); err != nil || w.describe().Result == nil {
		t.Errorf("root's operation is gone: %v", err)
	}
}

// TestRepeatedWhenHidden: the answer to a repeated request does not tell the name of a golden that root has renamed.
func TestRepeatedWhenHidden(t *testing.T) {
	u := withUsers(t, matrixPolicy)
	a := u.person(alice, members)
	u.volumeOf(alice, "web", "v")
	publish := call{Method: "POST", Path: "/v1/goldens/team-x/publish", Body: `{"volume":"v"}`, Key: "k"}
	if out := a.do(publish); out.Status != 200 {
		t.Fatalf("%d %s", out.Status, out.Body)
	}
	_, err := u.e.Rename(t.Context(), engine.RenameRequest{Ref: ref.MustName("team-x").Ref(),
		Name: ref.MustName("concealed")})
	must(t, err)
	out := a.do(publish)
	if p := out.problem(t); p.Status != 404 || strings.Contains(out.Body, "concealed") {
		t.Errorf("%d %s", out.Status, out.Body)
	}
}

// TestRedactedForNobody: a client that went away does not make the answer to it fail, which would be a panic.
func TestRedactedForNobody(t *testing.T) {
	u := withUsers(t, matrixPolicy)
	c := Caller{Local: true, UID: alice.UID, GID: alice.GID, Groups: []uint32{members}}
	g, err := u.authorize(c, "test", reads)
	must(t, err)
	ctx, cancel := context.WithCancel(g.in(t.Context(), reads))
	cancel()
	v, err := u.redacted(ctx, engine.Info{Kind: "volume", Origin: "secret@1"})
	if o, _ := v.(map[string]any); err != nil || o["origin"] != "" {
		t.Errorf("%v, %v", v, err)
	}
}
