package engine_test

import (
	"archive/tar"
	"bytes"
)

// emptyTar is an archive with one file of size zeros.
func emptyTar(size int) []byte {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	if err := w.WriteHeader(&tar.Header{Name: "zeros", Mode: 0o644, Size: int64(size),
		Typeflag: tar.TypeReg}); err != nil {
		panic(err)
	}
	if _, err := w.Write(make([]byte, size)); err != nil {
		panic(err)
	}
	if err := w.Close(); err != nil {
		panic(err)
	}
	return b.Bytes()
}
