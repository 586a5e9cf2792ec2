package kernel

import (
	"encoding/binary"
	"fmt"
	"os"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Requests of btrfs for streams, from include/uapi/linux/btrfs.h.
const (
	btrfsIocSend         = 0x40489426 // _IOW(0x94, 38, struct btrfs_ioctl_send_args)
	btrfsIocSetReceived  = 0xc0c89425 // _IOWR(0x94, 37, struct btrfs_ioctl_received_subvol_args)
	btrfsIocEncodedWrite = 0x40809440 // _IOW(0x94, 64, struct btrfs_ioctl_encoded_io_args)

	btrfsSendVersion    = 0x8  // BTRFS_SEND_FLAG_VERSION
	btrfsSendCompressed = 0x10 // BTRFS_SEND_FLAG_COMPRESSED

	btrfsUUIDTreeID      = 9
	btrfsUUIDReceivedKey = 252
)

// BtrfsSendOptions are the options of BtrfsSend.
type BtrfsSendOptions struct {
	Parent  uint64 // number of the subvolume to send the difference to; 0 sends everything
	Version uint32 // version of the protocol, 1 or 2; version 2 sends compressed data without decompressing it
}

type btrfsSendArgs struct {
	fd      int64
	count   uint64
	sources *uint64
	parent  uint64
	flags   uint64
	version uint32
	_       [28]byte
}

// BtrfsSend writes the stream of the read-only subvolume with root f to w, a pipe. It needs
// root (CAP_SYS_ADMIN). EPIPE: the reading end of the pipe was closed. EPERM: no privileges, or a
// subvolume is writable. EAGAIN: its blocks are being deduplicated. EINVAL, EPROTO or EOPNOTSUPP,
// with nothing written: the kernel does not support the version.
//
// If the process is stopped and continued (SIGSTOP) while it sends, the kernel may start again in the
// middle of the stream, so the reader must check the stream.
func BtrfsSend(f *os.File, o BtrfsSendOptions, w *os.File) error {
	done := make(chan error)
	go func() {
		// Block all signals: one that reaches the thread while the pipe is full would make
		// the kernel restart the call from the first byte. The thread stays locked, so it ends
		// with this goroutine.
		runtime.LockOSThread()
		var all unix.Sigset_t
		for i := range all.Val {
			all.Val[i] = ^all.Val[i]
		}

		if err := unix.PthreadSigmask(unix.SIG_SETMASK, &all, nil); err != nil {
			done <- fmt.Errorf("pthread_sigmask: %w", err)
			return
		}

		// Set the options.
		a := btrfsSendArgs{fd: int64(w.Fd())}
		if o.Version >= 2 {
			a.flags, a.version = btrfsSendVersion|btrfsSendCompressed, o.Version
		}

		if o.Parent != 0 {
			// Name the parent as a source of clones as well, so that data that moved between
			// its files stays shared.
			parent := o.Parent
			a.parent, a.count, a.sources = o.Parent, 1, &parent
		}

		_, _, e := unix.Syscall(unix.SYS_IOCTL, f.Fd(), btrfsIocSend, uintptr(unsafe.Pointer(&a)))
		runtime.KeepAlive(f)
		runtime.KeepAlive(w)
		if e != 0 {
			done <- fmt.Errorf("BTRFS_IOC_SEND: %w", e)
			return
		}

		done <- nil
	}()

	return <-done
}

// SubvolSetReceived marks the writable subvolume with root f as received: it has the content
// that the subvolume with that UUID, on another filesystem, had at that transaction. A zero UUID
// removes the mark. It commits a transaction.
func SubvolSetReceived(f *os.File, uuid [16]byte, transID uint64) error {
	var b [200]byte
	copy(b[:], uuid[:])
	binary.NativeEndian.PutUint64(b[16:], transID)
	return ioctl(f, "BTRFS_IOC_SET_RECEIVED_SUBVOL", btrfsIocSetReceived, unsafe.Pointer(&b))
}

// BtrfsReceivedCount returns how many subvolumes of the filesystem that f is on are
// marked as received from the subvolume with that UUID. It needs root (CAP_SYS_ADMIN).
func BtrfsReceivedCount(f *os.File, uuid [16]byte) (n int, err error) {
	k := btrfsKey{binary.LittleEndian.Uint64(uuid[:]), btrfsUUIDReceivedKey, binary.LittleEndian.Uint64(uuid[8:])}
	err = btrfsSearch(f, btrfsUUIDTreeID, k, k, 0, func(_ btrfsKey, item []byte) error {
		n = len(item) / 8 // the item is a list of subvolume numbers
		return nil
	})
	return n, ifNot(err, unix.ENOENT) // the filesystem has no such tree yet
}

// BtrfsEncoded describes a range of a file in compressed form, as btrfs stores it on disk.
type BtrfsEncoded struct {
	FileLen         uint64 // length of the range, bytes
	UnencodedLen    uint64 // length of all decompressed data, bytes
	UnencodedOffset uint64 // where the range begins in the decompressed data
	Compression     uint32 // BTRFS_ENCODED_IO_COMPRESSION_*
	Encryption      uint32
}

type btrfsEncodedArgs struct {
	iov             *unix.Iovec
	iovcnt          uint64
	offset          int64
	flags           uint64
	fileLen         uint64
	unencodedLen    uint64
	unencodedOffset uint64
	compression     uint32
	encryption      uint32
	_               [64]byte
}

// BtrfsEncodedWrite writes compressed data to a file at offset. It needs root
// (CAP_SYS_ADMIN). ENOTTY before Linux 5.18. EINVAL: this filesystem cannot store the data in this
// form. ENOSPC: no contiguous space.
func BtrfsEncodedWrite(f *os.File, offset int64, e BtrfsEncoded, data []byte) error {
	if len(data) == 0 {
		return fmt.Errorf("BTRFS_IOC_ENCODED_WRITE: %w", unix.EINVAL)
	}

	iov := unix.Iovec{Base: &data[0]}
	iov.SetLen(len(data))
	a := btrfsEncodedArgs{
		iov: &iov, iovcnt: 1, offset: offset,
		fileLen: e.FileLen, unencodedLen: e.UnencodedLen, unencodedOffset: e.UnencodedOffset,
		compression: e.Compression, encryption: e.Encryption,
	}

	defer runtime.KeepAlive(data)
	return ioctl(f, "BTRFS_IOC_ENCODED_WRITE", btrfsIocEncodedWrite, unsafe.Pointer(&a))
}
