package catalog

import (
	"testing"
	"time"
)

// OnWaitForInode calls fn instead of waiting for an inode to become free.
func OnWaitForInode(t *testing.T, fn func()) {
	t.Cleanup(func() { waitForInode = time.Sleep })
	waitForInode = func(time.Duration) { fn() }
}
