package iostat

import (
	"encoding/json"
	"os"
	"testing"

	"pando/internal/linux/run"
	"pando/internal/testing/testfs"
)

// TestAgreesWithFio: the same run, measured by the load generator and from outside.
func TestAgreesWithFio(t *testing.T) {
	traced(t)
	if _, err := run.Look("fio"); err != nil {
		if os.Getenv("PANDO_TEST_REQUIRE_ALL") != "" && os.Getuid() == 0 {
			t.Fatal(err)
		}
		t.Skipf("SKIPPED: %v: install fio", err)
	}
	pool := testfs.XFS(t, 1<<30)
	dir := volume(t, pool, "ext4", "v")
	write(t, dir+"/data", 16*mib, true)
	w := watcher(t, Target{Name: "v", Path: dir})
	out, err := run.Program(t.Context(), "fio", "--name=x", "--filename="+dir+"/data", "--size=16M", "--bs=8k",
		"--rw=randwrite", "--overwrite=1",
		"--fdatasync=1", "--number_ios=1500", "--output-format=json")
	if err != nil {
		t.Fatal(err)
	}
	v := target(t, w.Sample(), "v")
	var fio struct {
		Jobs []struct {
			Write struct {
				Bytes int64 `json:"io_bytes"`
			}
			Sync struct {
				Latency struct {
					N          int64
					Mean, Max  float64
					Percentile map[string]float64
				} `json:"lat_ns"`
			}
		}
	}
	if err := json.Unmarshal(out, &fio); err != nil || len(fio.Jobs) != 1 {
		t.Fatal(err, string(out))
	}
	j, l := fio.Jobs[0], v.Syncs.Latency
	if v.Syncs.Count != j.Sync.Latency.N || l == nil || j.Write.Bytes == 0 {
		t.Fatalf("fio: %d syncs, %d bytes; here %+v", j.Sync.Latency.N, j.Write.Bytes, v.Syncs)
	}
	if n := v.Own.WrittenBytes; n < j.Write.Bytes-8<<10 || // the last block is followed by no sync
		n > j.Write.Bytes+2*mib {
		t.Errorf("fio wrote %d bytes, at the device are %d", j.Write.Bytes, n)
	}
	// fio's times have the way into the kernel and back in them, and what takes the
	// processor from it there; both sides have classes a few percent wide.
	for name, pair := range map[string][2]float64{
		"mean": {l.Mean, j.Sync.Latency.Mean}, "p50": {*l.P50, j.Sync.Latency.Percentile["50.000000"]}, "max": {*l.Max,
			j.Sync.Latency.Max},
	} {
		if here, there := pair[0], pair[1]/1e9; here > there*1.06 || here < there*0.6 {
			t.Errorf("%s: %g s here, %g s by fio", name, here, there)
		}
	}
}
