package replicate

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"pando/internal/driver/reflink"
	"pando/internal/remote/repo"
	"pando/internal/testing/storetest"
	"pando/internal/testing/testfs"
)

// scatterBlocks makes a volume with so many single blocks all over it, pushed in as many pushes as there are rounds.
func scatterBlocks(t *testing.T, w *world, size int64, blocks, rounds int) {
	t.Helper()
	w.importImage("g", size, func(f *os.File) { noise(t, f, 1, 0, mib) })
	w.clone("g", "v")
	w.push("v")
	rnd := rand.New(rand.NewPCG(uint64(size), 1))
	b := make([]byte, repo.BlockBytes)
	for range rounds {
		w.edit("v", func(f *os.File) {
			for range blocks / rounds {
				for i := range b {
					b[i] = byte(rnd.Uint32())
				}
				if _, err := f.WriteAt(b, rnd.Int64N(size/repo.BlockBytes)*repo.BlockBytes); err != nil {
					t.Fatal(err)
				}
			}
		})
		w.push("v")
	}
}

// TestOneBlockCostsLittle: a push of one changed block stores at most 64 KiB and asks little of the store, in a
// volume with many scattered changes, of any size.
func TestOneBlockCostsLittle(t *testing.T) {
	for _, c := range []struct {
		size           int64
		blocks, rounds int
	}{{1 << 30, 8000, 4}, {16 << 40, 4000, 2}} {
		t.Run(fmt.Sprintf("%d GiB", c.size>>30), func(t *testing.T) {
			if c.size > 1<<40 {
				testfs.NotShort(t, "it is about sizes")
			}
			w := worldOn(t, testfs.XFS(t, 4<<30), reflink.Name, "file:"+filepath.Join(t.TempDir(), "remote"))
			scatterBlocks(t, w, c.size, c.blocks, c.rounds)
			rp := w.open()
			for i := range int64(3) {
				w.edit("v", func(f *os.File) { noise(t, f, uint64(100+i), c.size/7*(i+1)/4096*4096, 4096) })
				before := w.store.Count()
				bytes := w.stored()
				out := w.push("v")[0]
				calls := w.store.Calls()[before:]
				grown := w.stored() - bytes
				gets := 0
				for _, c := range calls {
					if c.Op == storetest.Get {
						gets++
					}
				}
				t.Logf(
					"one block: %d bytes uploaded, %d stored, %d requests, of them %d reads, %.1f ms",
					out.UploadedBytes,
					grown,
					len(calls),
					gets,
					out.Seconds*1000,
				)
				if out.UploadedBytes > 64<<10 || grown > 64<<10 {
					t.Errorf("one block costs %d bytes, %d are stored", out.UploadedBytes, grown)
				}
				if len(calls) > 24 { // eleven, those of a check, and what is far of the path to the block
					for _, c := range calls {
						t.Log(c)
					}
					t.Errorf("one block takes %d requests", len(calls))
				}
			}
			h, _, err := rp.Head(t.Context(), "v")
			if err != nil {
				t.Fatal(err)
			}
			m, err := rp.Manifest(t.Context(), w.newest(rp, h).Manifest)
			if err != nil || m.Map.Pieces < int64(c.blocks)*9/10 {
				t.Errorf("the volume has %d pieces, %v", m.Map.Pieces, err)
			}
		})
	}
}

// stored is how many bytes are on the remote.
func (w *world) stored() (n int64) {
	w.t.Helper()
	for o, err := range w.store.List(w.t.Context(), "") {
		if err != nil {
			w.t.Fatal(err)
		}
		n += o.Bytes
	}
	return n
}
