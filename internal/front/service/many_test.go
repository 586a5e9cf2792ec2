package service

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"pando/client"
	"pando/internal/driver/reflink"
	"pando/internal/testing/testfs"
)

// TestManyClients: many clients clone, write, snapshot and destroy at the same time, without an error, and nothing adds
// up.
func TestManyClients(t *testing.T) {
	clients, lasting := 50, 10*time.Second
	if testfs.Full() {
		clients, lasting = 200, time.Minute
	}
	s := withGolden(t, reflink.Name)
	var cycles atomic.Int64
	round := func(lasting time.Duration) {
		ctx, cancel := context.WithTimeout(t.Context(), lasting)
		defer cancel()
		var wg sync.WaitGroup
		for i := range clients {
			wg.Go(func() {
				for n := 0; ctx.Err() == nil && !t.Failed(); n++ {
					if err := s.cycle(fmt.Sprintf("v%d-%d", i, n)); err != nil {
						t.Errorf("client %d, cycle %d: %v", i, n, err)
					}
					cycles.Add(1)
				}
			})
		}
		wg.Wait()
	}

	round(lasting / 4)
	before := s.held()
	warm := cycles.Load()
	start := time.Now()
	round(lasting)
	took := time.Since(start)
	t.Logf("%d clients: %d cycles, %.0f a second", clients, cycles.Load()-warm,
		float64(cycles.Load()-warm)/took.Seconds())
	s.checkHeld(before, s.held())
}

// TestManyCycles: nothing grows with the number of volumes that were made and destroyed: neither memory, descriptors
// and goroutines of the process, nor the catalogue.
func TestManyCycles(t *testing.T) {
	cycles := 2_000
	if testfs.Full() {
		cycles = 100_000
	}
	const clients, warmUp = 8, 500
	s := withGolden(t, reflink.Name)
	var next atomic.Int64
	round := func(n int) {
		last := next.Load() + int64(n)
		var wg sync.WaitGroup
		for range clients {
			wg.Go(func() {
				for i := next.Add(1); i <= last && !t.Failed(); i = next.Add(1) {
					name := fmt.Sprint("v", i)
					_, err := s.c.Clone(context.Background(), client.CloneRequest{From: "web", Name: name, Key: name})
					if err == nil {
						err = s.c.Destroy(context.Background(), name, "")
					}
					if err != nil {
						t.Errorf("cycle %d: %v", i, err)
					}
				}
			})
		}
		wg.Wait()
		next.Store(last)
	}

	round(warmUp)
	before := s.held()
	start := time.Now()
	round(cycles)
	t.Logf("%d cycles in %v", cycles, time.Since(start).Round(time.Millisecond))
	s.checkHeld(before, s.held())
}

// TestCommandAndService: both work on one pool at once, also on the same volumes.
func TestCommandAndService(t *testing.T) {
	pando := program(t)
	s := withGolden(t, reflink.Name)
	command := func(args ...string) error {
		out, err := exec.Command(pando, append([]string{"--pool", s.e.Dir(), "-q"}, args...)...).CombinedOutput()
		if err != nil {
			return fmt.Errorf("pando %v: %w: %s", args, err, out)
		}
		return nil
	}

	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			for n := range 10 {
				// What one has made, the other destroys.
				a, b := fmt.Sprintf("a%d-%d", i, n), fmt.Sprintf("b%d-%d", i, n)
				err := errors.Join(command("clone", "web", a, "--mount"), s.c.Destroy(context.Background(), a, ""))
				_, cerr := s.c.Clone(context.Background(), client.CloneRequest{From: "web", Name: b,
					Make: client.Make{Mount: true}})
				if err := errors.Join(err, cerr, command("destroy", b)); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	for v, err := range s.c.Volumes(t.Context(), client.VolumeFilter{}) {
		t.Errorf("left: %s, %v", v.Name, err)
	}
	op, err := s.c.Fsck(t.Context(), nil, false)
	if r := done[map[string]any](s, op, err); r["ok"] != true {
		t.Errorf("fsck: %v", r)
	}
}

// cycle is the life of a volume. Its context does not end, so that nothing is left.
func (s *served) cycle(name string) error {
	ctx := context.Background()
	v, err := s.c.Clone(ctx, client.CloneRequest{From: "web", Name: name, Key: name, Make: client.Make{Mount: true}})
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(v.Mountpoint, "own"), []byte(name), 0o644); err != nil {
		return err
	}
	if _, err := s.c.Volume(ctx, name); err != nil {
		return err
	}
	return s.c.Destroy(ctx, name, "")
}

// held is what the process and the pool have.
type held struct {
	goroutines, files, mounts int
	heap                      int64 // bytes
	rows                      int   // of the catalogue
	used, catalogue           int64 // bytes of its pages in use, and of its files
}

// held measures what is there when no client is connected and the pool is cleaned up.
func (s *served) held() held {
	s.t.Helper()
	s.c.Close()
	op, err := s.c.GC(context.Background())
	done[map[string]any](s, op, err)
	s.c.Close()
	time.Sleep(200 * time.Millisecond) // the server notices that they are closed

	var m runtime.MemStats
	for range 3 {
		runtime.GC()
	}
	runtime.ReadMemStats(&m)
	files, err := os.ReadDir("/proc/self/fd")
	must(s.t, err)
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	must(s.t, err)
	h := held{goroutines: runtime.NumGoroutine(), files: len(files), heap: int64(m.HeapAlloc),
		mounts: strings.Count(string(mounts), "\n")}
	s.measureCatalogue(&h)
	return h
}

func (s *served) measureCatalogue(h *held) {
	s.t.Helper()
	path := filepath.Join(s.e.Dir(), "catalog.db")
	for _, suffix := range []string{"", "-wal"} {
		info, err := os.Stat(path + suffix)
		must(s.t, err)
		h.catalogue += info.Size()
	}

	db, err := sql.Open("sqlite", "file:"+path+"?mode=ro")
	must(s.t, err)
	defer db.Close()
	must(s.t, db.QueryRow(`SELECT (SELECT count(*) FROM objects) + (SELECT count(*) FROM attachments) +
		(SELECT count(*) FROM tombstones) + (SELECT count(*) FROM marks) + (SELECT count(*) FROM unsealed),
		(SELECT (page_count - freelist_count) * page_size
		 FROM pragma_page_count, pragma_freelist_count, pragma_page_size)`).Scan(&h.rows, &h.used))
}

// highWater is how much larger the files of a catalogue may be than what they hold: pages that are free again, and the
// log, which is cut off at this length.
const highWater = 5 << 20

// checkHeld checks that nothing has grown between two measurements. A few connections come and go by themselves.
func (s *served) checkHeld(before, after held) {
	s.t.Helper()
	s.t.Logf("before: %+v", before)
	s.t.Logf("after:  %+v", after)
	if after.goroutines > before.goroutines || after.files > before.files+2 || after.mounts > before.mounts {
		s.t.Errorf("left behind: %+v, then %+v", before, after)
	}
	if after.heap > before.heap+4<<20 {
		s.t.Errorf("the heap has grown from %d to %d bytes", before.heap, after.heap)
	}
	if after.rows > before.rows || after.used > before.used+64<<10 || after.catalogue > after.used+highWater {
		s.t.Errorf("the catalogue has grown: %+v, then %+v", before, after)
	}

	op, err := s.c.Fsck(context.Background(), nil, false)
	if r := done[map[string]any](s, op, err); r["ok"] != true {
		s.t.Errorf("fsck: %v", r)
	}
}
