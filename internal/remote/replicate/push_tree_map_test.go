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

// makeOld makes the newest point of a head one of version 1, as an older pando has written it.
func (w *world) makeOld(rp *repo.Repo, head string) {
	w.t.Helper()
	ctx := w.t.Context()
	h, _, err := rp.Head(ctx, head)
	if err != nil {
		w.t.Fatal(err)
	}
	m, err := rp.Manifest(ctx, w.newest(rp, h).Manifest)
	if err != nil {
		w.t.Fatal(err)
	}
	seg, err := rp.NewSegment(repo.NewID(), 0)
	if err != nil {
		w.t.Fatal(err)
	}
	uses := map[repo.Segment]int64{}
	for region := uint32(0); regionStart(region) < m.SizeBytes; region++ {
		pieces, err := regionPieces(ctx, rp, rp.ReadNodes, &m, region)
		if err != nil {
			w.t.Fatal(err)
		}
		if len(pieces) == 0 {
			continue
		}
		b, err := repo.EncodePage(pieces)
		if err != nil {
			w.t.Fatal(err)
		}
		packed, codec := repo.Compress(nil, b)
		f, err := seg.Add(packed, codec, len(b))
		if err != nil {
			w.t.Fatal(err)
		}
		m.Pages = append(m.Pages, repo.Page{Region: region, Frame: f})
		pageUses(uses, 1, m.Pages[len(m.Pages)-1], pieces)
	}
	if err := rp.PutSegment(ctx, seg.Segment(), seg.Finish()); err != nil {
		w.t.Fatal(err)
	}
	m.Version, m.Map = 1, repo.NodeRef{}
	if m.Uses, err = usesOf(uses); err != nil {
		w.t.Fatal(err)
	}
	if err := rp.DeleteManifest(ctx, m.ID); err != nil {
		w.t.Fatal(err)
	}
	if err := rp.PutManifest(ctx, m); err != nil {
		w.t.Fatal(err)
	}
}

// TestPushConvertsOldMaps: what is pushed over a point of version 1 is of version 2, whole, and costs its own changes
// and a map; the next push costs only its changes. Prune and pull go on with both.
func TestPushConvertsOldMaps(t *testing.T) {
	w := newWorld(t)
	rp := w.open()
	const size = 2500 * mib
	w.importImage("g", size, func(f *os.File) {
		noise(t, f, 1, 0, 10*mib)
		noise(t, f, 2, 1020*mib, 10*mib)
		for i := range int64(300) {
			noise(t, f, uint64(i), 1100*mib+i*mib, 4096)
		}
		noise(t, f, 4, size-8192, 8192)
	})
	w.clone("g", "v")
	w.push("v")
	w.makeOld(rp, "g")
	w.makeOld(rp, "v")

	w.edit("v", func(f *os.File) {
		noise(t, f, 5, 1200*mib+4096, 8192)
		punch(t, f, 1300*mib, 20*mib)
	})
	if out := w.push("v")[0]; out.Full || out.ReadBytes > 64<<10 || out.UploadedBytes > 128<<10 {
		t.Errorf("the push that converts: %+v", out)
	}
	w.checkPoint(rp, "v", w.image("v"))
	w.edit("v", func(f *os.File) { noise(t, f, 6, 3*mib, 4096) })
	if out := w.push("v")[0]; out.UploadedBytes > 32<<10 {
		t.Errorf("the next push: %+v", out)
	}
	w.checkPoint(rp, "v", w.image("v"))

	// A golden that was changed in place is compared, not merged: the same.
	w.makeOld(rp, "v")
	if err := w.e.DropLinks(t.Context(), rp.ID().String()); err != nil {
		t.Fatal(err)
	}
	w.edit("v", func(f *os.File) { noise(t, f, 7, 100*mib, 4096) })
	w.push("v")
	w.checkPoint(rp, "v", w.image("v"))

	if _, err := prune(t.Context(), rp, PruneRequest{Policy: Policy{Last: 1}}); err != nil {
		t.Fatal(err)
	}
	w.checkPoint(rp, "v", w.image("v"))
	b := &bench{t: t, store: w.store, repo: rp}
	b.verified(100)
}

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
