package doctor

import (
	"encoding/json"
	"errors"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestFiguresInJSON(t *testing.T) {
	for want, f := range map[string]Figure{
		`{"label":"b","name":"a","unit":"bytes","value":5}`:                     figure("a", "b", Bytes, 5),
		`{"high":7,"label":"b","low":5,"name":"a","unit":"count"}`:              ranged("a", "b", Count, Range{5, 7}),
		`{"label":"b","name":"a","note":"why","unit":"bytes","value":null}`:     unknown("a", "b", Bytes, "why"),
		`{"label":"b","name":"a","note":"more","unit":"text","value":"a word"}`: words("a", "b", "a word").noted("more"),
	} {
		b, err := json.Marshal(f)
		if err != nil || string(b) != want {
			t.Errorf("%s, not %s; %v", b, want, err)
		}
		var back Figure
		if err := json.Unmarshal(b, &back); err != nil || back != f {
			t.Errorf("%s is read as %+v, not %+v; %v", b, back, f, err)
		}
	}
}

func TestRanges(t *testing.T) {
	if r := (Range{5, 7}).minus(Range{6, 6}); r != (Range{0, 1}) {
		t.Error(r)
	}
	if !(Range{5, 7}).overlaps(Range{7, 9}) || (Range{5, 7}).overlaps(Range{8, 9}) {
		t.Error("overlaps")
	}
}

// Values of a table of Wilson's interval.
func TestWilson(t *testing.T) {
	for _, c := range []struct{ k, n, low, high float64 }{
		{0, 0, 0, 1}, {10, 10, 0.722, 1}, {0, 10, 0, 0.278}, {50, 100, 0.404, 0.596}, {128, 128, 0.971, 1},
	} {
		low, high := wilson(c.k, c.n)
		if math.Abs(low-c.low) > 0.001 || math.Abs(high-c.high) > 0.001 {
			t.Errorf("%v of %v: %.4f to %.4f, not %v to %v", c.k, c.n, low, high, c.low, c.high)
		}
	}
}

// Bounds: what has no entry in the table may all belong to the copies, and copies
// cannot be more of the saving than all.
func TestExplained(t *testing.T) {
	for what, c := range map[string]struct {
		copies          Copies
		saved, unshared Range
		want            Range
	}{
		"nothing found": {Copies{}, exactly(100), exactly(0), exactly(0)},
		"not read":      {Copies{CopiedBytes: 50}, exactly(100), exactly(0), Range{0, 50}},
		"read, few": {Copies{CopiedBytes: 1000, Sampled: 10, SampledEqual: 10}, exactly(2000), exactly(0),
			Range{722, 1000}},
		"some differ": {Copies{CopiedBytes: 1000, Sampled: 100, SampledEqual: 50}, exactly(2000), exactly(0),
			Range{403, 596}},
		"not all in the table": {Copies{CopiedBytes: 1000, Sampled: 10, SampledEqual: 10}, exactly(2000), exactly(700),
			Range{22, 1000}},
		"less in the table": {Copies{CopiedBytes: 1000, Sampled: 10, SampledEqual: 10}, exactly(2000), exactly(5000),
			Range{0, 1000}},
		"more than is saved": {Copies{CopiedBytes: 1000, Sampled: 10, SampledEqual: 10}, Range{90, 110}, exactly(0),
			Range{90, 110}},
		"inside volumes": {Copies{InsideBytes: 1000, Sampled: 10, SampledEqual: 10}, exactly(2000), exactly(0),
			Range{0, 1000}},
		"volumes": {Copies{Volumes: []VolumeGroup{{Explained: Range{200, 300}}}}, exactly(2000), exactly(50),
			Range{150, 300}},
	} {
		if got := c.copies.explain(c.saved, c.unshared); got != c.want {
			t.Errorf("%s: %+v, not %+v", what, got, c.want)
		}
	}
}

func TestDatasets(t *testing.T) {
	rows := func(s string) (out [][]string) {
		for l := range strings.Lines(s) {
			out = append(out, strings.Split(strings.TrimSpace(l), "|"))
		}
		return out
	}
	got, err := parseDatasets(rows(`t|type|filesystem|-
		t|dedup|on|local
		t|referenced|100|-
		t|logicalreferenced|200|-
		t|usedbydataset|100|-
		t|usedbysnapshots|11|-
		t|origin|-|-
		t|volsize|-|-
		t|volblocksize|-|-
		t/a b|type|volume|-
		t/a b|dedup|sha256,verify|inherited from t
		t/a b|origin|t/x@s|-
		t/a b|volsize|1048576|local
		t/a b|volblocksize|16384|-`))
	want := []Dataset{
		{Name: "t", Type: "filesystem", Dedup: "on", From: "local", ReferencedBytes: 100, LogicalBytes: 200,
			writtenBytes: 111},
		{Name: "t/a b", Type: "volume", Dedup: "sha256,verify", From: "t", Origin: "t/x@s", volumeBytes: 1 << 20,
			blockBytes: 16384},
	}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("%+v, %v", got, err)
	}
	for _, bad := range []string{"t|type|filesystem|-", "t|type|filesystem|-\nt|dedup|on|local\nt|referenced|1K|-"} {
		if got, err := parseDatasets(rows(bad)); err == nil {
			t.Errorf("%q: %+v", bad, got)
		}
	}
}

// What `zpool list -HvP` of 2.3.2 printed, but for the names of disks.
func TestMedia(t *testing.T) {
	const tail = "\t1063256064\t0\t1006632960\t-\t-\t0\t0\t-\tONLINE\n"
	turns := func(disk string) (bool, error) {
		if strings.Contains(disk, "file") {
			return false, errors.New("no disk")
		}
		return strings.Contains(disk, "turning"), nil
	}
	m := parseMedia("special\t2013265920\t114688\t2013151232\t-\t-\t0\t0\t1.00\tONLINE\t-\n\tmirror-0"+tail+
		"\t/dev/turning1"+tail+"\t/dev/solid1"+tail+"\t/a/file"+tail, turns)
	if m.Rotating != 1 || m.Solid != 1 || m.Unknown != 1 || len(m.Helpers) != 0 {
		t.Errorf("%+v", m)
	}
	m = parseMedia("t\t2013265920\n\t/dev/turning1"+tail+
		"special             -      -      -        -         -      -      -      -         -\n\t/dev/solid1"+tail+
		"logs             -      -      -        -         -      -      -      -         -\n\t/dev/solid2"+tail, turns)
	if m.Rotating != 1 || m.Solid != 0 || !slices.Equal(m.Helpers, []string{"special"}) {
		t.Errorf("%+v", m)
	}
}

func TestTables(t *testing.T) {
	file := filepath.Join(t.TempDir(), "table")
	if err := os.WriteFile(file,
		[]byte("MemTotal:       2021696 kB\nc                               4    239151104\nc_max                         "+
			"  4    1293885440\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		column int
		want   int64
	}{"MemTotal:": {1, 2021696}, "c_max": {2, 1293885440}, "c_min": {2, 0}} {
		if got := readTable(file, name, c.column); got != c.want {
			t.Errorf("%s: %d", name, got)
		}
	}
}

func TestGoldenNames(t *testing.T) {
	for path, want := range map[string]string{
		"/tank/golden": "golden", "/tank/a b": "ab", "/tank/.hidden": "hidden", "/tank/ü": "golden", "/": "golden",
		"/tank/v1.2-": "v1.2", "/t/a..b": "golden", "/t/" + strings.Repeat("x", 200): "golden",
	} {
		if got := goldenName(path); got != want {
			t.Errorf("%s: %q, not %q", path, got, want)
		}
	}
	f := &Facts{Copies: &Copies{Trees: []TreeCopies{{Original: "/a/g"}, {Original: "/b/g"}, {Original: "/c/g"}}}}
	if _, names := f.goldens(); !slices.Equal(names, []string{"g", "g-2", "g-3"}) {
		t.Error(names)
	}
	for s, want := range map[string]string{"/tank/g": "/tank/g", "/tank/a b": "'/tank/a b'", "/t/it's": `'/t/it'\''s'`,
		"/t/$x": "'/t/$x'"} {
		if got := word(s); got != want {
			t.Errorf("%s: %s", s, got)
		}
	}
}

// codes are those of the findings, with "!" before those of warnings.
func codes(f *Facts) (out []string) {
	for _, x := range f.report().Findings {
		mark := ""
		if x.Severity == Warning {
			mark = "!"
		}
		out = append(out, mark+strings.TrimPrefix(x.Code, "zfs-"))
	}
	return out
}

// table makes a dedup table of entries that are referenced once and twice.
func tableOf(t *testing.T, once, twice int64) *DDT {
	t.Helper()
	const block = 16 << 10
	d := &DDT{Entries: once + twice, OnDisk: exactly(300 * (once + twice)), InCore: exactly(200 * (once + twice)),
		Buckets: []Bucket{
			{Refs: 1, Blocks: exactly(once), Allocated: exactly(once * block), Referenced: exactly(once * block)},
			{Refs: 2, Blocks: exactly(twice), Allocated: exactly(twice * block), Referenced: exactly(2 * twice * block)},
		}}
	if err := d.sum(); err != nil {
		t.Fatal(err)
	}
	return d
}

func TestFindings(t *testing.T) {
	on := []Dataset{{Name: "t", Type: "filesystem", Dedup: "on", From: "local"},
		{Name: "t/a", Type: "filesystem", Dedup: "on", From: "t"}}
	with := func(change func(*Facts)) *Facts {
		f := &Facts{Pool: "t", Datasets: on, DDT: tableOf(t, 10, 1000), MemoryBytes: 64 << 30, ARCMaxBytes: 32 << 30,
			FreeBytes: 1 << 40,
			Cloning: Cloning{Known: true, Feature: "active",
				Enabled: "1"}, Media: Media{Solid: 1}, Features: map[string]string{}}
		change(f)
		return f
	}
	base := []string{"dedup-datasets", "ddt-memory", "ddt-once", "dedup-saved", "block-cloning", "dedup-migrate"}
	replaced := func(old string, by ...string) []string {
		i := slices.Index(base, old)
		return slices.Replace(slices.Clone(base), i, i+1, by...)
	}
	for what, c := range map[string]struct {
		facts *Facts
		want  []string
	}{
		"as it is": {with(func(*Facts) {}), base},
		"no dedup": {with(func(f *Facts) { f.Datasets, f.DDT = nil, &DDT{} }), nil},
		"clones only": {with(func(f *Facts) {
			f.Datasets, f.DDT, f.Cloning.SavedBytes = nil, &DDT{}, 5
		}), []string{"block-cloning"}},
		"not used yet": {with(func(f *Facts) {
			f.DDT = &DDT{}
		}), []string{"dedup-datasets", "block-cloning", "dedup-migrate"}},
		"off, still there": {with(func(f *Facts) { f.Datasets = nil }), base[1:]},
		"unknown": {with(func(f *Facts) {
			f.DDT, f.DDTUnknown = nil, "why"
		}), []string{"!ddt-unknown", "dedup-datasets", "block-cloning"}},
		"larger than ARC": {with(func(f *Facts) { f.ARCMaxBytes = 1 << 10 }), replaced("ddt-memory", "!ddt-memory")},
		"a third of ARC":  {with(func(f *Facts) { f.ARCMaxBytes = 606_000 }), replaced("ddt-memory", "!ddt-memory")},
		"mostly once":     {with(func(f *Facts) { f.DDT = tableOf(t, 1000, 10) }), replaced("ddt-once", "!ddt-once")},
		"only once": {with(func(f *Facts) {
			f.DDT = tableOf(t, 1000, 0)
		}), []string{"dedup-datasets", "ddt-memory", "!ddt-once", "!dedup-saved", "block-cloning", "dedup-migrate"}},
		"quota": {with(func(f *Facts) {
			f.Quota = "300000"
		}), replaced("block-cloning", "!ddt-quota", "block-cloning")},
		"quota far":  {with(func(f *Facts) { f.Quota = "3000000" }), base},
		"quota auto": {with(func(f *Facts) { f.Quota = "auto" }), base},
		"slow disks": {with(func(f *Facts) {
			f.Media.Rotating = 2
		}), replaced("block-cloning", "!ddt-media", "block-cloning")},
		"special vdev": {with(func(f *Facts) { f.Media = Media{Rotating: 2, Helpers: []string{"special"}} }), base},
		"send expands": {with(func(f *Facts) {
			f.Cloning.SavedBytes = 2 << 40
		}), replaced("block-cloning", "!block-cloning")},
		"copies, no room": {with(func(f *Facts) {
			f.FreeBytes = 1000
			f.Copies = &Copies{Explained: exactly(0),
				Trees: []TreeCopies{{Original: "/g", Copies: []TreeCopy{{CopiedBytes: 2000}, {CopiedBytes: 1500}}}}}
		}), []string{"dedup-datasets", "ddt-memory", "ddt-once", "dedup-saved", "dedup-copies", "block-cloning",
			"!dedup-migrate"}},
		"copies, much": {with(func(f *Facts) {
			f.Copies = &Copies{Explained: exactly(900 * 16 << 10)}
		}), replaced("dedup-saved", "dedup-saved", "!dedup-copies")},
	} {
		if got := codes(c.facts); !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, not %v", what, got, c.want)
		}
	}
}

// The order matters: clones come before dedup goes off, and that before copies go.
func TestStepsOfMigration(t *testing.T) {
	f := &Facts{Pool: "tank", DDT: tableOf(t, 10, 1000), Features: map[string]string{"fast_dedup": "active"},
		Datasets: []Dataset{{Name: "tank/a b", Dedup: "on", From: "local"},
			{Name: "tank/a b/c", Dedup: "on", From: "tank/a b"}, {Name: "tank/v", Dedup: "verify", From: "received"}},
		Copies: &Copies{Trees: []TreeCopies{{Original: "/srv/the golden", Copies: []TreeCopy{{CopiedBytes: 5}}}}}}
	var r Report
	f.findMigration(&r)
	var commands []string
	for _, s := range r.Findings[0].Do {
		commands = append(commands, s.Commands...)
	}
	want := []string{
		"pando init --driver zfs --zfs-dataset tank/pando",
		"pando golden import thegolden '/srv/the golden' --adopt",
		"pando clone thegolden JOB --mount",
		"zfs set dedup=off 'tank/a b'", "zfs set dedup=off tank/v",
		"zpool prefetch -t ddt tank", "rm -r --one-file-system COPY", "zpool wait -t free tank", "zpool sync tank",
		"zpool status -D tank", "zpool ddtprune -p 100 tank",
	}
	if !slices.Equal(commands, want) {
		t.Errorf("%q", commands)
	}
	f.Features = map[string]string{} // before 2.3
	f.findMigration(&r)
	for _, s := range r.Findings[1].Do {
		for _, c := range s.Commands {
			if strings.Contains(c, "prefetch") || strings.Contains(c, "prune") {
				t.Errorf("before 2.3 there is no %s", c)
			}
		}
	}
}
