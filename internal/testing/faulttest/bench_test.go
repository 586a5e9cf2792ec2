//go:build linux && (amd64 || arm64)

package faulttest

import (
	"context"
	"os/exec"
	"strconv"
	"testing"
)

// What tracing costs: a program that does nothing, one that makes system calls
// which are no steps, one that makes steps, each also without the tracer.
func BenchmarkRun(b *testing.B) {
	if err := Available(); err != nil {
		b.Skipf("SKIPPED, NOTHING WAS MEASURED: %v", err)
	}
	const n = 1000
	for _, c := range []struct {
		name string
		args []string
	}{
		{"nothing", []string{"getpid", "0"}},
		{"1000calls", []string{"getpid", strconv.Itoa(n)}},
		{"1000steps", []string{"calls", b.TempDir() + "/file", strconv.Itoa(n)}},
	} {
		b.Run(c.name+"/untraced", func(b *testing.B) {
			for b.Loop() {
				if err := exec.Command(victimPath, c.args...).Run(); err != nil {
					b.Fatal(err)
				}
			}
		})
		for _, all := range []bool{false, true} {
			b.Run(c.name+"/traced,allcpus="+strconv.FormatBool(all), func(b *testing.B) {
				var stops, steps int
				for b.Loop() {
					res, err := Run(context.Background(), append([]string{victimPath}, c.args...), Options{AllCPUs: all})
					if err != nil || res.ExitCode != 0 {
						b.Fatal(err, res.ExitCode)
					}
					stops += res.Stops
					steps += len(res.Steps)
				}
				b.ReportMetric(float64(stops)/float64(b.N), "stops/op")
				b.ReportMetric(float64(stops)/b.Elapsed().Seconds(), "stops/s")
				b.ReportMetric(float64(steps)/b.Elapsed().Seconds(), "steps/s")
			})
		}
	}
}
