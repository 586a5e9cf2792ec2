package catalog

import (
	"context"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// idle keeps live files, locked, that ended operations of this process leave to later ones: making and removing a file
// costs as much as everything else that a mark does.
//
// A mark of an operation that has ended must not look alive. So a file is only kept if no mark names it, as far as the
// operation has counted; if it cannot tell, the file is removed (see leavesNoMarks). So is a spare, for other
// processes.
type idle struct {
	mu     sync.Mutex
	files  []*os.File
	closed bool
}

// maxIdle is how many files are kept.
const maxIdle = 4

// putLiveFile keeps a file, unless there are enough.
func (i *idle) putLiveFile(f *os.File) bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.closed || len(i.files) >= maxIdle {
		return false
	}
	i.files = append(i.files, f)
	return true
}

// takeLiveFile returns a locked file that still has its name; nil if there is none.
func (i *idle) takeLiveFile() *os.File {
	i.mu.Lock()
	defer i.mu.Unlock()
	for len(i.files) > 0 {
		f := i.files[len(i.files)-1]
		i.files = i.files[:len(i.files)-1]
		// The file may have been removed: then others would lock another file, and the lock proves nothing.
		var st unix.Stat_t
		if err := unix.Fstat(int(f.Fd()), &st); err == nil && st.Nlink == 1 {
			return f
		}
		unlockLiveFile(f)
	}

	return nil
}

// removeLiveFiles removes all files, and keeps none from then on.
func (i *idle) removeLiveFiles() {
	i.mu.Lock()
	defer i.mu.Unlock()
	for _, f := range i.files {
		_ = os.Remove(f.Name()) // as in End
		unlockLiveFile(f)
	}
	i.files, i.closed = nil, true
}

// leavesNoMarks reports whether it is certain that no mark names the operation, now or later. The caller holds o.mu.
func (o *Operation) leavesNoMarks() bool {
	return o.marks == 0 && o.running == 0 && !o.unsure && !o.spare
}

// beginCounting counts the marks that a transaction makes and removes for the operation of ctx. Call ended when it has
// ended, with their difference if it was committed, or else 0, and the error of ending it: an error leaves it unknown
// whether the transaction was committed.
func beginCounting(ctx context.Context) (ended func(marked int, err error)) {
	at, _ := ctx.Value(markOwnerKey{}).(markOwnerIn)
	o, ok := at.markOwner.(*Operation)
	if !ok {
		return func(int, error) {}
	}

	o.mu.Lock()
	defer o.mu.Unlock()
	o.running++
	return func(marked int, err error) {
		o.mu.Lock()
		defer o.mu.Unlock()
		o.running--
		o.marks += marked
		o.unsure = o.unsure || err != nil
	}
}
