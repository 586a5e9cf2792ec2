package qcow2

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// openImage opens an image file.
func openImage(t *testing.T, path string) (*Reader, error) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	st, err := f.Stat()
	if err != nil {
		t.Fatal(err)
	}
	return Open(f, st.Size())
}

// TestReadWhatQEMUWrites: images of QEMU, of every version, cluster size and compression, have the same content for
// Reader.
func TestReadWhatQEMUWrites(t *testing.T) {
	if _, err := exec.LookPath("qemu-img"); err != nil {
		t.Skip("SKIPPED: qemu-img is not installed")
	}

	// A disk with data that can be compressed and data that cannot, holes, and an odd end.
	raw := filepath.Join(t.TempDir(), "raw")
	want := make([]byte, 3<<20+512)
	r := rand.New(rand.NewPCG(1, 2))
	for i := range 300 << 10 {
		want[100<<10+i] = byte(r.Uint32())
	}
	copy(want[2<<20:], bytes.Repeat([]byte("text "), 50000))
	copy(want[3<<20:], "end")
	if err := os.WriteFile(raw, want, 0o600); err != nil {
		t.Fatal(err)
	}

	for name, args := range map[string][]string{
		"v2":        {"-o", "compat=0.10"},
		"v3":        nil,
		"small":     {"-o", "cluster_size=512"},
		"large":     {"-o", "cluster_size=2M"},
		"deflate":   {"-c"},
		"deflate2":  {"-c", "-o", "compat=0.10,cluster_size=4k"},
		"zstd":      {"-c", "-o", "compression_type=zstd"},
		"allocated": {"-o", "preallocation=metadata"},
		"lazy":      {"-o", "lazy_refcounts=on"},
	} {
		t.Run(name, func(t *testing.T) {
			image := filepath.Join(t.TempDir(), "image")
			args := append([]string{"convert", "-f", "raw", "-O", "qcow2"}, append(args, raw, image)...)
			if out, err := exec.Command("qemu-img", args...).CombinedOutput(); err != nil {
				t.Fatalf("%v: %s", err, out)
			}

			q, err := openImage(t, image)
			if err != nil {
				t.Fatal(err)
			}
			got, err := io.ReadAll(io.NewSectionReader(q, 0, q.Size()))
			if err != nil || !bytes.Equal(got, want) {
				t.Errorf("%d bytes differ from %d, %v", len(got), len(want), err)
			}

			each, sum := make([]byte, q.Size()), int64(0)
			err = q.Each(func(off int64, data []byte) error { sum += int64(copy(each[off:], data)); return nil })
			data, derr := q.DataBytes()
			if err := errors.Join(err, derr); err != nil || !bytes.Equal(each, want) || data != sum || sum == 0 {
				t.Errorf("Each has read %d of %d bytes, %v", sum, data, err)
			}
		})
	}
}

// TestReadWhatItWrites: Reader and writer agree.
func TestReadWhatItWrites(t *testing.T) {
	image, raw := write(t, 40*ClusterBytes+512, []Range{{1, 4}, {9, 10}, {40, 41}})
	q, err := openImage(t, image)
	if err != nil {
		t.Fatal(err)
	}
	want, werr := os.ReadFile(raw)
	got, err := io.ReadAll(io.NewSectionReader(q, 0, q.Size()))
	if err := errors.Join(werr, err); err != nil || !bytes.Equal(got, want) {
		t.Errorf("%d bytes, wanted %d: %v", len(got), len(want), err)
	}
}

// TestReadRefuses: what Reader cannot read correctly is refused.
func TestReadRefuses(t *testing.T) {
	image, _ := write(t, 1<<20, []Range{{0, 2}})
	good, err := os.ReadFile(image)
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		at   int
		b    string
		want error
	}{
		"magic":      {0, "QFI\x00", ErrNotQcow2},
		"version":    {4, "\x00\x00\x00\x04", ErrUnsupported},
		"backing":    {8, "\x00\x00\x00\x00\x00\x00\x01\x00", ErrUnsupported},
		"clusters":   {20, "\x00\x00\x00\x40", ErrDamaged},
		"size":       {24, "\xff", ErrDamaged},
		"large":      {24, "\x00\x10", ErrDamaged},
		"encryption": {32, "\x00\x00\x00\x02", ErrUnsupported},
		"l1 short":   {36, "\x00\x00\x00\x00", ErrDamaged},
		"l1 outside": {40, "\x01", ErrDamaged},
		"features":   {72, "\x00\x00\x00\x00\x00\x00\x00\x10", ErrUnsupported},
		"external":   {72, "\x00\x00\x00\x00\x00\x00\x00\x04", ErrUnsupported},
		"corrupt":    {72, "\x00\x00\x00\x00\x00\x00\x00\x02", ErrUnsupported},
	} {
		b := bytes.Clone(good)
		copy(b[c.at:], c.b)
		if _, err := Open(bytes.NewReader(b), int64(len(b))); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, wanted %v", name, err, c.want)
		}
	}

	// A truncated image, and one whose tables lead outside.
	for _, n := range []int{4, 50, ClusterBytes, len(good) - ClusterBytes} {
		q, err := Open(bytes.NewReader(good[:n]), int64(n))
		if err == nil {
			err = q.Each(func(int64, []byte) error { return nil })
		}
		if !errors.Is(err, ErrDamaged) {
			t.Errorf("%d bytes of %d: %v", n, len(good), err)
		}
	}
}

// FuzzOpen: no image makes Reader panic, or use much memory.
func FuzzOpen(f *testing.F) {
	l, err := Plan(4096, []Range{{0, 1}})
	if err != nil {
		f.Fatal(err)
	}
	var b bytes.Buffer
	if err := l.WriteMetadata(&b); err != nil {
		f.Fatal(err)
	}
	f.Add(append(b.Bytes(), make([]byte, ClusterBytes)...))
	f.Fuzz(func(t *testing.T, b []byte) {
		q, err := Open(bytes.NewReader(b), int64(len(b)))
		if err != nil || q.Size() > 64<<20 {
			return
		}
		_ = q.Each(func(off int64, data []byte) error {
			if off+int64(len(data)) > q.Size() {
				t.Errorf("data up to byte %d of %d", off+int64(len(data)), q.Size())
			}
			return nil
		})
	})
}
