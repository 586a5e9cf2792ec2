package bench

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"pando/client"
	"pando/internal/driver"
	"pando/internal/testing/testfs"
)

// Figures of BenchmarkService.
const (
	manyClients  = 200
	serviceRound = 3 * time.Second
	rounds       = 3 // of each, in turn
)

// BenchmarkService measures how many volumes a second are cloned, mounted and destroyed: through the service by one
// client and by 200, by one that starts the command each time, and by the bare floor, alone and 200 at once. Run it
// with -benchtime 1x. The service should reach 3 times the command, and with 200 clients 0.7 of the floor.
func BenchmarkService(b *testing.B) {
	if os.Geteuid() != 0 {
		b.Skip("SKIPPED: mounting needs root: run it as root")
	}
	for range b.N {
		measureService(b)
	}
}

func measureService(b *testing.B) {
	program := filepath.Join(b.TempDir(), "pando")
	fatal(b, testfs.BuildProgram(program))
	pool, socket := filepath.Join(b.TempDir(), "pool"), filepath.Join(b.TempDir(), "s")
	pando := func(args ...string) {
		out, err := exec.Command(program, append([]string{"--pool", pool, "-q"}, args...)...).CombinedOutput()
		if err != nil {
			b.Fatalf("pando %v: %v: %s", args, err, out)
		}
	}
	source := b.TempDir()
	fatal(b, os.WriteFile(filepath.Join(source, "file"), []byte("content"), 0o644))
	pando("init", "--size", "4G")
	defer pando("deinit", "--force")
	pando("golden", "import", "web", source, "--size", "64M")

	// The floor copies the golden's image.
	images, err := filepath.Glob(filepath.Join(pool, "data", "objects", "*.img"))
	if err != nil || len(images) != 1 {
		b.Fatalf("images of the golden: %v, %v", images, err)
	}
	dir, out := filepath.Join(pool, "data", "floor"), b.TempDir()
	fatal(b, os.Mkdir(dir, 0o700))
	fatal(b, os.Mkdir(filepath.Join(out, "mnt"), 0o700))
	fl, err := newFloor(driver.Attachment{Image: images[0], FS: driver.Ext4, SectorBytes: 512}, dir, out, "")
	fatal(b, err)
	defer fl.close()
	var floorSerial, serial atomic.Int64
	onFloor := func() error {
		i := int(floorSerial.Add(1))
		if err := fl.clone(b.Context(), i, func(string) {}); err != nil {
			return err
		}
		if err := fl.destroy(i); err != nil {
			return err
		}
		fl.sweep(i)
		return fl.forget(b.Context(), i)
	}

	// Serve the pool.
	cmd := exec.Command(program, "--pool", pool, "serve", "--socket", socket)
	fatal(b, cmd.Start())
	defer func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		if err := cmd.Wait(); err != nil {
			b.Errorf("the service: %v", err)
		}
	}()
	c, err := client.New(client.Options{Socket: socket})
	fatal(b, err)
	defer c.Close()
	for _, err := c.Service(b.Context()); err != nil; _, err = c.Service(b.Context()) {
		time.Sleep(10 * time.Millisecond)
	}
	byService := func() error {
		name := fmt.Sprint("v", serial.Add(1))
		_, err := c.Clone(b.Context(), client.CloneRequest{From: "web", Name: name, Key: name,
			Make: client.Make{Mount: true}})
		if err != nil {
			return err
		}
		return c.Destroy(b.Context(), name, "")
	}
	byCommand := func() error {
		name := fmt.Sprint("c", serial.Add(1))
		pando("clone", "web", name, "--mount")
		pando("destroy", name)
		return nil
	}

	// Measure all in turn, so that what else runs on the machine disturbs all alike.
	var one, many, command, floorOne, floorMany float64
	for range rounds {
		one += rate(b, 1, byService)
		command += rate(b, 1, byCommand)
		floorOne += rate(b, 1, onFloor)
		many += rate(b, manyClients, byService)
		floorMany += rate(b, manyClients, onFloor)
	}
	b.ReportMetric(one/rounds, "one/s")
	b.ReportMetric(command/rounds, "command/s")
	b.ReportMetric(floorOne/rounds, "floor-one/s")
	b.ReportMetric(many/rounds, "many/s")
	b.ReportMetric(floorMany/rounds, "floor-many/s")
	b.ReportMetric(one/command, "one/command")
	b.ReportMetric(many/floorMany, "many/floor")
	fatal(b, os.Remove(dir))
}

// rate returns how often a second n goroutines do something.
func rate(b *testing.B, n int, do func() error) float64 {
	b.Helper()
	ctx, cancel := context.WithTimeout(b.Context(), serviceRound)
	defer cancel()
	var times atomic.Int64
	var failed sync.Once
	var wg sync.WaitGroup
	start := time.Now()
	for range n {
		wg.Go(func() {
			for ctx.Err() == nil && !b.Failed() {
				if err := do(); err != nil {
					failed.Do(func() { b.Error(err) })
				}
				times.Add(1)
			}
		})
	}
	wg.Wait()
	return float64(times.Load()) / time.Since(start).Seconds()
}

func fatal(b *testing.B, err error) {
	b.Helper()
	if err != nil {
		b.Fatal(strings.TrimSpace(err.Error()))
	}
}
