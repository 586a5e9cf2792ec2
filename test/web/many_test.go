package web

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// manyVolumes is how many volumes a pool may have: as many as the aspen has stems.
const manyVolumes = 47000

// limits of a page of a pool with manyVolumes.
const (
	firstPaint  = time.Second
	updateAfter = time.Second
	tabBytes    = 200 << 20
)

// withRows adds volumes to the catalogue that are as one that exists. They have no data: nothing here looks for it.
func (s *site) withRows(n int) {
	s.t.Helper()
	s.pando("golden", "import", "web", s.source("web", 1<<20), "-q")
	s.pando("clone", "web", "seed", "-q")
	db := filepath.Join(s.pool, "catalog.db")
	columns, err := exec.Command("sqlite3", db, `SELECT group_concat(name) FROM pragma_table_info('objects')
		WHERE name NOT IN ('id', 'name', 'exclusive', 'request')`).Output()
	must(s.t, err)
	rest := strings.TrimSpace(string(columns))
	query := fmt.Sprintf(`WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < %d)
		INSERT INTO objects (id, name, exclusive, request, %s)
		SELECT substr(id, 1, 20) || printf('%%06d', i), printf('job-%%05d', i), (i * 7919) %% 1000003, '', %s
		FROM objects, n WHERE name = 'seed';`, n, rest, rest)
	if out, err := exec.Command("sqlite3", db, query).CombinedOutput(); err != nil {
		s.t.Fatalf("%v: %s", err, out)
	}
}

// TestMany opens the views of a pool with 47,000 volumes.
func TestMany(t *testing.T) {
	s := newPool(t)
	s.withRows(manyVolumes)
	t.Cleanup(func() { // what they would have is not there to be destroyed
		out, err := exec.Command("sqlite3", filepath.Join(s.pool, "catalog.db"),
			"DELETE FROM objects WHERE name GLOB 'job-*'").CombinedOutput()
		if err != nil {
			t.Errorf("%v: %s", err, out)
		}
	})
	s.serve()
	b := restartedBrowser(t) // the memory of a tab is not that of all pages that it showed before
	origin := s.signIn(b)

	// What the browser takes on this machine, now, for a page that reads no volumes.
	base := s.paint(b, origin+"/operations")
	limit := max(firstPaint, 8*base) // on a machine that does nothing else, base is 0.1 s
	for _, path := range []string{"/", "/volumes", "/volumes?name=469&state=idle", "/lineage?open=web,web%401"} {
		t.Run("paint"+path, func(t *testing.T) {
			b.t = t
			took := s.paint(b, origin+path)
			t.Logf("first paint after %v, of a page without volumes after %v", took, base)
			if took > limit {
				t.Errorf("the first paint took %v, more than %v", took, limit)
			}
		})
	}

	t.Run("paging", func(t *testing.T) {
		b.t = t
		b.open(origin + "/volumes")
		b.says("47,001 volumes")
		for page := 1; page <= 5; page++ {
			first := fmt.Sprintf("job-%05d", page*100+1)
			b.keys("n")
			b.until(fmt.Sprintf(`document.querySelector('#rows td.name')?.innerText === %q`, first))
			b.until(`document.querySelectorAll('#rows tr').length === 100`)
		}
	})

	t.Run("update", func(t *testing.T) {
		b.t = t
		b.open(origin + "/volumes?after=job-46950")
		b.until(`document.querySelector('pando-live').dataset.state === 'on'`)
		best := time.Hour
		for i := range 4 {
			var err error
			if i%2 == 0 {
				_, err = s.c.Pin(t.Context(), "seed", 0)
			} else {
				_, err = s.c.Unpin(t.Context(), "seed")
			}
			must(t, err)
			best = min(best, b.until(fmt.Sprintf(`'pinned' in document.querySelector('input[value=seed]').closest('tr').dataset
				=== %v`, i%2 == 0)))
		}
		t.Logf("an update was visible after %v", best.Round(time.Millisecond))
		if best > max(updateAfter, 8*base) {
			t.Errorf("an update was visible after %v, a page after %v", best, base)
		}
	})

	t.Run("memory", func(t *testing.T) {
		b.t = t
		for _, rows := range []int{500, 100} { // the most, and the default
			b.open(fmt.Sprintf("%s/volumes?limit=%d", origin, rows))
			b.until(fmt.Sprintf(`document.querySelectorAll('#rows tr').length === %d`, rows))
			var most int64
			for _, pid := range b.do("processes", true).([]any) {
				most = max(most, proportional(t, int(pid.(float64))))
			}
			t.Logf("with %d rows the tab has %d MiB", rows, most>>20)
			if most == 0 || most > tabBytes {
				t.Errorf("with %d rows the tab has %d bytes", rows, most)
			}
		}
	})
	b.t = t
	b.checkQuiet(origin)
}

// paint opens a page, and returns after what time it was first painted: the best of several, as others use the
// processors, too.
func (s *site) paint(b *browser, url string) time.Duration {
	s.t.Helper()
	best := time.Hour
	for range 4 {
		b.open(url)
		b.until(`performance.getEntriesByName('first-contentful-paint').length`)
		ms := b.eval(`performance.getEntriesByName('first-contentful-paint')[0].startTime`).(float64)
		best = min(best, time.Duration(ms)*time.Millisecond)
	}
	return best
}

// proportional returns the memory of a process, with its share of what it shares, in bytes.
func proportional(t *testing.T, pid int) (n int64) {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	must(t, err)
	for line := range strings.Lines(string(text)) {
		if rest, ok := strings.CutPrefix(line, "Pss:"); ok {
			_, err := fmt.Sscanf(rest, "%d kB", &n)
			must(t, err)
		}
	}
	return n << 10
}
