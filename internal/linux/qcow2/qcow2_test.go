package qcow2

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// write makes an image and the raw file with the same content, in which each cluster with data has a text of its own.
func write(t *testing.T, size int64, ranges []Range) (image, raw string) {
	t.Helper()
	l, err := Plan(size, ranges)
	if err != nil {
		t.Fatal(err)
	}

	image, raw = filepath.Join(t.TempDir(), "image.qcow2"), filepath.Join(t.TempDir(), "image.raw")
	f, err := os.Create(image)
	if err != nil {
		t.Fatal(err)
	}
	r, err := os.Create(raw)
	if err != nil {
		t.Fatal(err)
	}

	w := bufio.NewWriter(f)
	err = errors.Join(l.WriteMetadata(w), w.Flush(), r.Truncate(size))
	st, serr := f.Stat()
	if err := errors.Join(err, serr); err != nil {
		t.Fatal(err)
	}

	at := st.Size() / ClusterBytes
	for _, x := range ranges {
		for c := x.From; c < x.To; c++ {
			b := fmt.Appendf(nil, "cluster %d", c) // what follows is a hole of the file
			_, werr := f.WriteAt(b, at*ClusterBytes)
			_, rerr := r.WriteAt(b, c*ClusterBytes)
			err = errors.Join(err, werr, rerr)
			at++
		}
	}

	if err := errors.Join(err, f.Truncate(at*ClusterBytes), f.Close(), r.Close()); err != nil {
		t.Fatal(err)
	}

	if st, err := os.Stat(image); err != nil || st.Size() != l.Clusters()*ClusterBytes {
		t.Errorf("the image has %d bytes, not %d clusters (%v)", st.Size(), l.Clusters(), err)
	}

	return image, raw
}

// TestWrite: QEMU finds nothing wrong with images, and the content that was written.
func TestWrite(t *testing.T) {
	if _, err := exec.LookPath("qemu-img"); err != nil {
		t.Skip("SKIPPED: qemu-img is not installed")
	}
	const table = pointers // clusters that one table of the second level covers
	for name, c := range map[string]struct {
		size   int64
		ranges []Range
	}{
		"empty":          {size: 1 << 20},
		"small":          {4096, []Range{{0, 1}}},
		"odd end":        {ClusterBytes*3 + 512, []Range{{0, 1}, {3, 4}}},
		"later tables":   {5 * table * ClusterBytes, []Range{{2*table + 7, 2*table + 9}, {4*table - 1, 4*table + 1}}},
		"whole table":    {2 * table * ClusterBytes, []Range{{table - 3, table}, {table, table + 1}, {table + 5, table + 6}}},
		"same table":     {table * ClusterBytes, []Range{{0, 1}, {2, 3}, {4, 5}, {table - 1, table}}},
		"two l1":         {pointers*table*ClusterBytes + 512, []Range{{pointers * table, pointers*table + 1}}},
		"more refcounts": {5 * table * ClusterBytes, []Range{{0, 4*table + 100}}},
	} {
		t.Run(name, func(t *testing.T) {
			image, raw := write(t, c.size, c.ranges)
			for _, args := range [][]string{
				{"check", "-f", "qcow2", image}, {"compare", "-f", "qcow2", "-F", "raw", image, raw},
			} {
				if out, err := exec.Command("qemu-img", args...).CombinedOutput(); err != nil {
					t.Errorf("qemu-img %v: %v: %s", args, err, out)
				}
			}
		})
	}
}

// TestPlanRefuses: a layout is refused that no image can have.
func TestPlanRefuses(t *testing.T) {
	for _, c := range []struct {
		size   int64
		ranges []Range
	}{
		{}, {size: -1}, {size: 1 << 60}, {size: 1000},
		{1 << 20, []Range{{0, 17}}}, {1 << 20, []Range{{3, 3}}}, {1 << 20, []Range{{3, 4}, {2, 3}}},
	} {
		if _, err := Plan(c.size, c.ranges); err == nil {
			t.Errorf("%+v is accepted", c)
		}
	}
}
