package cli

import (
	"encoding/json"
	"testing"
	"time"

	"pando/internal/base/progress"
)

// TestEvent: a line of progress with --json, whose fields others read.
func TestEvent(t *testing.T) {
	var got map[string]map[string]any
	line := progressJSON(progress.State{Stage: progress.Pushing, Of: "v@s", Bytes: 30 << 20, TotalBytes: 90 << 20},
		3*time.Second)
	if err := json.Unmarshal([]byte(line), &got); err != nil {
		t.Fatalf("%s: %v", line, err)
	}
	want := map[string]any{"stage": "pushing v@s", "files": 0.0, "bytes": float64(30 << 20),
		"total_bytes": float64(90 << 20), "bytes_per_second": float64(10 << 20), "seconds_left": 6.0}
	p := got["progress"]
	for k, v := range want {
		if p[k] != v {
			t.Errorf("%s is %v, not %v, in %s", k, p[k], v, line)
		}
	}
	if len(p) != len(want) {
		t.Errorf("%s has other fields than %v", line, want)
	}
}

// TestDescribe: each stage counts in its own unit.
func TestDescribe(t *testing.T) {
	for want, s := range map[string]progress.State{
		"measuring run 1 of 2, 3 of 5 s": {Stage: progress.Measuring, Of: "run 1 of 2", Files: 3,
			TotalFiles: 5},
		"copying, 3 of 5 files":   {Stage: progress.Copying, Files: 3, TotalFiles: 5},
		"cloning, 3 of 5 volumes": {Stage: progress.Cloning, Files: 3, TotalFiles: 5},
		"deleting, 3 of 5":        {Stage: progress.Deleting, Files: 3, TotalFiles: 5},
		"pushing, 3.0 KiB of 3.0 KiB, 3.0 KiB/s, 0s left": {
			Stage: progress.Pushing, Bytes: 3 << 10, TotalBytes: 2 << 10},
		"reading data, 1.0 KiB of 2.0 KiB, 1.0 KiB/s, 1s left": {
			Stage: progress.ReadingData, Bytes: 1 << 10, TotalBytes: 2 << 10},
	} {
		if got := describeProgress(s, time.Second); got != want {
			t.Errorf("%q, not %q", got, want)
		}
	}
}
