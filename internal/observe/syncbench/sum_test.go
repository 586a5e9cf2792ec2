package syncbench

import (
	"slices"
	"testing"

	"pando/internal/observe/proof"
)

func TestSumLayers(t *testing.T) {
	r := fixture(t)
	disk := SumLayers(r.Runs)[1]
	var flushes, writes int64
	for _, x := range r.Runs {
		flushes += x.Proof.Layers[1].Flushes
		writes += x.Proof.Layers[1].Writes
	}
	if disk.Name != "vda" || disk.Flushes != flushes || disk.Writes != writes || disk.OthersFlushes != 36 ||
		disk.Result != proof.OK || len(disk.Failures) != 0 {
		t.Errorf("%+v", disk)
	}
	// What one run does not know, the sum does not; what fails once, fails.
	for i, result := range []proof.Result{proof.Unknown, proof.Fail, proof.OK} {
		l := &r.Runs[i].Proof.Layers[1]
		l.Result, l.Words = result, string(result)
	}
	r.Runs[1].Proof.Layers[1].Flushes = -1
	all := SumLayers(r.Runs)
	if disk = all[1]; len(all) != 2 || disk.Flushes != -1 || disk.Writes != writes || disk.Result != proof.Fail ||
		!slices.Equal(disk.Failures, []string{"unknown", "fail"}) {
		t.Errorf("%+v", disk)
	}
	if top := all[0]; top.Flushes != -1 || top.Writes != -1 || top.Result != proof.OK {
		t.Errorf("a filesystem is counted: %+v", top)
	}
}

func TestVerdictShort(t *testing.T) {
	v := Verdict{Words: []string{"run 2: a", "run 2: b", "run 3: a", "run 3: b", "run 4: a", "run out: never", "short"}}
	words, more := v.Short()
	if want := []string{"run 2: a", "run 2: b", "run out: never", "short"}; !slices.Equal(words, want) || more != 3 {
		t.Errorf("%q, %d", words, more)
	}
	v.Words = []string{"the data of 1,234 syncs of 2 writers reached vda",
		"the data of 999 syncs of 2 writers reached vda", "no tracepoints",
		"the data of 56,789 syncs of 2 writers reached vda", "short"}
	if words, more = v.Short(); !slices.Equal(words, []string{v.Words[0], v.Words[2], v.Words[4]}) || more != 2 {
		t.Errorf("%q, %d", words, more)
	}
	v.Words = v.Words[:4]
	if words, more = v.Short(); !slices.Equal(words, v.Words) || more != 0 {
		t.Errorf("%q, %d", words, more)
	}
}
