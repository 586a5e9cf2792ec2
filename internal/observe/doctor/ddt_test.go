package doctor

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"pando/internal/testing/testfs"
)

func testdata(t testing.TB, name string) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// The files 2.3-* are what OpenZFS 2.3.2 printed.
func TestDDTOfJSON(t *testing.T) {
	for _, name := range []string{"2.3-fast.json", "2.3-fast-strings.json"} { // with and without --json-int
		d, err := parseDDTJSON(testdata(t, name), "fast")
		if err != nil {
			t.Fatal(name, err)
		}
		if d.Entries != 2204 || d.OnDisk != exactly(586752) || d.InCore != exactly(317376) || d.Blocks != exactly(2203) ||
			d.Allocated != exactly(35855872) || d.Referenced != exactly(97326592) ||
			d.Once().Blocks != exactly(313) || d.Once().Allocated != exactly(5120512) ||
			d.Saved() != exactly(92206080-30735360) {
			t.Errorf("%s: %+v", name, d)
		}
	}
	// While blocks are freed, they are in the table and in its log.
	d, err := parseDDTJSON(testdata(t, "2.3-shrinking.json"), "fast")
	if err != nil || d.Entries != 3780 || d.Blocks != exactly(1890) || d.Once().Blocks != exactly(0) {
		t.Errorf("shrinking: %+v, %v", d, err)
	}
	// When all are freed, the table is there until the log is written back.
	d, err = parseDDTJSON(testdata(t, "2.3-freed.json"), "fast")
	if err != nil || d.Entries != 3780 || d.Blocks != exactly(0) || d.Saved() != exactly(0) {
		t.Errorf("freed: %+v, %v", d, err)
	}
	d, err = parseDDTJSON(testdata(t, "2.3-none.json"), "plain")
	if err != nil || d.Entries != 0 {
		t.Errorf("none: %+v, %v", d, err)
	}
}

func TestDDTOfJSONThatIsNotUnderstood(t *testing.T) {
	good := string(testdata(t, "2.3-fast.json"))
	for what, bad := range map[string]string{
		"empty":             "",
		"no JSON":           "pool: fast",
		"another pool":      strings.Replace(good, `"fast":{"name"`, `"slow":{"name"`, 1),
		"no count":          strings.Replace(good, `"obj_count"`, `"count"`, 1),
		"no size":           strings.Replace(good, `"dspace"`, `"space"`, 1),
		"a size of letters": strings.Replace(good, `"dspace":586752`, `"dspace":"573K"`, 1),
		"a negative size":   strings.Replace(good, `"dspace":586752`, `"dspace":-1`, 1),
		"no stats":          strings.Replace(good, `"ddt_stats"`, `"stats"`, 1),
		"a bucket's name":   strings.Replace(good, `"1":{`, `"two":{`, 1),
		"a bucket too high": strings.Replace(good, `"1":{`, `"63":{`, 1),
		"no ref_dsize":      strings.Replace(good, `"ref_dsize":92206080`, `"ref":92206080`, 1),
		"less than nothing": strings.Replace(good, `"ref_dsize":92206080`, `"ref_dsize":30735359`, 1),
	} {
		if bad == good {
			t.Fatalf("%s changes nothing", what)
		}
		if d, err := parseDDTJSON([]byte(bad), "fast"); err == nil {
			t.Errorf("%s: %+v", what, d)
		}
	}
}

// The text is what OpenZFS 2.1.11 printed, of a tree of 30 files of 1,024,000 bytes,
// its two copies, and a file of 1,126,400 bytes, in blocks of 16 KiB.
func TestDDTOfText(t *testing.T) {
	d, err := parseDDTText(string(testdata(t, "2.1.txt")))
	if err != nil {
		t.Fatal(err)
	}
	for what, is := range map[string]struct {
		Range
		want int64
	}{
		"on disk":    {d.OnDisk, 255*1959 + 1000}, // 255.5 bytes each, or so
		"in core":    {d.InCore, 140*1959 + 1000},
		"blocks":     {d.Blocks, 69 + 1890},
		"once":       {d.Once().Blocks, 69},
		"more often": {d.Buckets[1].Blocks, 1890},
		"allocated":  {d.Allocated, (69 + 1890) * 16 << 10},
		"referenced": {d.Referenced, (69 + 3*1890) * 16 << 10},
		"saved":      {d.Saved(), 2 * 1890 * 16 << 10},
	} {
		if is.Low > is.want || is.want > is.High || is.High-is.Low > is.want/50 {
			t.Errorf("%s: %+v, is %d", what, is.Range, is.want)
		}
	}
	if d.Entries != 1959 || len(d.Buckets) != 2 {
		t.Errorf("%+v", d)
	}
	d, err = parseDDTText(string(testdata(t, "2.3-none.txt")))
	if err != nil || d.Entries != 0 {
		t.Errorf("none: %+v, %v", d, err)
	}
}

func TestDDTOfTextThatIsNotUnderstood(t *testing.T) {
	good := string(testdata(t, "2.1.txt"))
	for what, change := range map[string][2]string{
		"no such line":     {" dedup: ", " dedupe: "},
		"other words":      {"in core", "in memory"},
		"more words":       {"in core", "in core, 1K cached (0.10%)"},
		"no size":          {"255B", "-"},
		"no entries":       {"entries 1959", "entries 0"},
		"another column":   {"blocks   LSIZE", "blocks   USIZE"},
		"a column less":    {"   PSIZE   DSIZE   blocks", "   DSIZE   blocks"},
		"a value less":     {"1.08M   1.08M   1.08M       69", "1.08M   1.08M       69"},
		"a value of words": {"1.85K", "many"},
		"an odd bucket":    {"     2    1.85K", "     3    1.85K"},
		"another total":    {" Total    1.91K", " Total    2.91K"},
		"no total":         {" Total", "   all"},
		"no head":          {"bucket  ", "basket  "},
	} {
		bad := strings.Replace(good, change[0], change[1], 1)
		if bad == good {
			t.Fatalf("%s changes nothing", what)
		}
		if d, err := parseDDTText(bad); err == nil {
			t.Errorf("%s: %+v", what, d)
		}
	}
	for i := range good {
		if d, err := parseDDTText(good[:i]); err == nil &&
			!strings.Contains(good[:i], " Total    1.91K   30.6M   30.6M   30.6M    5.60K   89.7M   89.7M   8") {
			t.Fatalf("cut after %d: %+v", i, d)
		}
	}
}

func TestNiceNumbers(t *testing.T) {
	const k, m = 1 << 10, 1 << 20
	for s, want := range map[string]Range{
		"0": {0, 0}, "512B": {512, 512}, "999": {999, 999}, "1023": {1023, 1023},
		"1K": {k, k}, "40M": {40 * m, 40 * m},
		"1.85K": {1890, 1899}, // 1.845 K to 1.855 K
		"29.3M": {30670848, 30775705},
		"400M":  {399*m + m/2, 400*m + m/2}, // may have been 399.7 M
		"1000K": {999*k + k/2, 1000*k + k/2},
	} {
		got, err := parseNice(s)
		if err != nil || got != want {
			t.Errorf("%s: %v, not %v; %v", s, got, want, err)
		}
	}
	for _, s := range []string{"", "-", "K", "1.5", "1.234K", "12345", "1,5K", "-1K", "1KB", "1k", "0x10", "NaN", "Inf",
		"1e3", " 1K", "4E"} {
		if got, err := parseNice(s); err == nil {
			t.Errorf("%q: %v", s, got)
		}
	}
}

func FuzzDDTText(f *testing.F) {
	for _, name := range []string{"2.1.txt", "2.3-legacy.txt", "2.3-none.txt"} {
		f.Add(string(testdata(f, name)))
	}
	f.Fuzz(func(t *testing.T, s string) {
		d, err := parseDDTText(s)
		if err == nil {
			checkDDT(t, d)
		}
	})
}

func FuzzDDTJSON(f *testing.F) {
	for _, name := range []string{"2.3-fast.json", "2.3-fast-strings.json", "2.3-freed.json", "2.3-none.json",
		"2.3-shrinking.json"} {
		f.Add(testdata(f, name))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		d, err := parseDDTJSON(b, "fast")
		if err == nil {
			checkDDT(t, d)
		}
	})
}

// checkDDT: what is accepted, whatever it came from, makes sense, and a report.
func checkDDT(t *testing.T, d *DDT) {
	t.Helper()
	for _, r := range []Range{d.OnDisk, d.InCore, d.Blocks, d.Allocated, d.Referenced, d.Saved(), d.Once().Blocks} {
		if r.Low < 0 || r.High < r.Low {
			t.Errorf("a range %+v of %+v", r, d)
		}
	}
	f := &Facts{Pool: "fast", DDT: d, Datasets: []Dataset{{Name: "fast", Type: "filesystem", Dedup: "on", From: "local"}}}
	if r := f.report(); r.Summary == "" || len(r.Findings) == 0 {
		t.Errorf("an empty report of %+v", d)
	}
}

// TestDDTWithoutPoolSize: the check dedup of all pools reads the table only, not how much its pool has allocated.
func TestDDTWithoutPoolSize(t *testing.T) {
	here, err := filepath.Abs("testdata/2.3-fast.json")
	if err != nil {
		t.Fatal(err)
	}

	dir := t.TempDir()
	script := "#!/bin/sh\nexec cat " + here + "\n"
	if err := testfs.WriteProgram(filepath.Join(dir, "zpool"), []byte(script)); err != nil {
		t.Fatal(err)
	}

	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	f := Facts{Pool: "fast"}
	if err := f.readDDT(t.Context()); err != nil || f.DDT == nil || f.DDT.OnDisk.Low == 0 {
		t.Errorf("%v, %q, %+v", err, f.DDTUnknown, f.DDT)
	}
	f.AllocatedBytes = 1
	if err := f.readDDT(t.Context()); err != nil || f.DDT != nil || f.DDTUnknown == "" {
		t.Errorf("a table that is larger than its pool: %v, %q, %+v", err, f.DDTUnknown, f.DDT)
	}
}
