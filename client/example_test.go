package client_test

import (
	"archive/tar"
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"pando/client"
	"pando/internal/driver/plain"
	"pando/internal/engine"
	"pando/internal/front/service"
	"pando/internal/remote/replicate"
)

// TestMain runs the examples against a service of a pool with the golden web, at the socket in $PANDO_SOCKET.
func TestMain(m *testing.M) {
	engine.Helper(os.Args)
	code, err := withService(m.Run)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

func withService(run func() int) (code int, err error) {
	top, err := os.MkdirTemp("", "pando-client-")
	if err != nil {
		return 0, err
	}
	defer os.RemoveAll(top)

	// Make a pool, and serve it.
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	drivers := engine.Drivers{plain.Name: plain.Open}
	dir := filepath.Join(top, "pool")
	if _, err := engine.Init(ctx, engine.InitRequest{Dir: dir, Driver: plain.Name}, drivers); err != nil {
		return 0, err
	}
	e, err := engine.Open(ctx, dir, drivers)
	if err != nil {
		return 0, err
	}
	defer e.Close()

	s, err := service.New(e, service.Options{Drivers: drivers, Grace: time.Second,
		Access: func() (replicate.Access, error) { return replicate.Access{}, nil }})
	if err != nil {
		return 0, err
	}
	socket := filepath.Join(top, "s")
	l, _, err := service.ListenUnix(socket)
	if err != nil {
		return 0, err
	}
	ended := make(chan error)
	go func() { ended <- s.Serve(ctx, l) }()

	if err = os.Setenv(client.SocketVariable, socket); err == nil {
		code = run()
	}
	cancel()
	if serr := <-ended; err == nil {
		err = serr
	}
	return code, err
}

// tarball returns a tar archive with one file.
func tarball(name, text string) *bytes.Buffer {
	b := &bytes.Buffer{}
	w := tar.NewWriter(b)
	_ = w.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: int64(len(text)), Typeflag: tar.TypeReg})
	_, _ = w.Write([]byte(text))
	_ = w.Close() // a buffer takes everything
	return b
}

// A golden from a tar archive, and a private, writable volume of it for a job.
func Example() {
	ctx := context.Background()
	c, err := client.New(client.Options{}) // the socket in $PANDO_SOCKET, or DefaultSocket
	if err != nil {
		fmt.Println(err)
		return
	}
	defer c.Close()

	golden, err := c.Import(ctx, "web", tarball("index.html", "v1"), client.ImportOptions{})
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(golden.Golden, golden.Generation)

	// A repetition of this request returns the same volume: it can be sent again if no answer arrives.
	v, err := c.Clone(ctx, client.CloneRequest{From: "web", Name: "job-17", Key: "build-4711",
		Make: client.Make{Mount: true, Labels: map[string]string{"team": "search"}}})
	if err != nil {
		fmt.Println(err)
		return
	}
	text, err := os.ReadFile(filepath.Join(v.Mountpoint, "index.html"))
	fmt.Println(v.Name, v.State, string(text), err)

	fmt.Println(c.Destroy(ctx, "job-17", ""))
	// Output:
	// web 1
	// job-17 mounted v1 <nil>
	// <nil>
}

// Errors have a kind, and a hint that says what to do.
func ExampleIsKind() {
	c, err := client.New(client.Options{})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer c.Close()

	_, err = c.Volume(context.Background(), "nothing")
	fmt.Println(client.IsKind(err, client.NotFound))
	// Output: true
}

// Long work is an operation: Wait returns its result.
func ExampleClient_Wait() {
	ctx := context.Background()
	c, err := client.New(client.Options{})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer c.Close()

	op, err := c.Fsck(ctx, nil, false)
	if err != nil {
		fmt.Println(err)
		return
	}
	var report struct {
		OK bool `json:"ok"`
	}
	op, err = c.Wait(ctx, op.ID, &report)
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(op.Verb, op.State, report.OK)
	// Output: fsck done true
}

// Two programs change the labels of a volume: the one that has read an older state learns that.
func ExampleClient_SetLabels() {
	ctx := context.Background()
	c, err := client.New(client.Options{})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer c.Close()

	if _, err := c.Import(ctx, "labels", tarball("f", ""), client.ImportOptions{}); err != nil {
		fmt.Println(err)
		return
	}
	g, err := c.Golden(ctx, "labels")
	if err != nil {
		fmt.Println(err)
		return
	}
	_, first := c.SetLabels(ctx, "labels", map[string]string{"stage": "test"}, nil, g.ETag)
	_, second := c.SetLabels(ctx, "labels", map[string]string{"stage": "live"}, nil, g.ETag)
	fmt.Println(first, client.IsChanged(second))
	// Output: <nil> true
}

// The stream of events has what all programs do with the pool, and continues by itself after a restart of the service.
func ExampleClient_Events() {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	c, err := client.New(client.Options{})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer c.Close()

	go func() { _, _ = c.Import(ctx, "watched", tarball("f", ""), client.ImportOptions{}) }()
	for e, err := range c.Events(ctx, client.FromBeginning) {
		if err != nil {
			fmt.Println(err)
			return
		}
		if e.Name == "watched@1" { // keep e.ID, to continue after it
			fmt.Println(e.Verb, e.Kind, e.Name)
			return
		}
	}
	// Output: import generation watched@1
}
