package treecopy

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
)

// fullNode is a file of a filesystem that finds out on close that there is no room, as network filesystems do.
type fullNode struct{ *fs.LoopbackNode }

func (fullNode) WrapChild(_ context.Context, node fs.InodeEmbedder) fs.InodeEmbedder {
	return fullNode{node.(*fs.LoopbackNode)}
}

func (fullNode) Flush(context.Context, fs.FileHandle) syscall.Errno { return syscall.EDQUOT }

// TestErrorOfClose: an error that a filesystem reports only when a file is closed is an error of the copy.
func TestErrorOfClose(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: mounting needs root: run the tests as root")
	}
	if _, err := os.Stat("/dev/fuse"); err != nil {
		t.Skipf("SKIPPED: no FUSE: %v", err)
	}
	root := fullNode{&fs.LoopbackNode{RootData: &fs.LoopbackRoot{Path: t.TempDir()}}}
	at := t.TempDir()
	server, err := fs.Mount(at, root, &fs.Options{MountOptions: fuse.MountOptions{DirectMount: true}})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := server.Unmount(); err != nil {
			t.Error(err)
		}
		server.Wait()
	}()

	src := t.TempDir()
	if err := os.WriteFile(filepath.Join(src, "f"), []byte("content"), 0o600); err != nil {
		t.Fatal(err)
	}
	dst, err := os.Open(at)
	if err != nil {
		t.Fatal(err)
	}
	defer dst.Close()
	if _, err := CopyDir(t.Context(), src, dst, Options{}); !errors.Is(err, syscall.EDQUOT) {
		t.Errorf("copying: %v, wanted EDQUOT", err)
	}

	var archive bytes.Buffer
	w := tar.NewWriter(&archive)
	err = w.WriteHeader(&tar.Header{Name: "g", Mode: 0o600, Size: 7})
	_, werr := w.Write([]byte("content"))
	err = errors.Join(err, werr, w.Close())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Untar(t.Context(), &archive, dst, Options{}); !errors.Is(err, syscall.EDQUOT) {
		t.Errorf("unpacking: %v, wanted EDQUOT", err)
	}
}
