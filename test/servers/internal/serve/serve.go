// Package serve is what the servers for tests have in common: how they say where
// they listen, and when they end.
package serve

import (
	"fmt"
	"io"
	"net"
	"os"
)

// Listening tells who started this program where it listens. It is called when
// connections are accepted.
func Listening(addr net.Addr) { fmt.Printf("listening %s\n", addr) }

// Loopback opens a free port of this host only.
func Loopback() net.Listener {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		Fail(err)
	}
	return l
}

// UntilClosed ends the program when its standard input ends: when who started it
// closes the pipe, or is gone in whatever way. So no server outlives its test.
func UntilClosed() {
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(0)
	}()
}

// Fail ends the program.
func Fail(err error) {
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}
