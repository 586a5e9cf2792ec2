package replicate

import (
	"context"
	"math"
	"math/rand/v2"
	"slices"
	"sync"

	"pando/internal/errs"
	"pando/internal/repo"

	"golang.org/x/sync/errgroup"
)

// How much data is checked at once.
const (
	readers      = 4       // segments in memory
	maxChecks    = 1 << 20 // expectations in memory
	checksInPage = 64      // about how many a page has for one segment, to plan with
)

// expected is what a page, or a stream, expects of a frame.
type expected struct {
	frame  repo.Frame
	within uint32
	length uint32
	sum    repo.Sum
	page   *page
	region uint32
	offset int64
	stream int // place in verifier.streams, if page is nil
}

// readData reads segments that volumes need, all or a sample of them, and compares
// them with what the volumes expect.
func (v *verifier) readData(ctx context.Context) error {
	var chosen []uint32
	total := int64(0)
	for i, s := range v.segments {
		if _, ok := v.listed[s]; ok { // of others it was said that they are missing
			chosen = append(chosen, uint32(i))
		}
	}
	// The numbers depend on who was faster, the choice only on the seed.
	slices.SortFunc(chosen, func(a, b uint32) int { return compareSegment(v.segments[a], v.segments[b]) })
	if v.ReadPercent < 100 {
		v.out.Seed = v.Seed
		rnd := rand.New(rand.NewPCG(v.Seed, 0))
		rnd.Shuffle(len(chosen), func(i, j int) { chosen[i], chosen[j] = chosen[j], chosen[i] })
		chosen = chosen[:int(math.Ceil(float64(len(chosen))*v.ReadPercent/100))]
	}
	for _, n := range chosen {
		total += v.listed[v.segments[n]]
	}
	v.Tracker.Start("reading data", int64(len(chosen)), total)
	// What pages expect of the chosen segments, in as many goes as memory needs.
	pagesOf := map[uint32][]pageKey{}
	wanted := map[uint32]bool{}
	for _, n := range chosen {
		wanted[n] = true
	}
	for key, p := range v.pages {
		for _, n := range p.needs {
			if wanted[n.segment] {
				pagesOf[n.segment] = append(pagesOf[n.segment], key)
			}
		}
	}
	for len(chosen) > 0 {
		n, weight := 0, 0
		keys := map[pageKey]bool{}
		for n < len(chosen) && (n == 0 || weight < maxChecks) {
			for _, k := range pagesOf[chosen[n]] {
				keys[k] = true
				weight += checksInPage
			}
			n++
		}
		if err := v.readSome(ctx, chosen[:n], keys); err != nil {
			return err
		}
		chosen = chosen[n:]
	}
	return nil
}

// readSome checks some segments.
func (v *verifier) readSome(ctx context.Context, chosen []uint32, keys map[pageKey]bool) error {
	expect := map[repo.Segment][]expected{}
	for _, n := range chosen {
		expect[v.segments[n]] = nil
	}
	var mu sync.Mutex
	add := func(x expected) {
		if _, is := expect[x.frame.Segment]; is {
			expect[x.frame.Segment] = append(expect[x.frame.Segment], x)
		}
	}
	list := make([]pageKey, 0, len(keys))
	for k := range keys {
		list = append(list, k)
	}
	err := eachOf(ctx, list, func(ctx context.Context, k pageKey) error {
		pieces, err := v.repo.ReadPage(ctx, repo.Page{Region: k.region, Frame: k.frame})
		p := v.pages[k]
		switch {
		case broken(err): // it could be read before: somebody has removed it, or it was damaged just now
			for _, o := range p.owners {
				bad := o.problem("segments/"+k.frame.Segment.String(), "its map cannot be read: %v", err)
				bad.Offset = regionStart(k.region)
				bad.Length = regionEnd(k.region, o.size) - bad.Offset
				v.problem(bad)
			}
			return nil
		case err != nil:
			return err
		}
		mu.Lock()
		defer mu.Unlock()
		add(expected{frame: k.frame, page: p, region: k.region, offset: -1}) // the page itself
		for _, x := range pieces {
			add(expected{x.Frame, x.Within, uint32(x.Length), x.Sum, p, k.region, x.Offset, 0})
		}
		return nil
	})
	if err != nil {
		return err
	}
	for i, s := range v.streams {
		at := int64(0)
		for _, f := range s.frames {
			add(expected{frame: f, length: f.Plain, offset: at, stream: i})
			at += int64(f.Plain)
		}
	}
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(readers)
	for s, all := range expect {
		g.Go(func() error { return v.readSegment(gctx, s, all) })
	}
	return g.Wait()
}

// readSegment checks one segment and what is expected of it.
func (v *verifier) readSegment(ctx context.Context, s repo.Segment, all []expected) error {
	byIndex := map[uint32][]expected{}
	for _, x := range all {
		byIndex[x.frame.Index] = append(byIndex[x.frame.Index], x)
	}
	blamed := false
	err := v.repo.ScanSegment(ctx, s, func(f repo.Frame, content []byte, err error) error {
		for _, x := range byIndex[f.Index] {
			why := ""
			switch {
			case x.frame != f:
				why = "the map says something else of the frame than its segment"
			case err != nil:
				why = err.Error()
			case uint64(x.within)+uint64(x.length) > uint64(len(content)):
				why = "the frame has less than the map wants of it"
			case x.sum != repo.Sum{} && v.repo.Sum(content[x.within:x.within+x.length]) != x.sum:
				why = "the frame holds something else than was pushed there"
			default:
				continue
			}
			blamed = true
			v.blame(x, why)
		}
		delete(byIndex, f.Index)
		if err != nil && !blamed {
			blamed = true
			v.problem(Problem{Object: "segments/" + s.String(), Message: "in a part that was not looked for: " + err.Error()})
		}
		return nil
	})
	switch {
	case errs.Is(err, errs.NotFound) && len(all) == 0:
		return nil // whose it was is said elsewhere, unless nobody needs it any more
	case broken(err):
		for _, x := range all {
			v.blame(x, err.Error())
		}
		if len(all) == 0 {
			v.problem(Problem{Object: "segments/" + s.String(), Message: err.Error()})
		}
	case err != nil:
		return err
	default:
		for _, left := range byIndex {
			for _, x := range left {
				v.blame(x, "the segment has no such frame")
			}
		}
	}
	n := v.listed[s]
	v.Tracker.Add(1, n)
	v.mu.Lock()
	defer v.mu.Unlock()
	v.out.ReadSegments++
	v.out.ReadBytes += n
	return nil
}

// blame reports what is wrong with what was expected, for all points that it is for.
func (v *verifier) blame(x expected, why string) {
	object := "segments/" + x.frame.Segment.String()
	if x.page == nil {
		p := v.streams[x.stream].owner.problem(object, "%s", why)
		p.Offset, p.Length = x.offset, int64(x.length)
		v.problem(p)
		return
	}
	for _, o := range x.page.owners {
		p := o.problem(object, "%s", why)
		p.Offset, p.Length = x.offset, int64(x.length)
		if x.offset < 0 {
			p.Offset = regionStart(x.region)
			p.Length = regionEnd(x.region, o.size) - p.Offset
			p.Message = "its map cannot be read: " + why
		}
		v.problem(p)
	}
}

func compareSegment(a, b repo.Segment) int {
	if c := slices.Compare(a.Session[:], b.Session[:]); c != 0 {
		return c
	}
	return int(int64(a.N) - int64(b.N))
}
