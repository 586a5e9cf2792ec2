package objstore_test

import (
	"bytes"
	"context"
	"iter"
	"strings"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/remote/objstore"
	"pando/internal/testing/storetest"
)

// broken is a store that keeps a promise badly: the functions that are set do it.
type broken struct {
	objstore.Store
	put func(ctx context.Context, s objstore.Store, key string, data []byte, c objstore.Condition) (objstore.Version,
		error)
	get  func(ctx context.Context, s objstore.Store, key string, offset, length int64) ([]byte, objstore.Info, error)
	list func(ctx context.Context, s objstore.Store, prefix string) iter.Seq2[objstore.Info, error]
	del  func(ctx context.Context, s objstore.Store, key string) error
}

func (b broken) Put(ctx context.Context, key string, data []byte, c objstore.Condition) (objstore.Version, error) {
	if b.put != nil {
		return b.put(ctx, b.Store, key, data, c)
	}
	return b.Store.Put(ctx, key, data, c)
}

func (b broken) Get(ctx context.Context, key string, offset, length int64) ([]byte, objstore.Info, error) {
	if b.get != nil {
		return b.get(ctx, b.Store, key, offset, length)
	}
	return b.Store.Get(ctx, key, offset, length)
}

func (b broken) List(ctx context.Context, prefix string) iter.Seq2[objstore.Info, error] {
	if b.list != nil {
		return b.list(ctx, b.Store, prefix)
	}
	return b.Store.List(ctx, prefix)
}

func (b broken) Delete(ctx context.Context, key string) error {
	if b.del != nil {
		return b.del(ctx, b.Store, key)
	}
	return b.Store.Delete(ctx, key)
}

// TestProbeFindsBrokenStores: stores as there are in the world.
func TestProbeFindsBrokenStores(t *testing.T) {
	for name, b := range map[string]broken{
		"ignores IfAbsent": {put: func(ctx context.Context, s objstore.Store, key string, data []byte,
			c objstore.Condition) (objstore.Version, error) {
			if c.Absent() {
				c = objstore.Always
			}
			return s.Put(ctx, key, data, c)
		}},
		"ignores IfVersion": {put: func(ctx context.Context, s objstore.Store, key string, data []byte,
			c objstore.Condition) (objstore.Version, error) {
			if c.Version() != "" {
				c = objstore.Always
			}
			return s.Put(ctx, key, data, c)
		}},
		"ignores IfVersion where nothing is": {put: func(ctx context.Context, s objstore.Store, key string, data []byte,
			c objstore.Condition) (objstore.Version, error) {
			if _, err := s.Stat(ctx, key); c.Version() != "" && errs.Is(err, errs.NotFound) {
				c = objstore.Always
			}
			return s.Put(ctx, key, data, c)
		}},
		"looks, then writes": {put: func(ctx context.Context, s objstore.Store, key string, data []byte,
			c objstore.Condition) (objstore.Version, error) {
			info, err := s.Stat(ctx, key)
			if c.Absent() && err == nil || c.Version() != "" && info.Version != c.Version() {
				return "", errs.New(errs.Conflict, "write object", key, "412")
			}
			time.Sleep(50 * time.Millisecond)
			return s.Put(ctx, key, data, objstore.Always)
		}},
		"refuses every condition": {put: func(ctx context.Context, s objstore.Store, key string, data []byte,
			c objstore.Condition) (objstore.Version, error) {
			if c != objstore.Always {
				return "", errs.New(errs.Conflict, "write object", key, "412")
			}
			return s.Put(ctx, key, data, c)
		}},
		"tells no version": {put: func(ctx context.Context, s objstore.Store, key string, data []byte,
			c objstore.Condition) (objstore.Version, error) {
			_, err := s.Put(ctx, key, data, c)
			return "", err
		}},
		"ignores ranges": {get: func(ctx context.Context, s objstore.Store, key string, _, _ int64) ([]byte, objstore.Info,
			error) {
			return s.Get(ctx, key, 0, -1)
		}},
		"reads what was before": {get: func(ctx context.Context, s objstore.Store, key string, offset, length int64) ([]byte,
			objstore.Info, error) {
			data, info, err := s.Get(ctx, key, offset, length)
			return bytes.Replace(data, []byte("second"), []byte("first"), 1), info, err
		}},
		"lists nothing": {list: func(context.Context, objstore.Store, string) iter.Seq2[objstore.Info, error] {
			return func(func(objstore.Info, error) bool) {}
		}},
		"deletes nothing": {del: func(context.Context, objstore.Store, string) error { return nil }},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStore(t)
			mustPut(t, s, "config", "somebody's", objstore.Always)
			b.Store = s
			err := objstore.Probe(t.Context(), objstore.Retry(b, objstore.RetryOptions{}))
			if !errs.Is(err, errs.Unsupported) || errs.HintOf(err) == "" {
				t.Errorf("%v, hint %q; want Unsupported with a hint", err, errs.HintOf(err))
			}
			if b.del == nil {
				onlyConfig(t, s)
			}
		})
	}
}

func onlyConfig(t *testing.T, s objstore.Store) {
	t.Helper()
	for info, err := range s.List(t.Context(), "") {
		if err != nil || info.Key != "config" {
			t.Errorf("the probe has left %s, %v", info.Key, err)
		}
	}
}

// TestProbeRefused: what a user may not do is said, with a hint.
func TestProbeRefused(t *testing.T) {
	for _, op := range []storetest.Op{storetest.Put, storetest.Get, storetest.List, storetest.Delete} {
		s := newStore(t)
		mustPut(t, s, "config", "somebody's", objstore.Always)
		f := storetest.Faulty(s, storetest.Fault{Match: storetest.Ops(op), Times: -1,
			Err: storetest.Permanent(errs.Permission)})
		err := objstore.Probe(t.Context(), objstore.Retry(f, objstore.RetryOptions{}))
		if !errs.Is(err, errs.Permission) || !strings.Contains(errs.HintOf(err), "permission to") {
			t.Errorf("without %s: %v, hint %q", op, err, errs.HintOf(err))
		}
		if op != storetest.Delete {
			onlyConfig(t, s)
		}
	}
}

// TestProbeBesideFailures: every operation of a probe fails once, before or after
// its effect: with Retry it still ends well, and nothing is left.
func TestProbeBesideFailures(t *testing.T) {
	for _, when := range []storetest.When{storetest.Before, storetest.After} {
		n := 0
		for ; ; n++ {
			fired := 0
			inBubble(t, func(t *testing.T, s objstore.Store) {
				mustPut(t, s, "config", "somebody's", objstore.Always)
				f := storetest.Faulty(s, storetest.Fault{At: n, When: when})
				if err := objstore.Probe(t.Context(), objstore.Retry(f, objstore.RetryOptions{})); err != nil {
					t.Errorf("failure of call %d: %v", n, err)
				}
				onlyConfig(t, s)
				fired = f.Fired()
			})
			if fired == 0 {
				break
			}
		}
		if n < 25 {
			t.Errorf("a probe has only %d calls", n)
		}
	}
}

// TestProbeCanceled leaves nothing, either.
func TestProbeCanceled(t *testing.T) {
	s := newStore(t)
	mustPut(t, s, "config", "somebody's", objstore.Always)
	ctx, cancel := context.WithCancel(t.Context())
	f := storetest.Faulty(s, storetest.Fault{At: 5, When: storetest.After, Do: func(storetest.Call) { cancel() }})
	if err := objstore.Probe(ctx, objstore.Retry(f, objstore.RetryOptions{})); !errs.Is(err, errs.Canceled) {
		t.Error(err)
	}
	onlyConfig(t, s)
}
