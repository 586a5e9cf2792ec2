package proof_test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"pando/internal/observe/tracepoint"

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
	if os.Getenv("PANDO_TEST_ZFS") != "" {
		holdEvents()
	}
	os.Exit(m.Run())
}

// held are counters of nothing.
var held []*tracepoint.Counter

// holdEvents keeps the kernel from switching its events on and off with each test, by
// holding one counter of each, which counts nothing. The kernel switches by patching its code
// while other processors run it, and QEMU without acceleration gets that wrong now and then: the
// guest dies of "int3".
func holdEvents() {
	events := []string{"block:block_bio_queue"}
	for _, call := range []string{"fsync", "fdatasync", "msync", "syncfs", "sync", "write", "pwrite64", "writev",
		"pwritev", "pwritev2", "open", "openat", "sync_file_range", "io_uring_enter", "io_submit"} {
		events = append(events, "syscalls:sys_enter_"+call, "syscalls:sys_exit_"+call)
	}
	for _, e := range events {
		if c, err := tracepoint.Count(e, "common_pid == 1 && common_pid == 2", tracepoint.Everything); err == nil {
			held = append(held, c)
		}
	}
	// Counters by descent patch what switches between threads.
	runtime.LockOSThread()
	if c, err := tracepoint.Count(events[0], "", tracepoint.Children); err == nil {
		held = append(held, c)
	}
	runtime.UnlockOSThread()
}

// loaded is what the load reports.
type loaded struct {
	Syncs int64
	P50   float64
}

// load writes 8 KiB blocks over and over a file of its own for each writer, and syncs
// every one: "fdatasync", "fsync", "dsync" or "none"; or appends and syncs: "grow". Its arguments are the number of
// writers, of milliseconds, and the files.
func load(call string, args []string) error {
	ms, err := strconv.Atoi(args[0])
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
	until := time.Now().Add(time.Duration(ms) * time.Millisecond)
	for _, name := range args[1:] {
		wg.Go(func() {
			times, err := write(name, call, block, until)
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

func write(name, call string, block []byte, until time.Time) (times []time.Duration, err error) {
	flags := os.O_RDWR
	if call == "dsync" {
		flags |= unix.O_DSYNC
	}
	f, err := os.OpenFile(name, flags, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	for n := int64(0); time.Now().Before(until); n++ {
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
