package storetest

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/remote/objstore"

	"golang.org/x/sync/errgroup"
)

// retried is the store as Pando uses it: a server may answer that it is busy.
func (s *suite) retried() objstore.Store {
	return objstore.Retry(s.Store, objstore.RetryOptions{First: time.Millisecond, Longest: 100 * time.Millisecond,
		Attempts: 20})
}

func testOneCreator(t *testing.T, s *suite) {
	r := s.retried()
	for round := range 10 {
		key := fmt.Sprintf("race/%d", round)
		const racers = 8
		var mine [racers][]byte
		var won [racers]objstore.Version
		var g errgroup.Group
		start := make(chan struct{})
		for i := range racers {
			mine[i] = random(5000)
			g.Go(func() (err error) {
				<-start
				won[i], err = r.Put(t.Context(), key, mine[i], objstore.IfAbsent)
				if errs.Is(err, errs.Conflict) {
					err = nil
				}
				return err
			})
		}

		close(start)
		if err := g.Wait(); err != nil {
			t.Fatal(err)
		}

		winner := -1
		for i, v := range won {
			if v == "" {
				continue
			}
			if winner >= 0 {
				t.Fatalf("round %d: both %d and %d have created the object", round, winner, i)
			}
			winner = i
		}

		if winner < 0 {
			t.Fatalf("round %d: nobody has created the object", round)
		}

		s.holds(key, mine[winner], won[winner])
	}
}

// Count adds one to a number in an object, by compare-and-swap, n times. Racing
// tests use it, also from several processes. Every write has something random in
// it, as the contract asks of who must know a write as its own.
func Count(ctx context.Context, s objstore.Store, key string, n int) error {
	for range n {
		for {
			data, info, err := s.Get(ctx, key, 0, -1)
			c := objstore.IfVersion(info.Version)
			if errs.Is(err, errs.NotFound) {
				data, c, err = make([]byte, 8), objstore.IfAbsent, nil
			}
			if err != nil {
				return err
			}
			if len(data) < 8 {
				return fmt.Errorf("%s has %d bytes", key, len(data))
			}

			next := binary.LittleEndian.AppendUint64(nil, binary.LittleEndian.Uint64(data)+1)
			_, err = s.Put(ctx, key, append(next, random(16)...), c)
			if err == nil {
				break
			}
			if !errs.Is(err, errs.Conflict) {
				return err
			}
		}
	}

	return nil
}

// Counted reads what [Count] has counted.
func Counted(ctx context.Context, s objstore.Store, key string) (uint64, error) {
	data, _, err := s.Get(ctx, key, 0, -1)
	if err != nil {
		return 0, err
	}
	if len(data) < 8 {
		return 0, fmt.Errorf("%s has %d bytes", key, len(data))
	}
	return binary.LittleEndian.Uint64(data), nil
}

func testCounter(t *testing.T, s *suite) {
	const workers, each = 6, 12
	g, ctx := errgroup.WithContext(t.Context())
	for range workers {
		g.Go(func() error { return Count(ctx, s.retried(), "heads/counter", each) })
	}
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
	if got, err := Counted(t.Context(), s, "heads/counter"); err != nil || got != workers*each {
		t.Errorf("the counter is at %d, %v, after %d times one more", got, err, workers*each)
	}
}

// testDeleteBesideSwap deletes an object while others replace it by its version.
// A replacement that was told to succeed after the deletion had returned would have
// brought a dead object back.
func testDeleteBesideSwap(t *testing.T, s *suite) {
	r := s.retried()
	for round := range 20 {
		key := fmt.Sprintf("sessions/%d", round)
		v := s.put(key, random(50), objstore.IfAbsent)
		var g errgroup.Group
		var swapped bool
		start := make(chan struct{})
		g.Go(func() error {
			<-start
			_, err := r.Put(t.Context(), key, random(50), objstore.IfVersion(v))
			if swapped = err == nil; errs.Is(err, errs.Conflict) {
				err = nil
			}
			return err
		})

		g.Go(func() error {
			<-start
			return r.Delete(t.Context(), key)
		})
		close(start)
		if err := g.Wait(); err != nil {
			t.Fatal(err)
		}

		// Whichever came first, the deletion or the replacement: in both orders
		// the object is gone.
		if _, err := s.Stat(t.Context(), key); !errs.Is(err, errs.NotFound) {
			t.Fatalf("round %d: after a deletion beside a replacement (done: %v) Stat says %v", round, swapped, err)
		}
	}
}

// testWhole reads an object while it is replaced by ones of other content and
// other size: what is read is one of them, and the version is its own.
func testWhole(t *testing.T, s *suite) {
	size := func(fill byte) int { return 100_000 + int(fill)*3_000 }
	content := func(fill byte) []byte { return bytes.Repeat([]byte{fill}, size(fill)) }
	r := s.retried()
	versions := map[objstore.Version]byte{s.put("w", content(0), objstore.Always): 0}

	ctx, stop := context.WithCancel(t.Context())
	defer stop()

	var mu sync.Mutex
	read := map[objstore.Version]byte{}
	reads := 0
	var g errgroup.Group
	for i := range 3 {
		g.Go(func() error {
			for first := true; first || ctx.Err() == nil; first = false {
				offset := int64(i * 1000)
				data, info, err := r.Get(t.Context(), "w", offset, -1)
				if err != nil {
					return err
				}

				if len(data) == 0 || int64(len(data)) != info.Bytes-offset || len(data) != size(data[0])-int(offset) ||
					!bytes.Equal(data, content(data[0])[offset:]) {
					return fmt.Errorf("%d bytes of an object of %d are read that are no state of it", len(data), info.Bytes)
				}

				mu.Lock()
				if fill, ok := read[info.Version]; ok && fill != data[0] {
					err = fmt.Errorf("version %q is read with two contents", info.Version)
				}

				read[info.Version] = data[0]
				reads++
				mu.Unlock()
				if err != nil {
					return err
				}
			}

			return nil
		})
	}

	for fill := byte(1); fill < 40; fill++ {
		v, err := r.Put(t.Context(), "w", content(fill), objstore.Always)
		if err != nil {
			t.Error(err)
			break
		}
		versions[v] = fill
	}

	stop()
	if err := g.Wait(); err != nil {
		t.Error(err)
	}

	for v, fill := range read {
		if want, ok := versions[v]; !ok || want != fill {
			t.Errorf("version %q was read with content %d, written with %d (written at all: %v)", v, fill, want, ok)
		}
	}

	if reads == 0 {
		t.Error("nothing was read in the meantime")
	}
}

// testListingsMissNothing lists while objects are replaced, made and deleted: those
// that were there all the time are in every listing.
func testListingsMissNothing(t *testing.T, s *suite) {
	r := s.retried()
	const n = 60
	for i := range n {
		s.put(fmt.Sprintf("heads/%02d", i), random(30), objstore.Always)
	}

	ctx, stop := context.WithCancel(t.Context())
	defer stop()

	var g errgroup.Group
	for w := range 2 {
		g.Go(func() error {
			for i := 0; ctx.Err() == nil; i++ {
				if _, err := r.Put(t.Context(), fmt.Sprintf("heads/%02d", (i*7+w)%n), random(30), objstore.Always); err != nil {
					return err
				}
				extra := "heads/x" + strconv.Itoa(w)
				if _, err := r.Put(t.Context(), extra, random(30), objstore.Always); err != nil {
					return err
				}
				if err := r.Delete(t.Context(), extra); err != nil {
					return err
				}
			}

			return nil
		})
	}

	for range 40 {
		there := 0
		for info, err := range r.List(t.Context(), "heads/") {
			if err != nil {
				t.Fatal(errors.Join(err, g.Wait()))
			}
			if info.Key < "heads/x" {
				there++
			}
		}
		if there != n {
			t.Errorf("a listing has %d of %d objects that were there all the time", there, n)
		}
	}

	stop()
	if err := g.Wait(); err != nil {
		t.Error(err)
	}
}
