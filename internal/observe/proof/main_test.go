package proof_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"pando/internal/testing/tracetest"

	"golang.org/x/sys/unix"
)

// TestMain makes this program the load, too, and one that watches without rights.
func TestMain(m *testing.M) {
	if os.Getenv("PANDO_TEST_LOAD") != "" {
		if err := load(os.Getenv("PANDO_TEST_LOAD"), os.Args[1:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if os.Getenv("PANDO_TEST_WATCH") != "" {
		if err := watchHere(context.Background(), os.Args[1:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	tracetest.Hold(tracetest.Syncs()...)
	os.Exit(m.Run())
}

// loaded is what the load reports.
type loaded struct {
	Syncs int64
	P50   float64
}

// load writes 8 KiB blocks over and over a file of its own for each writer, and syncs
// every one: "fdatasync", "fsync", "dsync" or "none"; or appends and syncs: "grow". Its arguments are a number of
// milliseconds, a number of blocks, and the files. It ends when its input does, but not before that time has passed and
// each writer has written that many blocks.
func load(call string, args []string) error {
	ms, err := strconv.Atoi(args[0])
	if err != nil {
		return err
	}
	least, err := strconv.ParseInt(args[1], 10, 64)
	if err != nil {
		return err
	}
	var (
		mu    sync.Mutex
		wg    sync.WaitGroup
		all   []time.Duration
		fail  error
		block = make([]byte, 8<<10)
	)
	end := time.Now().Add(time.Duration(ms) * time.Millisecond)
	var ended atomic.Bool
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		ended.Store(true)
	}()
	for _, name := range args[2:] {
		wg.Go(func() {
			times, err := write(name, call, block, func(n int64) bool {
				return n < least || !ended.Load() || time.Now().Before(end)
			})
			mu.Lock()
			defer mu.Unlock()
			all = append(all, times...)
			if err != nil {
				fail = err
			}
		})
	}
	wg.Wait()
	if fail != nil {
		return fail
	}
	slices.Sort(all)
	out := loaded{Syncs: int64(len(all))}
	if call == "none" {
		out.Syncs = 0
	}
	if len(all) > 0 {
		out.P50 = all[len(all)/2].Seconds()
	}
	return json.NewEncoder(os.Stdout).Encode(out)
}

// write writes blocks to a file, and asks before each one, with the number of those written, whether to go on.
func write(name, call string, block []byte, more func(int64) bool) (times []time.Duration, err error) {
	flags := os.O_RDWR
	if call == "dsync" {
		flags |= unix.O_DSYNC
	}
	f, err := os.OpenFile(name, flags, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	for n := int64(0); more(n); n++ {
		block[0] = byte(n)
		start := time.Now()
		at := n % 64
		if call == "grow" {
			at = n % 1024
			if at == 0 {
				if err := f.Truncate(0); err != nil {
					return nil, err
				}
			}
		}
		if _, err := f.WriteAt(block, at*int64(len(block))); err != nil {
			return nil, err
		}
		if call != "dsync" {
			start = time.Now()
		}
		switch call {
		case "fdatasync":
			err = unix.Fdatasync(int(f.Fd()))
		case "fsync", "grow":
			err = unix.Fsync(int(f.Fd()))
		}
		if err != nil {
			return nil, err
		}
		times = append(times, time.Since(start))
	}
	return times, nil
}
