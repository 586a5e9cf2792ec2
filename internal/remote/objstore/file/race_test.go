package file_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/remote/objstore"
	"pando/internal/testing/faulttest"
	"pando/internal/testing/storetest"
)

// TestProcessesCount: compare-and-swap between processes loses no step.
func TestProcessesCount(t *testing.T) {
	dir := t.TempDir()
	const processes, each = 5, 40
	var running []*exec.Cmd
	var said [processes]bytes.Buffer
	for i := range processes {
		c := childCommand(t, "count", dir, each)
		c.Stderr = &said[i]
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		running = append(running, c)
	}
	for i, c := range running {
		if err := c.Wait(); err != nil {
			t.Errorf("%v: %s", err, &said[i])
		}
	}
	s := openStore(t, dir)
	if got, err := storetest.Counted(t.Context(), s, "heads/c"); err != nil || got != processes*each {
		t.Errorf("the counter is at %d, %v, after %d times one more", got, err, processes*each)
	}
	if left := leftovers(t, dir); len(left) > 0 {
		t.Errorf("left are %q", left)
	}
}

// TestProcessesCreate: of several processes that create the same objects, one
// creates each.
func TestProcessesCreate(t *testing.T) {
	dir := t.TempDir()
	const processes, objects = 5, 60
	var running []*exec.Cmd
	var said [processes]bytes.Buffer
	for i := range processes {
		c := childCommand(t, "create", dir, objects)
		c.Stdout, c.Stderr = &said[i], os.Stderr
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		running = append(running, c)
	}
	owner := map[string]int{}
	for i, c := range running {
		if err := c.Wait(); err != nil {
			t.Error(err)
		}
		for key := range strings.FieldsSeq(said[i].String()) {
			if other, taken := owner[key]; taken {
				t.Errorf("%s was created by process %d and by %d", key, other, c.Process.Pid)
			}
			owner[key] = c.Process.Pid
		}
	}
	got := contents(t, openStore(t, dir))
	if len(got) != objects || len(owner) != objects {
		t.Errorf("there are %d objects, %d owners, want %d", len(got), len(owner), objects)
	}
	for key, pid := range owner {
		if got[key] != strconv.Itoa(pid) {
			t.Errorf("%s is %q, created by %d", key, got[key], pid)
		}
	}
}

// TestKilledWriters kills two writers at some moment, many times: all that is there
// is whole, and the next writer cleans up.
func TestKilledWriters(t *testing.T) {
	dir := t.TempDir()
	rounds := 30
	if testing.Short() {
		rounds = 8
	}
	var dirty, objects int
	rnd := faulttest.Rand(t)
	for round := range rounds {
		var running []*exec.Cmd
		var said [2]bytes.Buffer
		for i := range said {
			c := childCommand(t, "write", dir, round*10+i)
			c.Stderr = &said[i]
			if err := c.Start(); err != nil {
				t.Fatal(err)
			}
			running = append(running, c)
		}
		// Not by the clock alone: on a busy machine they would not have begun.
		for deadline := time.Now().Add(time.Minute); len(leftovers(t, dir)) == 0; {
			if time.Now().After(deadline) {
				t.Error("the writers write nothing")
				break
			}
			time.Sleep(time.Millisecond)
		}
		if round%3 > 0 { // else while the object just seen is written, most likely
			time.Sleep(time.Duration(rnd.IntN(60)) * time.Millisecond)
		}
		for i, c := range running {
			if err := c.Process.Kill(); err != nil {
				t.Fatal(err)
			}
			_ = c.Wait() // killed
			if said[i].Len() > 0 {
				t.Errorf("a writer failed: %s", &said[i])
			}
		}
		if len(leftovers(t, dir)) > 0 {
			dirty++
		}
		s := openStore(t, dir)
		for key, data := range contents(t, s) {
			objects++
			if !whole([]byte(data)) {
				t.Errorf("round %d: %s is torn", round, key)
			}
			if key != "heads/h" {
				if err := s.Delete(t.Context(), key); err != nil {
					t.Fatal(err)
				}
			}
		}
		if _, err := s.Put(t.Context(), "heads/h", sealed(10), objstore.Always); err != nil {
			t.Fatal(err)
		}
		if left := leftovers(t, dir); len(left) > 0 {
			t.Fatalf("round %d: after the next write there is %q", round, left)
		}
		closeStore(t, s)
	}
	t.Logf("%d objects were whole; %d of %d times something was left of the dead", objects, dirty, rounds)
	if objects == 0 || dirty == 0 {
		t.Error("nothing was tested: the writers were killed too early or too late")
	}
}

// TestCleaningSparesTheLiving opens stores and writes while another one is at its
// work: what that writes is not taken away.
func TestCleaningSparesTheLiving(t *testing.T) {
	dir := t.TempDir()
	writer := openStore(t, dir)
	done := make(chan error, 1)
	go func() {
		for i := range 60 {
			if _, err := writer.Put(t.Context(), fmt.Sprintf("segments/s/%d", i), sealed(300_000),
				objstore.IfAbsent); err != nil {
				done <- err
				return
			}
		}
		done <- nil
	}()
	for n := 0; ; n++ {
		select {
		case err := <-done:
			if err != nil {
				t.Error(err)
			}
			if n < 5 {
				t.Errorf("only %d others wrote in the meantime", n)
			}
			return
		default:
		}
		s := openStore(t, dir)
		if _, err := s.Put(t.Context(), "heads/h", sealed(10), objstore.Always); err != nil {
			t.Fatal(errors.Join(err, <-done))
		}
		closeStore(t, s)
	}
}

// TestHeldLock: a process that holds the lock and does not run delays others, who
// can be interrupted and give up in the end.
func TestHeldLock(t *testing.T) {
	dir := t.TempDir()
	s := openStore(t, dir)
	if _, err := s.Put(t.Context(), "heads/h", []byte("h"), objstore.Always); err != nil {
		t.Fatal(err)
	}
	release := holdLock(t, dir)
	start := time.Now()
	ctx, cancel := withTimeout(t, 50*time.Millisecond)
	defer cancel()
	_, err := s.Put(ctx, "heads/h", []byte("i"), objstore.Always)
	if !errs.Is(err, errs.Canceled) || time.Since(start) > 5*time.Second {
		t.Errorf("Put with a deadline: %v after %s", err, time.Since(start))
	}
	setLockPatience(t, 100*time.Millisecond)
	_, err = s.Put(t.Context(), "heads/h", []byte("i"), objstore.Always)
	if !errs.Is(err, errs.InUse) || errs.HintOf(err) == "" {
		t.Errorf("Put: %v, hint %q", err, errs.HintOf(err))
	}
	if err := s.Delete(t.Context(), "heads/h"); !errs.Is(err, errs.InUse) {
		t.Errorf("Delete: %v", err)
	}
	for _, err := range s.List(t.Context(), "") {
		if !errs.Is(err, errs.InUse) {
			t.Errorf("List: %v", err)
		}
	}
	if data, _, err := s.Get(t.Context(), "heads/h", 0, -1); err != nil || string(data) != "h" {
		t.Errorf("Get needs no lock: %q, %v", data, err)
	}
	if left := leftovers(t, dir); len(left) > 0 {
		t.Errorf("left are %q", left)
	}
	release()
	if _, err = s.Put(t.Context(), "heads/h", []byte("i"), objstore.Always); err != nil {
		t.Error(err)
	}
}
