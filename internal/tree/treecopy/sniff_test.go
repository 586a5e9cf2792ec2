package treecopy

import (
	"bytes"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"pando/internal/base/errs"
)

func TestSniff(t *testing.T) {
	noise := make([]byte, 300<<10)
	r := rand.New(rand.NewPCG(3, 4))
	for i := range noise {
		noise[i] = byte(r.Uint32())
	}
	plain := tarball(t, fileEnt("f", string(noise)))
	v7 := bytes.Clone(plain)
	copy(v7[257:265], make([]byte, 8))
	fixChecksum(v7)
	for name, c := range map[string]struct {
		data []byte
		want Format
	}{
		"tar":            {plain, Tar},
		"v7":             {v7, Tar},
		"tar.gz":         {compress(t, "gzip", plain), TarGzip},
		"tar.zst":        {compress(t, "zstd", plain), TarZstd},
		"small tar.gz":   {compress(t, "gzip", tarball(t, fileEnt("f", "x"))), TarGzip},
		"empty tar.zst":  {compress(t, "zstd", make([]byte, 10240)), TarZstd},
		"gzipped zeros":  {compress(t, "gzip", make([]byte, 1<<20)), Compressed},
		"gzipped disk":   {compress(t, "gzip", append(make([]byte, 1024), noise...)), Compressed},
		"zstd of a disk": {compress(t, "zstd", append(make([]byte, 1024), noise[:1024]...)), Compressed},
		"nothing":        {nil, Unknown},
		"zeros":          {make([]byte, 1<<20), Unknown},
		"empty tar":      {make([]byte, 10240), EmptyTar},
		"one block":      {make([]byte, 512), EmptyTar},
		"half a block":   {make([]byte, 700), Unknown},
		"noise":          {noise, Unknown},
		"blanks":         {bytes.Repeat([]byte(" "), 4096), Unknown},
		"gzipped noise":  {compress(t, "gzip", noise), Compressed},
		"zstd of noise":  {compress(t, "zstd", noise), Compressed},
		"half a header":  {plain[:300], Unknown},
		"xz":             {append([]byte("\xfd7zXZ\x00"), noise...), Compressed},
		"broken gzip":    {append([]byte("\x1f\x8b\x08"), noise...), Compressed},
		"broken zstd":    {append([]byte("\x28\xb5\x2f\xfd"), noise...), Compressed},
		"wrong checksum": {flip(bytes.Clone(plain), 0), Unknown},
	} {
		if got := Sniff(c.data[:min(len(c.data), SniffLen)]); got != c.want {
			t.Errorf("%s: %s, want %s", name, got, c.want)
		}
		name := filepath.Join(t.TempDir(), "f")
		must(t, os.WriteFile(name, c.data, 0o644))
		f := openFile(t, name)
		got, err := SniffFile(f)
		if err != nil || got != c.want {
			t.Errorf("%s: %s, %v", name, got, err)
		}
		if off, _ := f.Seek(0, io.SeekCurrent); off != 0 {
			t.Error("SniffFile has moved the offset")
		}
	}
	if _, err := SniffFile(openFile(t, t.TempDir())); err == nil {
		t.Error("a directory was sniffed")
	}
}

// TestUntarDisk: what begins like an empty archive, and goes on, is none.
func TestUntarDisk(t *testing.T) {
	disk := append(make([]byte, 1024), bytes.Repeat([]byte("data"), 4096)...)
	for name, data := range map[string][]byte{
		"disk": disk, "gzipped disk": compress(t, "gzip", disk), "long after": append(make([]byte, 100<<10),
			1), "zeros": make([]byte, 1<<20),
	} {
		if _, err := Untar(t.Context(), bytes.NewReader(data), openFile(t, t.TempDir()), Options{}); !errs.Is(err,
			errs.Invalid) {
			t.Errorf("%s: %v, wanted Invalid", name, err)
		}
	}
	for _, n := range []int{512, 1024, 10240} {
		if _, err := Untar(t.Context(), bytes.NewReader(make([]byte, n)), openFile(t, t.TempDir()), Options{}); err != nil {
			t.Errorf("an empty archive of %d bytes: %v", n, err)
		}
	}
}
