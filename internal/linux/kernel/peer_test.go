package kernel_test

import (
	"fmt"
	"net"
	"os"
	"reflect"
	"testing"

	"pando/internal/linux/kernel"
	"pando/internal/testing/testfs"
)

// TestPeerOf: a connection tells the user and all groups of who made it.
func TestPeerOf(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: becoming another user needs root: run the tests as root")
	}
	many := make([]uint32, 100)
	for i := range many {
		many[i] = uint32(2000 + i)
	}
	for _, groups := range [][]uint32{{}, {1002, 7}, many} {
		path := fmt.Sprintf("@pando-test-%d", os.Getpid()) // an address outside of filesystems
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
		if err != nil {
			t.Fatal(err)
		}
		theirs, err := testfs.DialAs(path, 1001, 1002, groups...)
		if err != nil {
			t.Fatal(err)
		}
		c, err := l.AcceptUnix()
		if err != nil {
			t.Fatal(err)
		}
		p, err := kernel.PeerOf(c)
		want := kernel.Peer{PID: int32(os.Getpid()), UID: 1001, GIDs: []uint32{1002}}
		for _, g := range groups {
			if g != 1002 {
				want.GIDs = append(want.GIDs, g)
			}
		}
		if err != nil || !reflect.DeepEqual(p, want) {
			t.Errorf("with %d groups: %+v, want %+v: %v", len(groups), p, want, err)
		}
		c.Close()
		theirs.Close()
		l.Close()
	}
}
