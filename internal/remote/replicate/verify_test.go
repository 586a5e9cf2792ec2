package replicate

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/remote/objstore"
	"pando/internal/remote/repo"
	"pando/internal/testing/faulttest"
	"pando/internal/testing/storetest"
)

// verify is Verify in a repository that is open.
func verify(ctx context.Context, r *repo.Repo, q VerifyRequest) (*Verified, error) {
	return (&verifier{repo: r, VerifyRequest: q}).verify(ctx)
}

// flipAt changes a bit of one object, in whatever range of it is read.
func flipAt(key string, at int64) storetest.Fault {
	return storetest.Fault{
		Match: func(c storetest.Call) bool { return c.Op == storetest.Get && c.Key == key },
		Times: -1,
		Change: func(c storetest.Call, data []byte) []byte {
			if i := at - c.Offset; i >= 0 && i < int64(len(data)) {
				data[i] ^= 4
			}
			return data
		},
	}
}

// objects lists what is in the store.
func (b *bench) objects() []objstore.Info {
	b.t.Helper()
	var out []objstore.Info
	for o, err := range b.store.List(b.t.Context(), "") {
		if err != nil {
			b.t.Fatal(err)
		}
		out = append(out, o)
	}
	return out
}

// TestEveryFlipIsNoticed changes a bit of every object, at many places. Verify says
// so, and a restore never returns what was not pushed.
func TestEveryFlipIsNoticed(t *testing.T) {
	rnd := faulttest.Rand(t)
	b := newBench(t)
	v := b.history(rnd, "v", nil, 2)
	b.history(rnd, "fork", v, 1)
	_, l, err := beginSession(t.Context(), b.repo, repo.Push, []string{"v"}, repo.Writer{}, v.manifest.ID)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.endSession(context.Background()) }()
	b.prune(PruneRequest{}) // which leaves what it has seen
	seen := map[string]int{}
	for _, o := range b.objects() {
		kind, _, _ := strings.Cut(o.Key, "/")
		for _, at := range []int64{0, 6, 9, 30, 70, o.Bytes / 2, rnd.Int64N(o.Bytes), o.Bytes - 20, o.Bytes - 1} {
			if at < 0 || at >= o.Bytes {
				continue
			}
			seen[kind]++
			f := storetest.Faulty(b.store, flipAt(o.Key, at))
			what := fmt.Sprintf("byte %d of %d of %s", at, o.Bytes, o.Key)
			r, err := repo.Open(t.Context(), f, b.secret)
			if err != nil {
				if kind != "config" {
					t.Errorf("%s: cannot be opened: %v", what, err)
				}
				continue
			}
			out, err := verify(t.Context(), r, VerifyRequest{ReadPercent: 100})
			switch {
			case err != nil:
				t.Errorf("%s: verify ended with %v", what, err)
			case kind == "config":
				t.Errorf("%s: it was opened", what)
			case kind == "prune":
				if len(out.Warnings) != 1 || out.Warnings[0].Object != o.Key || out.TotalProblems != 0 {
					t.Errorf("%s: verify says %+v", what, out)
				}
			case out.TotalProblems == 0:
				t.Errorf("%s: verify finds nothing", what)
			default:
				if !errs.Is(out.Err(), errs.Damaged) || errs.HintOf(out.Err()) == "" {
					t.Errorf("%s: the error is %v", what, out.Err())
				}
				if !slices.ContainsFunc(out.Problems, func(p Problem) bool {
					// Of a page, its map is what cannot be read.
					return p.Object == o.Key && (kind != "segments" || p.Length > 0 || strings.Contains(p.Message, "no checked point"))
				}) {
					t.Errorf("%s: verify says %v", what, out.Problems)
				}
			}
			if kind == "heads" {
				out, err := prune(t.Context(), r, PruneRequest{Policy: Policy{Last: 1}, DryRun: true})
				if err != nil || len(out.Damaged) != 1 || out.Damaged[0].Object != o.Key {
					t.Errorf("%s: prune: %+v, %v", what, out, err)
				}
			}
			for volume, points := range b.truth {
				for point, m := range points {
					now, err := r.Manifest(t.Context(), m.manifest.ID)
					if err != nil {
						continue
					}
					read := *m
					read.manifest = now
					if to, _, err := b.restored(r, &read, nil); err == nil {
						to.same(t, what+", "+volume+"@"+point, m.content)
					} else if kind != "segments" || !errs.Is(err, errs.Damaged) && !errs.Is(err, errs.TooNew) {
						t.Errorf("%s: restore of %s@%s: %v", what, volume, point, err)
					} else if errs.Is(err, errs.Damaged) && (!strings.Contains(err.Error(), volume+"@"+point) ||
						!strings.Contains(err.Error(), "bytes ")) {
						t.Errorf("%s: the error does not say what is affected: %v", what, err)
					}
				}
			}
			r.Close()
		}
	}
	for _, kind := range []string{"config", "heads", "manifests", "segments", "sessions", "prune"} {
		if seen[kind] == 0 {
			t.Errorf("no object of kind %s was changed", kind)
		}
	}
	b.whole()
}

// TestVerifyFindsWhatIsMissing removes every object in turn, and cuts every segment.
func TestVerifyFindsWhatIsMissing(t *testing.T) {
	rnd := faulttest.Rand(t)
	b := newBench(t)
	b.history(rnd, "fork", b.history(rnd, "v", nil, 3), 1)
	ctx := t.Context()
	for _, o := range b.objects() {
		kind, _, _ := strings.Cut(o.Key, "/")
		if kind != "segments" && kind != "manifests" {
			continue
		}
		data, _, err := b.store.Get(ctx, o.Key, 0, -1)
		if err != nil {
			t.Fatal(err)
		}
		for _, left := range [][]byte{nil, data[:len(data)-1], data[:100]} {
			if err := b.store.Delete(ctx, o.Key); err != nil {
				t.Fatal(err)
			}
			if left != nil {
				if kind == "manifests" {
					continue
				}
				if _, err := b.store.Put(ctx, o.Key, left, objstore.Always); err != nil {
					t.Fatal(err)
				}
			}
			q := VerifyRequest{}
			if len(left) == len(data)-1 {
				q.ReadPercent = 100 // its frames are all there
			}
			out, err := verify(ctx, b.repo, q)
			if err != nil {
				t.Fatal(err)
			}
			if !slices.ContainsFunc(out.Problems, func(p Problem) bool {
				return p.Object == o.Key && p.Volume != "" && p.Point != ""
			}) {
				t.Errorf("%s is gone but for %d bytes, and verify says %v", o.Key, len(left), out.Problems)
			}
		}
		if _, err := b.store.Put(ctx, o.Key, data, objstore.Always); err != nil {
			t.Fatal(err)
		}
	}
	b.whole()
}

// TestVerifyReportsASegmentOnce: a segment that many points need is missing, or is longer or shorter than it was
// written, which only the manifests' sizes show. That is one problem, with the number of the points.
func TestVerifyReportsASegmentOnce(t *testing.T) {
	b := newBench(t)
	v := b.must("v", "p0", small, nil, change{0: block(1), repo.BlockBytes: block(2), 9 * repo.BlockBytes: block(3)},
		false)
	want := []string{"v@p0"}
	for i := range 9 {
		point := fmt.Sprintf("p%d", i+1)
		b.must("v", point, small, v, change{64 * repo.BlockBytes: block(uint64(10 + i))}, false)
		want = append(want, "v@"+point)
	}
	b.must("fork", "only", small, v, change{64 * repo.BlockBytes: block(99)}, true)
	want = append([]string{"fork@only"}, want...)

	key := "segments/" + b.pieces(v)[0].Frame.Segment.String()
	data, _, err := b.store.Get(t.Context(), key, 0, -1)
	if err != nil {
		t.Fatal(err)
	}
	for _, left := range [][]byte{nil, data[:100], data[:len(data)-1], append(slices.Clone(data), 0)} {
		if err := b.store.Delete(t.Context(), key); err != nil {
			t.Fatal(err)
		}
		words := "the segment is missing"
		if left != nil {
			words = fmt.Sprintf("the segment has %d bytes instead of %d", len(left), len(data))
			if _, err := b.store.Put(t.Context(), key, left, objstore.Always); err != nil {
				t.Fatal(err)
			}
		}
		for _, percent := range []float64{0, 100} {
			out, err := verify(t.Context(), b.repo, VerifyRequest{ReadPercent: percent})
			if err != nil || len(out.Problems) != 1 || out.TotalProblems != 1 {
				t.Errorf("%s, %v %% read: %v, %v", words, percent, out, err)
				continue
			}
			p := out.Problems[0]
			if p.Message != words || p.Object != key || p.Volumes != 2 || p.Points != 11 || !slices.Equal(p.Affected, want) {
				t.Errorf("%s, %v %% read: %+v, not of %v", words, percent, p, want)
			}
			if !strings.HasSuffix(p.String(), "; 11 points of 2 volumes are affected") {
				t.Errorf("in words: %s", p)
			}
		}
	}
}

// TestVerifyOfWhatIsRemovedMeanwhile: a point goes, with its segments, at every step
// of a verify. That is no problem.
func TestVerifyOfWhatIsRemovedMeanwhile(t *testing.T) {
	rnd := faulttest.Rand(t)
	for at := 0; ; at++ {
		b := newBench(t)
		v := b.history(rnd, "v", nil, 2)
		anew := change{}
		for x := range v.content {
			anew[x] = block(rnd.Uint64())
		}
		b.must("v", "p3", small, v, anew, false)
		r, f := b.faulty(storetest.Fault{At: at, Times: 0, Match: func(c storetest.Call) bool {
			return true
		}, Change: nil, When: storetest.Before, Err: nil})
		f.Heal()
		n, done := 0, false
		f.Add(storetest.Fault{Times: -1, Match: func(storetest.Call) bool {
			if n++; n == at+1 {
				done = true
				b.prune(PruneRequest{Policy: Policy{Last: 1}})
			}
			return false
		}})
		out, err := verify(t.Context(), r, VerifyRequest{ReadPercent: 100})
		if !done {
			break
		}
		if err != nil || out.TotalProblems != 0 {
			t.Fatalf("pruned at call %d: %v, %v", at, err, out)
		}
	}
}

// TestVerifyEveryFault: a store that does not answer is an error, never a problem.
func TestVerifyEveryFault(t *testing.T) {
	b := newBench(t)
	b.history(faulttest.Rand(t), "v", nil, 2)
	for i := 0; ; i++ {
		r, f := b.faulty(storetest.Fault{At: i, Err: storetest.Permanent(errs.IO)})
		out, err := verify(t.Context(), r, VerifyRequest{ReadPercent: 100})
		if f.Fired() == 0 {
			break
		}
		if !errs.Is(err, errs.IO) || out != nil {
			t.Errorf("call %d failed: %v, %v", i, err, out)
		}
	}
}

func TestVerifySample(t *testing.T) {
	rnd := faulttest.Rand(t)
	b := newBench(t)
	b.blocks = 1
	b.history(rnd, "v", nil, 12)
	read := func(percent float64, seed uint64) []string {
		r, f := b.faulty()
		out, err := verify(t.Context(), r, VerifyRequest{ReadPercent: percent, Seed: seed})
		if err != nil {
			t.Fatal(err)
		}
		var keys []string
		for _, c := range f.Calls() {
			if c.Op == storetest.Get && strings.HasPrefix(c.Key, "segments/") && c.Length > repo.SegmentBytes {
				keys = append(keys, c.Key)
			}
		}
		slices.Sort(keys)
		if len(keys) != out.ReadSegments {
			t.Errorf("%d segments were read, and it says %d", len(keys), out.ReadSegments)
		}
		return keys
	}
	all, some, same, others := read(100, 1), read(25, 1), read(25, 1), read(25, 2)
	if len(all) < 12 || len(some) != (len(all)+3)/4 || !slices.Equal(some, same) {
		t.Errorf("of %d segments were read %d, then %d", len(all), len(some), len(same))
	}
	if slices.Equal(some, others) {
		t.Error("another seed makes the same choice")
	}
	if n := len(read(0, 1)); n != 0 {
		t.Errorf("%d segments were read without --read-data", n)
	}
	if n := len(read(0.01, 1)); n != 1 {
		t.Errorf("%d segments were read of a little", n)
	}
}

func TestVerifyOfWhatDoesNotFit(t *testing.T) {
	rnd := faulttest.Rand(t)
	b := newBench(t)
	ctx := t.Context()
	v := b.history(rnd, "v", nil, 2)
	relist := func(m repo.Manifest, change func(*repo.Point)) {
		t.Helper()
		m.ID = repo.NewID()
		if err := b.repo.PutManifest(ctx, m); err != nil {
			t.Fatal(err)
		}
		h, ver, err := b.repo.Head(ctx, "v")
		if err != nil {
			t.Fatal(err)
		}
		h.Recent = slices.Clone(h.Recent[:2])
		pt := h.Recent[1]
		pt.Seq, pt.Name, pt.Manifest, h.NextSeq = h.NextSeq, "odd", m.ID, h.NextSeq+1
		if change != nil {
			change(&pt)
		}
		h.Recent = append(h.Recent, pt)
		if _, err := b.repo.PutHead(ctx, h, ver); err != nil {
			t.Fatal(err)
		}
	}
	find := func(words string) {
		t.Helper()
		out, err := verify(ctx, b.repo, VerifyRequest{ReadPercent: 100})
		if err != nil {
			t.Fatal(err)
		}
		if !slices.ContainsFunc(out.Problems, func(p Problem) bool {
			return p.Volume == "v" && p.Point == "odd" && strings.Contains(p.Message, words)
		}) {
			t.Errorf("nothing of %q in %v", words, out.Problems)
		}
	}
	relist(v.manifest, func(p *repo.Point) { p.FS = "xfs" })
	find("contradicts the volume")

	// A map that leads to other content than it promises.
	pieces := b.pieces(v)
	i := slices.IndexFunc(pieces, func(p repo.Piece) bool { return p.Sum != repo.Sum{} })
	pieces[i].Sum[3] ^= 1
	withMap := func(pieces []repo.Piece) repo.Manifest {
		w, err := b.repo.NewSegment(repo.NewID(), 0)
		if err != nil {
			t.Fatal(err)
		}
		m := v.manifest
		tr, err := newTree(ctx, b.repo.ReadNodes, nil, m.SizeBytes)
		for cell := uint32(0); err == nil && cellStart(cell) < m.SizeBytes; cell++ {
			from, to := cellStart(cell), cellStart(cell+1)
			err = tr.replace(ctx, from, to, piecesIn(pieces, from, to))
		}
		if err == nil {
			m.Map, err = tr.finishTree(ctx, func(_ context.Context, b []byte, codec repo.Codec, plain int) (repo.Frame, error) {
				return w.Add(b, codec, plain)
			})
		}
		if err == nil {
			err = b.repo.PutSegment(ctx, w.Segment(), w.Finish())
		}
		if err != nil {
			t.Fatal(err)
		}
		m.Uses = append(slices.Clone(m.Uses), repo.Use{Segment: w.Segment()})
		return m
	}
	relist(withMap(pieces), nil)
	find("is not what was pushed")
	pieces[i].Sum[3] ^= 1
	for j := range pieces {
		if f := &pieces[j].Frame; f.Segment == pieces[i].Frame.Segment && f.Index == pieces[i].Frame.Index && j != i {
			f.Plain += repo.BlockBytes
		}
	}
	pieces[i].Frame.Plain += repo.BlockBytes
	relist(withMap(pieces), nil)
	find("describe the frame differently")
}

func TestVerifyNames(t *testing.T) {
	rnd := faulttest.Rand(t)
	b := newBench(t)
	b.history(rnd, "v", nil, 1)
	w := b.history(rnd, "w", nil, 1)
	if err := b.repo.DeleteManifest(t.Context(), w.manifest.ID); err != nil {
		t.Fatal(err)
	}
	if _, err := b.store.Put(t.Context(), "notes.txt", []byte("hello"), objstore.Always); err != nil {
		t.Fatal(err)
	}
	out, err := verify(t.Context(), b.repo, VerifyRequest{Names: []string{"v"}})
	if err != nil || out.TotalProblems != 0 || out.Volumes != 1 || !slices.Equal(out.Unknown, []string{"notes.txt"}) {
		t.Errorf("v: %v, %+v", err, out)
	}
	out, err = verify(t.Context(), b.repo, VerifyRequest{})
	if err != nil || out.TotalProblems != 1 || out.Problems[0].Volume != "w" || out.Problems[0].Point != "p1" {
		t.Errorf("all: %v, %+v", err, out)
	}
	if _, err := verify(t.Context(), b.repo, VerifyRequest{Names: []string{"none"}}); !errs.Is(err, errs.NotFound) {
		t.Errorf("a volume that is not there: %v", err)
	}
	for _, q := range []VerifyRequest{{ReadPercent: -1}, {ReadPercent: 101}, {Names: []string{"a/b"}}} {
		if _, err := verify(t.Context(), b.repo, q); !errs.Is(err, errs.Invalid) {
			t.Errorf("%+v: %v", q, err)
		}
	}
}

func TestVolumes(t *testing.T) {
	rnd := faulttest.Rand(t)
	b := newBench(t)
	b.history(rnd, "fork", b.history(rnd, "v", nil, 2), 1)
	b.history(rnd, "gone", nil, 1)
	if _, err := removeVolume(t.Context(), b.repo, ref.Ref{Name: "gone"}); err != nil {
		t.Fatal(err)
	}
	w := repo.Writer{Pool: "p", Host: "pusher"}
	_, push, err := beginSession(t.Context(), b.repo, repo.Push, []string{"v", "new"}, w)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = push.endSession(context.Background()) }()
	_, pull, err := beginSession(t.Context(), b.repo, repo.Pull, nil, repo.Writer{Pool: "p", Host: "puller"},
		b.truth["fork"]["p1"].manifest.ID)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = pull.endSession(context.Background()) }()
	listing, err := listVolumes(t.Context(), b.repo)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	all := listing.Volumes
	for i := range all {
		l := &all[i]
		for p, err := range listing.Points(t.Context(), l) {
			if err != nil {
				t.Fatal(err)
			}
			l.Points = append(l.Points, p)
		}
		s := fmt.Sprint(l.Name, " ", len(l.Points))
		for _, w := range l.Operations {
			s += " " + w.Op + " by " + w.Host
		}
		got = append(got, s)
	}
	// What is being pushed for the first time is there, too, without a point.
	want := []string{"fork 1 pull by puller", "new 0 push by pusher", "v 2 push by pusher"}
	if !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
	if all[0].Points[0].Origin != "v@p2" || all[2].SizeBytes != small {
		t.Errorf("got %+v", all)
	}
	if b, err := json.Marshal(all); err != nil || strings.Contains(string(b), "null") {
		t.Errorf("as JSON: %s, %v", b, err)
	}
}
