package bench

import (
	"context"
	"math"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestQuantileIsNearestRank(t *testing.T) {
	tests := []struct {
		values []int64
		q      float64
		want   int64
	}{
		{nil, 0.5, 0},
		{[]int64{7}, 0.5, 7},
		{[]int64{7}, 0.99, 7},
		{[]int64{1, 2}, 0.5, 1},
		{[]int64{1, 2, 3}, 0.5, 2},
		{[]int64{1, 2, 3, 4, 5, 6, 7, 8, 9, 10}, 0.99, 10},
		{[]int64{1, 2, 3, 4, 5, 6, 7, 8, 9, 10}, 0.9, 9},
		{[]int64{1, 2, 3}, 0, 1},
		{[]int64{1, 2, 3}, 1, 3},
	}
	for _, tt := range tests {
		if got := quantile(tt.values, tt.q); got != tt.want {
			t.Errorf("quantile(%v, %g) = %d, want %d", tt.values, tt.q, got, tt.want)
		}
	}
}

func TestSample(t *testing.T) {
	var s Sample
	for i := 100; i >= 1; i-- {
		s.Add(time.Duration(i) * time.Millisecond)
	}
	want := Dist{Count: 100, Mean: 0.0505, P50: 0.050, P99: 0.099, Max: 0.100}
	if got := s.Dist(); math.Abs(got.Mean-want.Mean) > 1e-12 || got.Count != want.Count || got.P50 != want.P50 ||
		got.P99 != want.P99 || got.Max != want.Max {
		t.Errorf("got %+v, want %+v", got, want)
	}
	var none *Sample
	if got := none.Dist(); got != (Dist{}) {
		t.Errorf("a nil sample has %+v", got)
	}
	var both Sample
	both.Join(&s)
	both.Join(nil)
	if got := both.Dist(); got.Count != 100 || got.P99 != want.P99 {
		t.Errorf("joined: %+v", got)
	}
}

// TestSampleIsBounded: memory stays bounded, the largest value is never lost,
// and percentiles stay near the truth.
func TestSampleIsBounded(t *testing.T) {
	var s Sample
	const n = 3 * maxSample
	for i := range n {
		s.Add(time.Duration(i + 1))
	}
	if len(s.ns) != maxSample {
		t.Fatalf("%d durations kept, want %d", len(s.ns), maxSample)
	}
	d := s.Dist()
	if d.Count != n || d.Max != seconds(n) {
		t.Errorf("count %d, max %g; want %d, %g", d.Count, d.Max, n, seconds(n))
	}
	if off := math.Abs(d.P50/seconds(n/2) - 1); off > 0.01 {
		t.Errorf("p50 is off by %.2g", off)
	}
}

func TestIsRun(t *testing.T) {
	for name, want := range map[string]bool{
		"bench-0a9uv3": true, "bench-": false, "bench-0a9uv": false, "bench-0a9uv3x": false, "bench-0a9uvw": false,
		"bench-0a9uv3-golden": false, "objects": false, "bench-../../": false,
	} {
		if got := isRun(name); got != want {
			t.Errorf("isRun(%q) = %v", name, got)
		}
	}
}

func TestDevicesOfNoDisk(t *testing.T) {
	if _, err := devicesBelow(t.Context(), "/proc"); err == nil {
		t.Error("/proc has a block device")
	}
	var st unix.Stat_t
	if err := unix.Stat(t.TempDir(), &st); err == nil && unix.Major(st.Dev) != 0 {
		devs, err := devicesBelow(t.Context(), t.TempDir())
		if err != nil || len(devs) == 0 || devs[0].Role != "pool" {
			t.Errorf("devices below the temporary directory: %+v, %v", devs, err)
		}
	}
}

func TestGenerate(t *testing.T) {
	sums := [2]int64{}
	for i := range sums {
		dir := t.TempDir()
		if err := generate(context.Background(), dir, 450, 0, nil); err != nil {
			t.Fatal(err)
		}
		files, bytes, err := readTree(context.Background(), dir, nil)
		if err != nil || files != 450 {
			t.Fatalf("%d files, %v", files, err)
		}
		if mean := bytes / files; mean < 5_000 || mean > 13_000 {
			t.Errorf("files have %d bytes on average", mean)
		}
		if _, err := os.Stat(filepath.Join(dir, "dir1/sub2/file9.txt")); err != nil {
			t.Error(err)
		}
		sums[i] = bytes
	}
	if sums[0] != sums[1] {
		t.Errorf("the same number of files gave %d and %d bytes", sums[0], sums[1])
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := generate(ctx, t.TempDir(), 10, 0, nil); err != context.Canceled {
		t.Errorf("cancelled: %v", err)
	}
}

// sampleOf has every percentile at ms milliseconds.
func sampleOf(ms float64) *Sample {
	s := &Sample{}
	for range 200 {
		s.Add(time.Duration(ms * 1e6))
	}
	return s
}

func at(ms float64) Dist { return sampleOf(ms).Dist() }

func goodReport() *Report {
	series := func(volumes int, clone float64) Series {
		return Series{Volumes: volumes, FloorClone: at(4), PandoClone: at(clone), FloorDestroy: at(1.8), FloorForget: at(2),
			PandoDestroy: at(2.5), pando: sampleOf(clone)}
	}
	r := &Report{
		Pool: PoolReport{LoopBacked: true, Devices: []Device{{Name: "loop0", VolatileCache: true},
			{Name: "vda", VolatileCache: true}}},
		Source: SourceReport{Files: 250_000},
		Operations: []Operation{
			{Name: OpCopy, Synced: at(9000)},
			{Name: OpImport, Synced: at(10000), MaxRSS: 100 << 20},
			{Name: OpReflink, Wall: at(11000)},
			{Name: OpPando, TailOf: 20, Devices: []DeviceBytes{{Device: "loop0", Flushes: 3}, {Device: "vda", Flushes: 4}}},
		},
		Series: []Series{series(10, 4.9), series(47_000, 5), series(10, 5.1)},
		Neighbour: []Phase{{While: WhileIdle, Write: at(1)}, {While: WhilePando, Write: at(1.4)},
			{While: WhileFloor, Write: at(1.3)}},
	}
	for _, line := range []string{"pando clone GOLDEN VOLUME --mount", "pando ls", "pando ls --json",
		"pando show VOLUME"} {
		r.Commands = append(r.Commands, Command{Line: line, Volumes: 47_000, Wall: at(15), MaxRSS: 30 << 20})
	}
	return r
}

func verdicts(r *Report) map[string]string {
	r.judge()
	out := map[string]string{}
	for _, t := range r.Targets {
		out[t.Name] = t.Verdict
	}
	return out
}

func setVolumes(r *Report, n int) {
	for i := range r.Commands {
		r.Commands[i].Volumes = n
	}
}

func TestJudge(t *testing.T) {
	good := verdicts(goodReport())
	if len(good) != 15 {
		t.Errorf("%d targets, want 15", len(good))
	}
	for name, v := range good {
		if v != Pass {
			t.Errorf("%s: %s, want pass", name, v)
		}
	}
	// Each change must turn the verdict of exactly these targets.
	tests := []struct {
		change func(*Report)
		want   map[string]string
	}{
		{func(r *Report) { r.Series[1].FloorClone = at(3.8) }, map[string]string{"clone + mount / raw floor, p50": Fail}},
		{func(r *Report) { r.Series[1].PandoClone, r.Series[1].FloorClone = at(11), at(11) }, map[string]string{
			"clone + mount on a loop-backed pool, p50": Fail, "clone + mount, many volumes / few, p50": Fail}},
		{func(r *Report) {
			r.Pool.LoopBacked = false
		}, map[string]string{"clone + mount on a loop-backed pool, p50": NotMeasured}},
		{func(r *Report) {
			r.Series[2].FloorClone = at(4.9)
		}, map[string]string{"clone + mount, many volumes / few, p50": NotMeasured}},
		{func(r *Report) {
			r.Series = r.Series[:1]
		}, map[string]string{"clone + mount, many volumes / few, p50": NotMeasured}},
		{func(r *Report) { r.NoFloor = "plain" }, map[string]string{
			"clone + mount / raw floor, p50": NotMeasured, "destroy / umount + unlink + one durable row, p50": NotMeasured}},
		{func(r *Report) { r.Series[1].PandoDestroy = at(2.9) }, map[string]string{
			"destroy / umount + unlink + one durable row, p50": Fail}},
		{func(r *Report) {
			r.Operations[3].Devices[1].Flushes = 0
		}, map[string]string{"a clone is on the disk when it returns": Fail}},
		{func(r *Report) {
			r.Pool.Devices[1].VolatileCache = false
		}, map[string]string{"a clone is on the disk when it returns": NotMeasured}},
		{func(r *Report) {
			r.Operations[3].Devices[0].Flushes = 0.5
		}, map[string]string{"a clone is on the disk when it returns": Fail}},
		{func(r *Report) {
			r.Operations[3].Devices[0].Flushes = -1
		}, map[string]string{"a clone is on the disk when it returns": NotMeasured}},
		{func(r *Report) {
			r.Operations[3].NoDevices = "tmpfs"
		}, map[string]string{"a clone is on the disk when it returns": NotMeasured}},
		{func(r *Report) {
			setVolumes(r, 1000)
			r.Commands[0].Wall = at(20)
		}, map[string]string{"`pando clone GOLDEN VOLUME --mount`, p50": Fail}},
		{func(r *Report) {
			r.Commands[0].Wall = at(20)
		}, map[string]string{"`pando clone GOLDEN VOLUME --mount`, p50": NotMeasured}},
		{func(r *Report) { r.Commands[2].Wall = at(301) }, map[string]string{"`pando ls --json`, p50": Fail}},
		{func(r *Report) {
			setVolumes(r, 1050)
			r.Commands[1].MaxRSS = 41 << 20
		}, map[string]string{"peak memory of a command": Fail}},
		{func(r *Report) { r.Commands[1].MaxRSS = 41 << 20 }, map[string]string{"peak memory of a command": NotMeasured}},
		{func(r *Report) { r.Operations[1].MaxRSS = 200 << 20 }, map[string]string{"peak memory of import": Fail}},
		{func(r *Report) {
			r.Operations[1].Synced = at(12000)
		}, map[string]string{"import, speed over that of `cp -a`": Fail}},
		{func(r *Report) {
			r.Operations[0].NotMeasured = "no cp"
		}, map[string]string{"import, speed over that of `cp -a`": NotMeasured}},
		{func(r *Report) {
			r.Operations[2].Wall = at(1000)
		}, map[string]string{"clone + mount, times faster than `cp -a --reflink`": Fail}},
		{func(r *Report) { r.Operations[2].Wall = at(1000); r.Source.Files = 100 }, map[string]string{
			"clone + mount, times faster than `cp -a --reflink`": NotMeasured}},
		{func(r *Report) { r.Source.Files = 100 }, nil}, // faster than wanted with fewer files: good enough
		{func(r *Report) {
			r.Neighbour[1].Write = at(1.6)
		}, map[string]string{"a neighbour's p99 sync write, during clones / idle": Fail}},
		{func(r *Report) { r.Neighbour[1].Write.Count = 99 }, map[string]string{
			"a neighbour's p99 sync write, during clones / idle":        NotMeasured,
			"a neighbour's p99 sync write, during clones / the floor's": NotMeasured}},
		{func(r *Report) {
			r.Neighbour[2].Write = at(1)
		}, map[string]string{"a neighbour's p99 sync write, during clones / the floor's": Fail}},
		{func(r *Report) { r.Neighbour[2].NotMeasured = "no floor" }, map[string]string{
			"a neighbour's p99 sync write, during clones / the floor's": NotMeasured}},
	}
	for i, tt := range tests {
		r := goodReport()
		tt.change(r)
		for name, got := range verdicts(r) {
			want := Pass
			if w, ok := tt.want[name]; ok {
				want = w
			}
			if got != want {
				t.Errorf("change %d: %s: %s, want %s", i, name, got, want)
			}
		}
		for _, g := range r.Targets {
			if g.Verdict == NotMeasured && g.Reason == "" {
				t.Errorf("change %d: %s: no verdict and no reason", i, g.Name)
			}
		}
	}
}

func TestJudgeNothing(t *testing.T) {
	r := &Report{}
	for name, v := range verdicts(r) {
		if v != NotMeasured {
			t.Errorf("%s: %s of an empty report", name, v)
		}
	}
	for _, g := range r.Targets {
		if g.Reason == "" || g.Measured != nil {
			t.Errorf("%s: measured %v, reason %q", g.Name, g.Measured, g.Reason)
		}
	}
}

func TestConfigCheck(t *testing.T) {
	good := Config{Files: 1, Clones: 1, Rounds: 1}
	if err := good.check(); err != nil {
		t.Error(err)
	}
	for _, c := range []Config{
		{Files: 1, Clones: 0, Rounds: 1}, {Files: 1, Clones: 1, Rounds: 0}, {Files: 0, Clones: 1, Rounds: 1},
		{Files: 1, Clones: 1, Rounds: 1, Volumes: -1}, {Files: 1, Clones: 1, Rounds: 1, Volumes: MaxVolumes + 1},
		{Files: 1, Clones: MaxClones + 1, Rounds: 1}, {Files: 1, Clones: 1, Rounds: 1, Tail: -1},
	} {
		if err := c.check(); err == nil {
			t.Errorf("%+v is accepted", c)
		}
	}
}

func TestMeasure(t *testing.T) {
	u, err := Measure(context.Background(), []string{"sh", "-c", "echo a >&2; echo b >&2; sleep 0.05; exit 3"})
	if err != nil {
		t.Fatal(err)
	}
	if u.Exit != 3 || u.Stderr != "a; b" || u.WallNano < 50e6 || u.MaxRSS <= 0 {
		t.Errorf("%+v", u)
	}
	if _, err := Measure(context.Background(), []string{"no-such-program-here"}); err == nil {
		t.Error("a program that is not there ran")
	}
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	start := time.Now()
	if _, err := Measure(ctx, []string{"sleep", "30"}); err != context.DeadlineExceeded {
		t.Errorf("ended by its context: %v", err)
	}
	if time.Since(start) > 10*time.Second {
		t.Error("the program outlived its context")
	}
}
