package storetest_test

import (
	"bytes"
	"context"
	"errors"
	"net/url"
	"slices"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/remote/objstore"
	"pando/internal/remote/objstore/file"
	"pando/internal/testing/storetest"
)

func open(t *testing.T) objstore.Store {
	t.Helper()
	s, err := file.Open(t.Context(), &url.URL{Scheme: "file", Path: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// TestFaultyWithoutFaults: it keeps the contract, so that what goes wrong behind it
// is the work of its faults.
func TestFaultyWithoutFaults(t *testing.T) {
	storetest.Run(t, func(t *testing.T) objstore.Store { return storetest.Faulty(open(t)) })
}

func TestFaults(t *testing.T) {
	ctx := t.Context()
	s := open(t)
	put := func(f objstore.Store, key string) error {
		_, err := f.Put(ctx, key, []byte(key), objstore.IfAbsent)
		return err
	}
	there := func(key string) bool {
		t.Helper()
		_, err := s.Stat(ctx, key)
		if err != nil && !errs.Is(err, errs.NotFound) {
			t.Fatal(err)
		}
		return err == nil
	}

	f := storetest.Faulty(s, storetest.Fault{At: 1, Times: 2})
	for i, key := range []string{"a", "b", "c", "d"} {
		struck := i == 1 || i == 2
		if err := put(f, key); objstore.Temporary(err) != struck || (err == nil) == struck || there(key) == struck {
			t.Errorf("%s: %v, there: %v", key, err, there(key))
		}
	}
	if f.Fired() != 2 || f.Count() != 4 || f.Count(storetest.Get) != 0 || f.Count(storetest.Put, storetest.Get) != 4 {
		t.Errorf("fired %d, calls %v", f.Fired(), f.Calls())
	}

	f.Heal()
	f.Add(storetest.Fault{When: storetest.After, Match: func(c storetest.Call) bool { return c.Key == "e" }})
	if err := put(f, "b"); err != nil || !there("b") {
		t.Error(err)
	}
	if err := put(f, "e"); !objstore.Temporary(err) || !there("e") {
		t.Errorf("%v, there: %v", err, there("e"))
	}
	if err := put(f, "e"); !errs.Is(err, errs.Conflict) || objstore.Temporary(err) {
		t.Error(err)
	}

	gone := storetest.Permanent(errs.IO)
	f = storetest.Faulty(s, storetest.Fault{At: 1, Times: -1, Err: gone})
	if err := put(f, "f"); err != nil {
		t.Error(err)
	}
	for range 3 {
		if err := f.Delete(ctx, "f"); !errors.Is(err, gone) || !there("f") {
			t.Error(err)
		}
		for _, err := range f.List(ctx, "") {
			if !errors.Is(err, gone) {
				t.Error(err)
			}
		}
	}
}

func TestFaultyListBreaksOff(t *testing.T) {
	s := open(t)
	for _, key := range []string{"a", "b", "c", "d"} {
		if _, err := s.Put(t.Context(), key, nil, objstore.Always); err != nil {
			t.Fatal(err)
		}
	}
	var keys []string
	var failed error
	for info, err := range storetest.Faulty(s, storetest.Fault{When: storetest.After}).List(t.Context(), "") {
		if failed = err; err == nil {
			keys = append(keys, info.Key)
		}
	}
	if !slices.Equal(keys, []string{"a", "b"}) || !objstore.Temporary(failed) {
		t.Errorf("yielded are %q, then %v", keys, failed)
	}
}

func TestFlip(t *testing.T) {
	s := open(t)
	data := []byte("0123456789")
	if _, err := s.Put(t.Context(), "a", data, objstore.Always); err != nil {
		t.Fatal(err)
	}
	f := storetest.Faulty(s, storetest.Fault{Times: -1, Change: storetest.Flip(5, 0)})
	for _, r := range []struct {
		offset, length int64
		want           string
	}{{0, -1, "0123446789"}, {5, 1, "4"}, {3, 4, "3446"}, {0, 5, "01234"}, {6, -1, "6789"}} {
		if got, _, err := f.Get(t.Context(), "a", r.offset, r.length); err != nil || string(got) != r.want {
			t.Errorf("[%d, +%d): %q, %v, want %q", r.offset, r.length, got, err, r.want)
		}
	}
	if got, _, err := s.Get(t.Context(), "a", 0, -1); err != nil || !bytes.Equal(got, data) {
		t.Errorf("the object itself is %q, %v", got, err)
	}
}

func TestDelayAndDo(t *testing.T) {
	s := open(t)
	f := storetest.Faulty(s, storetest.Fault{Delay: time.Hour})
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := f.Put(ctx, "a", nil, objstore.Always); !errs.Is(err, errs.Canceled) {
		t.Error(err)
	}
	f = storetest.Faulty(s, storetest.Fault{Delay: 30 * time.Millisecond})
	start := time.Now()
	if _, err := f.Put(t.Context(), "a", nil, objstore.Always); err != nil || time.Since(start) < 30*time.Millisecond {
		t.Errorf("%v after %s", err, time.Since(start))
	}
	// Somebody else is quicker.
	f = storetest.Faulty(s, storetest.Fault{Do: func(c storetest.Call) {
		if _, err := s.Put(t.Context(), c.Key, []byte("theirs"), objstore.IfAbsent); err != nil {
			t.Error(err)
		}
	}})
	if _, err := f.Put(t.Context(), "b", []byte("ours"), objstore.IfAbsent); !errs.Is(err, errs.Conflict) {
		t.Error(err)
	}
}
