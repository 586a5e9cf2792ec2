package service

import (
	"context"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"pando/client"
	"pando/internal/base/ref"
	"pando/internal/engine"
	"pando/internal/testing/testfs"
)

// program returns the path of the pando program.
func program(t testing.TB) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "pando")
	must(t, testfs.BuildProgram(path))
	return path
}

// BenchmarkReady measures how long a service that was killed during a clone takes until it is ready again, in a pool
// with PANDO_BENCH_VOLUMES volumes (default 1,000): from the start of the process until it says READY=1. It should take
// less than 1 s with 47,000.
func BenchmarkReady(b *testing.B) {
	n := 1000
	if text := os.Getenv("PANDO_BENCH_VOLUMES"); text != "" {
		var err error
		n, err = strconv.Atoi(text)
		must(b, err)
	}
	if os.Geteuid() != 0 {
		b.Skip("SKIPPED: mounting needs root: run it as root")
	}
	pando, socket, pool := program(b), filepath.Join(b.TempDir(), "s"), filepath.Join(b.TempDir(), "pool")
	_, err := engine.Init(b.Context(), engine.InitRequest{Dir: pool, SizeBytes: 20 << 30}, drivers)
	must(b, err)
	defer func() {
		if _, err := engine.Deinit(context.Background(), pool, true, drivers); err != nil {
			b.Errorf("deinit: %v", err)
		}
	}()
	source := b.TempDir()
	must(b, os.WriteFile(filepath.Join(source, "file"), []byte("v1"), 0o644))
	e, err := engine.Open(b.Context(), pool, drivers)
	must(b, err)
	_, err = e.Import(b.Context(), engine.ImportRequest{Name: ref.MustName("web"), Source: source, SizeBytes: 64 << 20})
	must(b, err)
	_, err = e.Clone(b.Context(), engine.CloneRequest{From: ref.Ref{Name: "web"}, Name: ref.MustName("v"), Count: n})
	must(b, err)
	e.Close()

	notify := filepath.Join(b.TempDir(), "n")
	l, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: notify, Net: "unixgram"})
	must(b, err)
	defer l.Close()
	c, err := client.New(client.Options{Socket: socket})
	must(b, err)
	defer c.Close()
	b.ResetTimer()
	b.StopTimer()
	for i := range b.N {
		cmd := exec.Command(pando, "--pool", pool, "-q", "serve", "--socket", socket)
		cmd.Env = append(os.Environ(), "NOTIFY_SOCKET="+notify)
		b.StartTimer()
		must(b, cmd.Start())
		for ready := false; !ready; {
			text := make([]byte, 4096)
			got, err := l.Read(text)
			must(b, err)
			ready = strings.Contains(string(text[:got]), "READY=1")
		}
		b.StopTimer()

		// Kill it in the middle of clones.
		_, err := c.Clone(b.Context(), client.CloneRequest{From: "web", Name: "k" + strconv.Itoa(i), Make: client.Make{
			Mount: true}})
		must(b, err)
		go func() {
			_, _ = c.Clone(context.Background(), client.CloneRequest{From: "web", Name: "x" + strconv.Itoa(i)}) // or it dies
		}()
		time.Sleep(time.Millisecond)
		must(b, cmd.Process.Kill())
		_ = cmd.Wait()
	}
}
