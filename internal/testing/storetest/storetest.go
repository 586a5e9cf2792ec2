// Package storetest holds what every object store must do, as tests, and faults to
// put in front of one.
package storetest

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/remote/objstore"
	"pando/internal/testing/faulttest"

	"golang.org/x/sync/errgroup"
)

// Run runs the conformance suite. open returns a store of its own, in which nothing
// is, for each test; what is in it afterwards is the business of who called. The
// store should not try again by itself: where several race, the suite puts
// objstore.Retry in front of it.
func Run(t *testing.T, open func(t *testing.T) objstore.Store) {
	for _, c := range []struct {
		name string
		test func(*testing.T, *suite)
	}{
		{"RoundTrip", testRoundTrip},
		{"LargestObject", testLargest},
		{"Keys", testKeys},
		{"BadKeys", testBadKeys},
		{"Ranges", testRanges},
		{"Missing", testMissing},
		{"Conditions", testConditions},
		{"Versions", testVersions},
		{"ListOrder", testListOrder},
		{"ListManyPages", testListMany},
		{"Delete", testDelete},
		{"Canceled", testCanceled},
		{"OneCreatorWins", testOneCreator},
		{"CompareAndSwapCounts", testCounter},
		{"DeleteBesideCompareAndSwap", testDeleteBesideSwap},
		{"ReadersSeeWholeObjects", testWhole},
		{"ListingsMissNothing", testListingsMissNothing},
		{"Probe", testProbe},
	} {
		t.Run(c.name, func(t *testing.T) { c.test(t, &suite{t, open(t)}) })
	}
}

type suite struct {
	t *testing.T
	objstore.Store
}

// random is n bytes that no two calls return alike, for n of some size.
func random(n int) []byte {
	b := make([]byte, n)
	_, _ = rand.Read(b) // never fails
	return b
}

func (s *suite) put(key string, data []byte, c objstore.Condition) objstore.Version {
	s.t.Helper()
	v, err := s.Put(s.t.Context(), key, data, c)
	if err != nil {
		s.t.Fatalf("Put %s: %v", key, err)
	}
	if v == "" {
		s.t.Fatalf("Put %s returned no version", key)
	}
	return v
}

// holds checks that an object is there with this content and version, whoever asks.
func (s *suite) holds(key string, want []byte, v objstore.Version) {
	s.t.Helper()
	data, info, err := s.Get(s.t.Context(), key, 0, -1)
	if err != nil {
		s.t.Fatalf("Get %s: %v", key, err)
	}
	if !bytes.Equal(data, want) {
		s.t.Fatalf("%s has %d bytes, want %d, or they differ", key, len(data), len(want))
	}

	wantInfo := objstore.Info{Key: key, Bytes: int64(len(want)), Version: v}
	if info != wantInfo {
		s.t.Errorf("Get %s: %+v, want %+v", key, info, wantInfo)
	}

	if info, err = s.Stat(s.t.Context(), key); err != nil || info != wantInfo {
		s.t.Errorf("Stat %s: %+v, %v, want %+v", key, info, err, wantInfo)
	}

	listed := false
	for _, info := range s.list(key) {
		if info.Key == key {
			listed = true
			if info != wantInfo {
				s.t.Errorf("%s is listed as %+v, want %+v", key, info, wantInfo)
			}
		}
	}

	if !listed {
		s.t.Errorf("%s is not listed", key)
	}
}

// absent checks that there is no such object, whoever asks.
func (s *suite) absent(key string) {
	s.t.Helper()
	if data, _, err := s.Get(s.t.Context(), key, 0, -1); !errs.Is(err, errs.NotFound) {
		s.t.Errorf("Get of absent %s: %d bytes, %v", key, len(data), err)
	}

	if info, err := s.Stat(s.t.Context(), key); !errs.Is(err, errs.NotFound) {
		s.t.Errorf("Stat of absent %s: %+v, %v", key, info, err)
	}

	for _, info := range s.list(key) {
		if info.Key == key {
			s.t.Errorf("absent %s is listed", key)
		}
	}
}

func (s *suite) list(prefix string) (out []objstore.Info) {
	s.t.Helper()
	for info, err := range s.List(s.t.Context(), prefix) {
		if err != nil {
			s.t.Fatalf("List %q: %v", prefix, err)
		}
		out = append(out, info)
	}
	return out
}

func (s *suite) keys(prefix string) []string {
	s.t.Helper()
	out := []string{}
	for _, info := range s.list(prefix) {
		out = append(out, info.Key)
	}
	return out
}

// wants checks the kind of an error, and that it is one that people can use.
func (s *suite) wants(kind errs.Kind, what string, err error) {
	s.t.Helper()
	if !errs.Is(err, kind) {
		s.t.Errorf("%s: %v, want an error of kind %s", what, err, kind)
		return
	}

	if objstore.Temporary(err) {
		s.t.Errorf("%s: %v is temporary: it must not be tried again", what, err)
	}

	var e *errs.Error
	if !errors.As(err, &e) || e.Op == "" {
		s.t.Errorf("%s: %v is no *errs.Error with an operation", what, err)
	}
}

func testRoundTrip(t *testing.T, s *suite) {
	if s.String() == "" {
		t.Error("the store has no name for people")
	}

	for _, n := range []int{0, 1, 4095, 64 << 10, 64<<10 + 1, 5<<20 + 1, 16 << 20} {
		key := fmt.Sprintf("segments/%d", n)
		data := random(n)
		given := slices.Clone(data)
		v := s.put(key, given, objstore.IfAbsent)
		if !bytes.Equal(given, data) {
			t.Error("Put changed what it was given")
		}
		for i := range given {
			given[i] = 0 // it must not be kept, either
		}
		s.holds(key, data, v)
	}

	// What is replaced by something shorter has nothing of the old at its end.
	data := random(3)
	s.holds("segments/65536", data, s.put("segments/65536", data, objstore.Always))
	s.holds("segments/1", []byte{}, s.put("segments/1", nil, objstore.Always))
}

func testLargest(t *testing.T, s *suite) {
	data := random(objstore.MaxObjectBytes + 1)
	_, err := s.Put(t.Context(), "large", data, objstore.Always)
	s.wants(errs.Invalid, "Put of an object that is too large", err)
	s.absent("large")
	data = data[1:]
	s.holds("large", data, s.put("large", data, objstore.IfAbsent))
}

func testKeys(t *testing.T, s *suite) {
	word := strings.Repeat("w", objstore.MaxWordBytes)
	long := strings.Join([]string{"l" + word[1:], word, word, word}, "/")[:objstore.MaxKeyBytes]
	good := []string{"a", "0", "_", "-", "a.", "a..b", "-rf", "a-/-a", "_.-", "con", "q/w/e/r/t/y/u/i/o/p", "aux.txt",
		word, long}
	for i, key := range good {
		data := fmt.Appendf(nil, "content %d", i)
		s.holds(key, data, s.put(key, data, objstore.IfAbsent))
	}

	slices.Sort(good)
	if got := s.keys(""); !slices.Equal(got, good) {
		t.Errorf("listed are %q, want %q", got, good)
	}

	for _, key := range good {
		if err := s.Delete(t.Context(), key); err != nil {
			t.Errorf("Delete %s: %v", key, err)
		}
		s.absent(key)
	}
}

func testBadKeys(t *testing.T, s *suite) {
	for _, key := range []string{
		"", "/", "a/", "/a", "a//b", ".", "..", "../a", "a/../b", "a/.", ".a", "a/.b", ".pando/lock", "A", "a b", "a\x00",
		"ä", "a\\b", "a:b", "a?b", "a%2fb", "a\n",
		strings.Repeat("w", objstore.MaxWordBytes+1), strings.Repeat("w/", objstore.MaxKeyBytes/2) + "w",
	} {
		_, err := s.Put(t.Context(), key, []byte("x"), objstore.Always)
		s.wants(errs.Invalid, fmt.Sprintf("Put %q", key), err)
		_, _, err = s.Get(t.Context(), key, 0, -1)
		s.wants(errs.Invalid, fmt.Sprintf("Get %q", key), err)
		_, err = s.Stat(t.Context(), key)
		s.wants(errs.Invalid, fmt.Sprintf("Stat %q", key), err)
		s.wants(errs.Invalid, fmt.Sprintf("Delete %q", key), s.Delete(t.Context(), key))
	}

	for _, prefix := range []string{"/", "//", "a//", "../", ".", ".pando", "A"} {
		var err error
		for _, e := range s.List(t.Context(), prefix) {
			err = e
		}
		s.wants(errs.Invalid, fmt.Sprintf("List %q", prefix), err)
	}

	s.put("a", []byte("x"), objstore.Always)
	_, _, err := s.Get(t.Context(), "a", -1, 1)
	s.wants(errs.Invalid, "Get from before the beginning", err)
	if got := s.keys(""); !slices.Equal(got, []string{"a"}) {
		t.Errorf("listed are %q", got)
	}
}

func testRanges(t *testing.T, s *suite) {
	data := random(300_000)
	n := int64(len(data))
	v := s.put("r", data, objstore.Always)
	empty := s.put("empty", nil, objstore.Always)
	for _, r := range [][2]int64{
		{0, -1}, {0, 0}, {0, 1}, {0, n}, {0, n + 1}, {1, n}, {n - 1, 1}, {n - 1, 100}, {n, 0}, {n, 1}, {n, -1}, {n + 5,
			1}, {n + 5, -1},
		{12_345, 67_890}, {12_345, -1}, {1 << 40, 1 << 40}, {100, 1 << 62},
	} {
		got, info, err := s.Get(t.Context(), "r", r[0], r[1])
		if err != nil {
			t.Errorf("Get [%d, +%d) of %d bytes: %v", r[0], r[1], n, err)
			continue
		}

		from := min(r[0], n)
		to := n
		if r[1] >= 0 && r[1] < n-from {
			to = from + r[1]
		}
		if !bytes.Equal(got, data[from:to]) {
			t.Errorf("Get [%d, +%d) of %d bytes returns %d, want %d, or they differ", r[0], r[1], n, len(got), to-from)
		}

		if want := (objstore.Info{Key: "r", Bytes: n, Version: v}); info != want {
			t.Errorf("Get [%d, +%d): %+v, want %+v", r[0], r[1], info, want)
		}
	}

	for _, r := range [][2]int64{{0, -1}, {0, 0}, {0, 1}, {1, 1}, {1, -1}} {
		got, info, err := s.Get(t.Context(), "empty", r[0], r[1])
		if want := (objstore.Info{Key: "empty", Version: empty}); err != nil || len(got) != 0 || info != want {
			t.Errorf("Get [%d, +%d) of an empty object: %d bytes, %+v, %v, want %+v", r[0], r[1], len(got), info, err, want)
		}
	}
}

func testMissing(t *testing.T, s *suite) {
	s.absent("nothing")
	s.absent("no/such/thing")
	s.put("there/is", []byte("x"), objstore.Always)
	s.absent("there/is-not")
	s.absent("there") // a directory is no object
	if _, _, err := s.Get(t.Context(), "nothing", 5, 5); !errs.Is(err, errs.NotFound) {
		t.Errorf("Get of a range of nothing: %v", err)
	}

	_, err := s.Stat(t.Context(), "nothing")
	s.wants(errs.NotFound, "Stat of nothing", err)
	if err := s.Delete(t.Context(), "nothing/at/all"); err != nil {
		t.Errorf("Delete of nothing: %v", err)
	}
}

func testConditions(t *testing.T, s *suite) {
	refused := func(what, key string, c objstore.Condition) {
		t.Helper()
		_, err := s.Put(t.Context(), key, random(100), c)
		s.wants(errs.Conflict, what, err)
	}

	refused("IfVersion of something else, on nothing", "c",
		objstore.IfVersion(s.put("other", []byte("o"), objstore.Always)))
	s.absent("c")

	a := random(100)
	va := s.put("c", a, objstore.IfAbsent)
	refused("IfAbsent where something is", "c", objstore.IfAbsent)
	refused("IfVersion of another object", "c", objstore.IfVersion(s.put("other", []byte("o"), objstore.Always)))
	s.holds("c", a, va)

	b := random(100)
	vb := s.put("c", b, objstore.IfVersion(va))
	if vb == va {
		t.Errorf("two contents have the version %q", va)
	}

	refused("IfVersion of what was replaced", "c", objstore.IfVersion(va))
	s.holds("c", b, vb)

	d := random(100)
	vd := s.put("c", d, objstore.Always)
	refused("IfVersion of what was replaced without a condition", "c", objstore.IfVersion(vb))
	s.holds("c", d, vd)

	if err := s.Delete(t.Context(), "c"); err != nil {
		t.Fatal(err)
	}

	refused("IfVersion of what was deleted", "c", objstore.IfVersion(vd))
	s.absent("c")
	e := random(100)
	ve := s.put("c", e, objstore.IfAbsent)
	if ve == va || ve == vb || ve == vd {
		t.Errorf("the version %q is one of before the deletion", ve)
	}

	refused("IfVersion of before the deletion", "c", objstore.IfVersion(vd))
	s.holds("c", e, ve)

	// The condition is about the key alone.
	s.put("c2", e, objstore.IfAbsent)
	s.put("sub/c", e, objstore.IfAbsent)
	s.holds("c", e, ve)
}

// testVersions writes quickly, in one size, so that neither a clock nor the size
// tell the states apart.
func testVersions(t *testing.T, s *suite) {
	seen := map[objstore.Version]int{}
	for i := range 100 {
		if i%10 == 9 {
			if err := s.Delete(t.Context(), "v"); err != nil {
				t.Fatal(err)
			}
		}
		v := s.put("v", fmt.Appendf(nil, "%03d", i), objstore.Always)
		if before, ok := seen[v]; ok {
			t.Fatalf("write %d has the version %q of write %d", i, v, before)
		}
		seen[v] = i
		if info, err := s.Stat(t.Context(), "v"); err != nil || info.Version != v {
			t.Fatalf("Stat after write %d: %+v, %v, want version %q", i, info, err, v)
		}
	}
}

func testListOrder(t *testing.T, s *suite) {
	if got := s.keys(""); len(got) != 0 {
		t.Fatalf("the store is not empty: %q", got)
	}

	all := []string{"d-1", "d-1.x", "d.1", "d/1", "d/1-2", "d/10", "d/2/a", "d/2/b", "d/20", "d0", "d_1", "dd/1", "e"}
	if !slices.IsSorted(all) {
		t.Fatal("the test is wrong")
	}

	for _, i := range faulttest.Rand(t).Perm(len(all)) {
		s.put(all[i], []byte(all[i]), objstore.IfAbsent)
	}

	for _, prefix := range []string{"", "d", "d/", "d/1", "d/1-", "d/2", "d/2/", "d.", "d-1.", "d/x", "x", "x/y/z", "e",
		"e/", "dd", "d/2/b"} {
		var want []string
		for _, k := range all {
			if strings.HasPrefix(k, prefix) {
				want = append(want, k)
			}
		}
		if got := s.keys(prefix); !slices.Equal(got, want) {
			t.Errorf("List %q: %q, want %q", prefix, got, want)
		}
	}

	// A reader that has seen enough stops.
	n := 0
	for _, err := range s.List(t.Context(), "d") {
		if err != nil {
			t.Fatal(err)
		}
		if n++; n == 4 {
			break
		}
	}

	// One listing can be used twice.
	seq := s.List(t.Context(), "d/")
	for range 2 {
		n := 0
		for _, err := range seq {
			if err != nil {
				t.Fatal(err)
			}
			n++
		}
		if n != 6 {
			t.Errorf("a listing that is used again yields %d objects", n)
		}
	}
}

func testListMany(t *testing.T, s *suite) {
	const n = 1_100 // pages of buckets have 1,000
	want := make([]string, n)
	g, ctx := errgroup.WithContext(t.Context())
	g.SetLimit(16)
	for i := range n {
		want[i] = fmt.Sprintf("many/%d/%04d", i/400, i)
		g.Go(func() error {
			_, err := s.Put(ctx, want[i], fmt.Appendf(nil, "%d", i), objstore.IfAbsent)
			return err
		})
	}

	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}

	if got := s.keys(""); !slices.Equal(got, want) {
		t.Errorf("%d objects are listed, want %d, or they are in another order", len(got), n)
	}

	if got := s.keys("many/1/"); !slices.Equal(got, want[400:800]) {
		t.Errorf("%d objects are listed with a prefix, want 400, or they are in another order", len(got))
	}
}

func testDelete(t *testing.T, s *suite) {
	s.put("d/1/a", []byte("a"), objstore.Always)
	s.put("d/1/b", []byte("b"), objstore.Always)
	s.put("d/2/a", []byte("a"), objstore.Always)
	for range 2 { // the second time it is absent
		if err := s.Delete(t.Context(), "d/1/a"); err != nil {
			t.Fatal(err)
		}
		s.absent("d/1/a")
	}

	if err := s.Delete(t.Context(), "d/1"); err != nil { // no object; what is below it stays
		t.Fatal(err)
	}

	if got := s.keys(""); !slices.Equal(got, []string{"d/1/b", "d/2/a"}) {
		t.Errorf("left are %q", got)
	}

	// What is empty can be filled again, also by others at the same moment.
	g, ctx := errgroup.WithContext(t.Context())
	r := objstore.Retry(s, objstore.RetryOptions{First: time.Millisecond})
	for i := range 4 {
		g.Go(func() error {
			for range 20 {
				key := fmt.Sprintf("d/3/4/%d", i)
				if _, err := r.Put(ctx, key, random(20), objstore.IfAbsent); err != nil {
					return err
				}
				if err := r.Delete(ctx, key); err != nil {
					return err
				}
			}
			return nil
		})
	}

	if err := g.Wait(); err != nil {
		t.Error(err)
	}

	if got := s.keys("d/3/"); len(got) > 0 {
		t.Errorf("left are %q", got)
	}
}

func testCanceled(t *testing.T, s *suite) {
	data := random(1000)
	v := s.put("c", data, objstore.Always)
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	late, cancel := context.WithDeadline(t.Context(), time.Now().Add(-time.Second))
	defer cancel()

	for what, ctx := range map[string]context.Context{"canceled": canceled, "late": late} {
		_, err := s.Put(ctx, "c", random(1000), objstore.Always)
		s.wants(errs.Canceled, what+" Put", err)
		_, err = s.Put(ctx, "d", random(1000), objstore.IfAbsent)
		s.wants(errs.Canceled, what+" Put", err)
		_, _, err = s.Get(ctx, "c", 0, -1)
		s.wants(errs.Canceled, what+" Get", err)
		_, err = s.Stat(ctx, "c")
		s.wants(errs.Canceled, what+" Stat", err)
		s.wants(errs.Canceled, what+" Delete", s.Delete(ctx, "c"))
		err = nil
		for _, e := range s.List(ctx, "") {
			err = e
		}

		s.wants(errs.Canceled, what+" List", err)
	}

	s.holds("c", data, v)
	s.absent("d")
}

func testProbe(t *testing.T, s *suite) {
	if err := objstore.Probe(t.Context(), objstore.Retry(s, objstore.RetryOptions{})); err != nil {
		t.Fatal(err)
	}
	if got := s.keys(""); len(got) > 0 {
		t.Errorf("the probe has left %q", got)
	}
}
