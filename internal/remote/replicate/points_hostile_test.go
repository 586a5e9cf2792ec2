package replicate

import (
	"context"
	"strings"
	"testing"

	"pando/internal/base/ref"
	"pando/internal/remote/objstore"
	"pando/internal/remote/repo"
	"pando/internal/testing/faulttest"
)

// twoHeads is a store that answers with two states of a head in turn.
type twoHeads struct {
	objstore.Store
	states [2][]byte
	reads  int
}

func (s *twoHeads) Get(ctx context.Context, key string, offset, length int64) ([]byte, objstore.Info, error) {
	b, info, err := s.Store.Get(ctx, key, offset, length)
	if err == nil && strings.HasPrefix(key, "heads/") {
		b = s.states[s.reads%2]
		s.reads++
	}
	return b, info, err
}

// TestPagesOfTwoHeads: a store that answers with two old heads in turn, whose pages are gone, is found out.
func TestPagesOfTwoHeads(t *testing.T) {
	rnd := faulttest.Rand(t)
	b := newBench(t)
	b.history(rnd, "v", nil, 2)
	lengthen(t, b.repo, "v", 5000, 10)
	s := &twoHeads{Store: b.store}
	read := func() []byte {
		state, _, err := b.store.Get(t.Context(), b.headKey("v"), 0, -1)
		if err != nil {
			t.Fatal(err)
		}
		return state
	}
	s.states[0] = read()
	if _, err := removeVolume(t.Context(), b.repo, ref.Ref{Name: "v", At: "h4000"}); err != nil {
		t.Fatal(err)
	}
	s.states[1] = read()
	for o, err := range b.store.List(t.Context(), "points/") {
		if err == nil {
			err = b.store.Delete(t.Context(), o.Key)
		}
		if err != nil {
			t.Fatal(err)
		}
	}

	rp, err := repo.Open(t.Context(), s, b.secret)
	if err != nil {
		t.Fatal(err)
	}
	defer rp.Close()
	h, _, err := rp.Head(t.Context(), "v")
	if err != nil {
		t.Fatal(err)
	}
	var bad []*pageFault
	for _, err := range allPoints(t.Context(), rp, h, &bad) {
		if err != nil {
			t.Fatal(err)
		}
	}
	if len(bad) == 0 || s.reads < headTries || s.reads > 10*headTries {
		t.Errorf("%d problems with pages, after %d reads of the head", len(bad), s.reads)
	}
}
