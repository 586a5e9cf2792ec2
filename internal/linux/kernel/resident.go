package kernel

import (
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Resident returns how many bytes of a file are in the page cache: see mincore(2). Of a file in an overlay mount it
// counts those of the layer that has the data, where cachestat(2) counts none. It reads no data.
func Resident(f *os.File) (int64, error) {
	st, err := f.Stat()
	if err != nil || st.Size() == 0 {
		return 0, err
	}

	mapped, err := unix.Mmap(int(f.Fd()), 0, int(st.Size()), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return 0, fmt.Errorf("mmap %s: %w", f.Name(), err)
	}

	defer unix.Munmap(mapped)

	page := int64(os.Getpagesize())
	pages := make([]byte, (st.Size()+page-1)/page)
	if _, _, errno := unix.Syscall(unix.SYS_MINCORE, uintptr(unsafe.Pointer(&mapped[0])), uintptr(len(mapped)),
		uintptr(unsafe.Pointer(&pages[0]))); errno != 0 {
		return 0, fmt.Errorf("mincore %s: %w", f.Name(), errno)
	}

	var n int64
	for _, p := range pages {
		n += int64(p & 1)
	}

	return n * page, nil
}
