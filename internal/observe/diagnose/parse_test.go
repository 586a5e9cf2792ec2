package diagnose

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

func TestParseGroups(t *testing.T) {
	got := parseGroups("9:name=systemd:/\n7:blkio:/b\n4:memory,hugetlb:/m:with:colons\n0::/u\nnonsense\n")
	if want := (cgroups{unified: "/u", blkio: "/b", memory: "/m:with:colons"}); got != want {
		t.Errorf("%+v", got)
	}
	for _, c := range []struct {
		in   cgroups
		want string
	}{{cgroups{"/", "/b", "/m"}, "/b"}, {cgroups{"/u", "/b", ""}, "/u"}, {cgroups{}, "/"}, {cgroups{"/", "/", "/m"},
		"/m"}} {
		if got := c.in.name(); got != c.want {
			t.Errorf("%+v: %s", c.in, got)
		}
	}
}

func TestParseGroupFiles(t *testing.T) {
	io := parseIOStat("254:0 rbytes=1 wbytes=4096 rios=3 wios=4 dbytes=0 dios=0\n7:1 \n\n8:0 wbytes=x wios=5\n")
	if len(io) != 2 || io["254:0"] != (groupIO{4096, 4}) || io["8:0"] != (groupIO{0, 5}) {
		t.Errorf("%+v", io)
	}
	if b := parseBlkio("254:0 Read 1\n254:0 Write 2\n254:0 Total 3\nTotal 3\n"); len(b) != 1 || b["254:0"] != 2 {
		t.Errorf("%+v", b)
	}
	limits := parseIOMax("/g",
		"254:0 rbps=max wbps=1048576 riops=max wiops=100\n7:0 rbps=5 wbps=max riops=max wiops=max\n\n")
	want := []limit{{"/g", "254:0", "bytes", 1 << 20, "io.max"}, {"/g", "254:0", "requests", 100, "io.max"}}
	if !slices.Equal(limits, want) {
		t.Errorf("%+v", limits)
	}
}

func TestParseZFS(t *testing.T) {
	const text = `12 0 0x01 2 256 3570000 99999
txg  birth  state ndirty    nread    nwritten  reads  writes   otime       qtime     wtime     stime
4    72104  C     1048576   512      4096      2      5        5000000000  1200      3000      2000000000
5    75104  O     0         0        0         0      0        0           0         0         0
`
	got := parseTxgs(text)
	if len(got) != 1 || got[0] != (txg{txg: 4, dirty: 1 << 20, open: 5e9, quiesce: 1200, wait: 3000, sync: 2e9}) {
		t.Errorf("%+v", got)
	}
	for _, c := range []struct{ scan, code string }{
		{"scrub in progress since Sun Nov 22 05:00:00 2026", "scrub"},
		{"resilver in progress since Sun Nov 22 05:00:00 2026", "rebuild"},
		{"scrub repaired 0B in 00:00:01 with 0 errors on Sun Nov 22 05:00:00 2026", ""},
		{"none requested", ""},
	} {
		o := parseScan("  pool: tank\n state: ONLINE\n  scan: "+c.scan+"\n\t1.00G scanned\nconfig:\n", "tank")
		if o == nil && c.code != "" || o != nil && (o.code != c.code || o.detail != c.scan) {
			t.Errorf("%s: %+v", c.scan, o)
		}
	}
	if o := parseScan("  pool: tank\n", "tank"); o != nil {
		t.Errorf("%+v", o)
	}
}

// TestHistogram: against the values themselves.
func TestHistogram(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	var h histogram
	var all []uint64
	for range 20000 {
		v := uint64(math.Exp(r.Float64() * 25)) // 1 ns to a minute
		h.add(v)
		all = append(all, v)
	}
	slices.Sort(all)
	for _, q := range []float64{0, 0.1, 0.5, 0.9, 0.99, 0.999} {
		want := float64(all[int(q*float64(len(all)))]) / 1e9
		if got := h.quantile(q); math.Abs(got-want) > 0.035*want+1e-9 {
			t.Errorf("quantile %v: %v, want %v", q, got, want)
		}
	}
	if h.most != all[len(all)-1] || h.quantile(1) != float64(h.most)/1e9 || len(h.counts) > 64*subBuckets {
		t.Errorf("most %d, %d buckets", h.most, len(h.counts))
	}
	h.add(math.MaxUint64)
	if (&histogram{}).quantile(0.5) != 0 || (&histogram{}).mean() != 0 {
		t.Error("an empty one is not 0")
	}
}

// TestFlight plays two layers: a loop device above a disk that has others' requests, too.
func TestFlight(t *testing.T) {
	loop, disk := &device{name: "loop", depth: 1}, &device{name: "disk", depth: 3}
	f := newFlight([]*device{loop, disk})
	f.reset(1000)
	at := func(ns uint64) { f.advance(1000 + ns) }

	at(100) // 100: nothing
	loop.queue(request{count: 8, sector: 8}, "WS")
	at(110) // 10: at the loop
	disk.queue(request{count: 8, sector: 80, kernel: true, others: 0.5}, "WS")
	at(130) // 20: at the disk, alone
	disk.queue(request{count: 8, sector: 800, others: 1}, "W")
	at(170) // 40: at the disk, with another's
	disk.complete(80, 8)
	at(175) // 5: what is at the disk now is not waited for
	loop.complete(8, 16)
	at(200) // 25: the other's alone
	loop.queue(request{}, "FWS")
	disk.queue(request{at: 1200, kernel: true}, "FWS")
	at(230) // 30: a flush at both, with the other's
	disk.complete(0, 0)
	loop.complete(0, 0)
	at(300) // 70
	disk.complete(792, 16)
	if len(disk.inFlight)+len(loop.inFlight)+disk.flushes+disk.kernels != 0 || disk.othersLoad != 0 {
		t.Errorf("left: %+v %+v", disk, loop)
	}
	for _, c := range []struct {
		what  string
		place int
		want  float64
	}{
		{"nowhere", placeNowhere, 100 + 25 + 70},
		{"at the loop at most", placeDepths + 1, 10 + 5},
		{"at the disk", placeDepths + 3, 20 + 40 + 30},
		{"loop busy", f.of(0, sumBusy), 75 + 30},
		{"loop flushes", f.of(0, sumFlush), 30},
		{"disk flushes", f.of(1, sumFlush), 30},
		// Alone it is its own; of two, one is.
		{"disk for others", f.of(1, sumOthers), 0 + 20 + 15},
	} {
		if got := f.sums[c.place]; got != c.want {
			t.Errorf("%s: %v, want %v", c.what, got, c.want)
		}
	}

	// What ended unseen is forgotten when the kernel says that nothing is in flight.
	disk.queue(request{at: 1310, count: 8, sector: 1}, "D")
	disk.idle = 1320
	at(400)
	if len(disk.inFlight) != 0 || disk.discards != 0 {
		t.Errorf("left: %+v", disk)
	}
	for i := range 2 * maxInFlight {
		disk.queue(request{at: uint64(i), count: 8, sector: uint64(i) * 8}, "W")
	}
	if len(disk.inFlight) > maxInFlight {
		t.Errorf("%d remembered", len(disk.inFlight))
	}
}

func TestCommitTimes(t *testing.T) {
	var c commitTimes
	c.end(1, 5) // began before
	c.start(2, 10)
	c.start(3, 12)
	c.end(2, 30)
	c.end(3, 20)
	if c.n != 2 || c.sum != 28 || c.most != 20 {
		t.Errorf("%+v", c)
	}
	for i := range int64(1000) {
		c.start(i, 1)
	}
	if len(c.began) > 128 {
		t.Errorf("%d remembered", len(c.began))
	}
}
