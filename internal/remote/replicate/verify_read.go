package replicate

import (
	"cmp"
	"context"
	"math"
	"math/rand/v2"
	"slices"

	"pando/internal/base/progress"
	"pando/internal/remote/repo"

	"golang.org/x/sync/errgroup"
)

// readers is the number of segments that are read, and held in memory, at the same time.
const readers = 4

// maxGroup is the number of expectations that are checked in one read of a segment. Only maps made to cause trouble
// have more.
const maxGroup = 128 << 10

// readData reads the segments that volumes need, or a sample of them, each once, and compares them with what the
// volumes expect.
func (v *verifier) readData(ctx context.Context) error {
	chosen := v.chooseSegments(ctx)
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(readers)
	var group []expected
	read := func() {
		if len(group) == 0 {
			return
		}
		n, all := group[0].segment, group
		group = nil
		g.Go(func() error { return v.readSegment(gctx, n, all) })
	}

	// Expectations come in order of segments: read a segment when all of its expectations are there.
	for x, err := range v.expectations.sorted() {
		if err == nil {
			err = gctx.Err()
		}
		if err != nil {
			return cmp.Or(g.Wait(), err)
		}
		if !chosen[x.segment] {
			continue
		}
		if len(group) > 0 && group[0].segment != x.segment || len(group) == maxGroup {
			read()
		}
		group = append(group, x)
	}

	read()
	return g.Wait()
}

// chooseSegments reports for each segment whether it is read.
func (v *verifier) chooseSegments(ctx context.Context) []bool {
	var all []int
	for i, s := range v.segments {
		if _, ok := v.listed[s.Segment]; ok { // others are reported as missing
			all = append(all, i)
		}
	}

	// Sort, so that the choice depends only on the seed: the places depend on which span was faster.
	slices.SortFunc(all, func(a, b int) int { return compareSegment(v.segments[a].Segment, v.segments[b].Segment) })
	if v.ReadPercent < 100 {
		v.out.Seed = v.Seed
		rnd := rand.New(rand.NewPCG(v.Seed, 0))
		rnd.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
		all = all[:int(math.Ceil(float64(len(all))*v.ReadPercent/100))]
	}

	chosen, total := make([]bool, len(v.segments)), int64(0)
	packs := map[repo.Pack]bool{}
	for _, i := range all {
		chosen[i] = true
		total += v.storedBytes(v.segments[i].Segment, v.listed[v.segments[i].Segment], packs)
	}

	progress.From(ctx).Start(progress.ReadingData, int64(len(all)), total)
	return chosen
}

// readSegment reads one segment, and checks what is expected of it, in order of frames.
func (v *verifier) readSegment(ctx context.Context, n uint32, all []expected) error {
	s := v.segments[n].Segment
	left, blamed := all, false
	fail := func(x expected, why string) {
		blamed = true
		v.noteFault(x, why)
	}

	// Scan the frames, and check the expectations of each.
	err := v.repo.ScanSegment(ctx, s, func(f repo.Frame, content repo.FrameContent, err error) error {
		for ; len(left) > 0 && left[0].index <= f.Index; left = left[1:] {
			x := left[0]
			switch {
			case x.index < f.Index:
				fail(x, "the segment has no such frame")
			case !x.matchesFrame(f):
				fail(x, "the map and the segment describe the frame differently")
			case err != nil:
				fail(x, err.Error())
			default:
				if why := v.contentFault(x, content); why != "" {
					fail(x, why)
				}
			}
		}
		if err != nil && !blamed && v.lostReason(s) == "" {
			blamed = true
			v.report(Problem{Object: "segments/" + s.String(),
				Message: "damaged in a part that no checked point needs: " + err.Error()})
		}

		return nil
	})

	switch {
	case isUnreadable(err):
		v.mu.Lock()
		v.segments[n].fault, v.damaged = err.Error(), true
		v.mu.Unlock()
	case err != nil:
		return err
	default:
		for _, x := range left {
			fail(x, "the segment has no such frame")
		}
	}

	v.mu.Lock()
	defer v.mu.Unlock()

	if !v.segments[n].read { // a segment with more than maxGroup expectations is read several times, but counted once
		size := v.storedBytes(s, v.listed[s], v.packsRead)
		progress.From(ctx).Add(1, size)
		v.segments[n].read = true
		v.out.ReadSegments++
		v.out.ReadBytes += size
	}

	return nil
}

// contentFault says why the content of a frame is not as expected, and returns "" if it is.
func (v *verifier) contentFault(x expected, c repo.FrameContent) string {
	length := int64(x.length)
	if length == 0 { // a whole page
		length = int64(c.Frame.Plain) - int64(x.within)
	}

	part, err := c.Part(x.within, length)
	switch {
	case err != nil:
		return err.Error()
	case x.sum != repo.Sum{} && !v.repo.HasSum(part, x.sum):
		return "the frame's content is not what was pushed"
	}

	return ""
}

// noteFault records that an expectation does not hold.
func (v *verifier) noteFault(x expected, why string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if len(v.faults) >= maxFaults {
		v.segments[x.segment].fault, v.damaged = why, true
		return
	}
	v.faults[x] = why
}
