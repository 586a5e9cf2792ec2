package proof_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"

	"pando/internal/observe/proof"
	"pando/internal/observe/stack"
)

// BenchmarkCounters lets a load of one second take turns: alone, with its counters by
// name (StartOne), and by descent (Start). It prints the medians of the syncs a second
// and of the load's own processor time for a sync, in which the kernel's counting is.
//
//	go test ./internal/observe/proof -run '^$' -bench Counters -benchtime 15x
func BenchmarkCounters(b *testing.B) {
	dir := b.TempDir()
	file := filepath.Join(dir, "f")
	if err := os.WriteFile(file, make([]byte, 512<<10), 0o600); err != nil {
		b.Fatal(err)
	}
	link := filepath.Join(dir, "proof-bench-load")
	self, err := os.Executable()
	if err == nil {
		err = os.Symlink(self, link)
	}
	if err != nil {
		b.Fatal(err)
	}
	s, err := stack.Of(b.Context(), dir)
	if err != nil {
		b.Fatal(err)
	}
	run := func(start func(*proof.Watch, *exec.Cmd) error) (perSecond, cpu float64) {
		w, err := proof.New(b.Context(), s)
		if err != nil {
			b.Fatal(err)
		}
		defer w.Close()
		cmd := exec.Command(link, "1000", "1", file)
		cmd.Env = append(os.Environ(), "PANDO_TEST_LOAD=fdatasync")
		var out bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, os.Stderr
		if start == nil { // without any counter
			w.Close()
			start = func(_ *proof.Watch, cmd *exec.Cmd) error { return cmd.Start() }
		}
		if err := start(w, cmd); err != nil {
			b.Fatal(err)
		}
		if err := cmd.Wait(); err != nil {
			b.Fatal(err)
		}
		var l loaded
		if err := json.Unmarshal(out.Bytes(), &l); err != nil {
			b.Fatal(err)
		}
		return float64(l.Syncs),
			(cmd.ProcessState.SystemTime() + cmd.ProcessState.UserTime()).Seconds() / float64(l.Syncs) * 1e6
	}
	kinds := []struct {
		name  string
		start func(*proof.Watch, *exec.Cmd) error
	}{{"alone", nil}, {"by name", (*proof.Watch).StartOne}, {"by descent", (*proof.Watch).Start}}
	rates, cpus := make([][]float64, len(kinds)), make([][]float64, len(kinds))
	for n := 0; b.Loop(); n++ {
		for i := range kinds {
			k := (i + n) % len(kinds)
			r, c := run(kinds[k].start)
			rates[k], cpus[k] = append(rates[k], r), append(cpus[k], c)
		}
	}
	for i, k := range kinds {
		slices.Sort(rates[i])
		slices.Sort(cpus[i])
		fmt.Fprintf(os.Stderr, "%s: median %.0f syncs/s (best %.0f), %.1f µs of processor time each (least %.1f)\n", k.name,
			rates[i][len(rates[i])/2], rates[i][len(rates[i])-1], cpus[i][len(cpus[i])/2], cpus[i][0])
	}
}
