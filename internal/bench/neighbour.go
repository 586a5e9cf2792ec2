package bench

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	neighbourBytes = 8 << 10  // of one write
	neighbourRoom  = 16 << 20 // that the writes go round in
)

// neighbour writes 8 KiB and waits for the disk (fdatasync), over and over, as
// a database in another volume would. Each write's latency counts for the phase
// in which it began and ended.
type neighbour struct {
	f    *os.File
	stop chan struct{}
	done chan error

	mu     sync.Mutex
	sample *Sample // of the phase; nil: not counted
}

// startNeighbour begins to write in dir, into space that is allocated already.
func startNeighbour(dir string) (*neighbour, error) {
	path := filepath.Join(dir, "pando-bench-neighbour")
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}

	n := &neighbour{f: f, stop: make(chan struct{}), done: make(chan error, 1)}
	if _, err = f.Write(make([]byte, neighbourRoom)); err == nil {
		err = f.Sync()
	}
	if err != nil {
		f.Close()
		return nil, err
	}

	go func() { n.done <- n.loop() }()
	return n, nil
}

func (n *neighbour) loop() error {
	// A thread of its own, as another program would have.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()

	buf := make([]byte, neighbourBytes)
	for i := int64(0); ; i++ {
		select {
		case <-n.stop:
			return nil
		default:
		}

		buf[0] = byte(i)
		before := n.current()
		start := time.Now()
		if _, err := unix.Pwrite(int(n.f.Fd()), buf, i*neighbourBytes%neighbourRoom); err != nil {
			return fmt.Errorf("neighbour: %w", err)
		}

		if err := unix.Fdatasync(int(n.f.Fd())); err != nil {
			return fmt.Errorf("neighbour: %w", err)
		}

		d := time.Since(start)
		n.mu.Lock()
		if n.sample != nil && n.sample == before {
			n.sample.Add(d)
		}

		n.mu.Unlock()
	}
}

func (n *neighbour) current() *Sample {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.sample
}

// during counts the writes made while fn runs into s.
func (n *neighbour) during(s *Sample, fn func() error) error {
	n.set(s)
	defer n.set(nil)
	return fn()
}

func (n *neighbour) set(s *Sample) {
	n.mu.Lock()
	n.sample = s
	n.mu.Unlock()
}

// close ends the writing. The file goes with its volume.
func (n *neighbour) close() error {
	close(n.stop)
	err := <-n.done
	n.f.Close()
	return err
}
