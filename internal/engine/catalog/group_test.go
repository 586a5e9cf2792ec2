package catalog

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/driver"
)

// crowd lets calls of Update wait for one that holds the connection, so that they form groups.
type crowd struct {
	t    *testing.T
	c    *Catalog
	free chan struct{}
	wg   sync.WaitGroup

	mu  sync.Mutex
	txs []*sql.Tx // of the calls that ran, in their order
}

// newCrowd begins with a call that lasts until open.
func newCrowd(t *testing.T, c *Catalog) *crowd {
	t.Helper()
	w := &crowd{t: t, c: c, free: make(chan struct{})}
	holds := make(chan struct{})
	w.wg.Go(func() {
		first := true
		if err := c.View(context.Background(), func(*Tx) error {
			if first {
				close(holds)
				first = false
			}
			<-w.free
			return nil
		}); err != nil {
			t.Error(err)
		}
	})
	<-holds
	return w
}

// add adds a call that waits behind those that were added before.
func (w *crowd) add(ctx context.Context, d Durability, fn func(*Tx) error, check func(error)) {
	w.t.Helper()
	w.c.turns.mu.Lock()
	before := len(w.c.turns.waiting)
	w.c.turns.mu.Unlock()

	w.wg.Go(func() {
		check(w.c.Update(ctx, d, func(tx *Tx) error {
			w.mu.Lock()
			w.txs = append(w.txs, tx.tx)
			w.mu.Unlock()
			return fn(tx)
		}))
	})
	for waiting := before; waiting == before; time.Sleep(100 * time.Microsecond) {
		w.c.turns.mu.Lock()
		waiting = len(w.c.turns.waiting)
		w.c.turns.mu.Unlock()
	}
}

// open lets all calls go on, and waits for them.
func (w *crowd) open() {
	close(w.free)
	w.wg.Wait()
}

// succeeds and failsWith check the result of a call.
func (w *crowd) succeeds(err error) {
	if err != nil {
		w.t.Error(err)
	}
}

func (w *crowd) failsWith(want error) func(error) {
	return func(err error) {
		if !errors.Is(err, want) {
			w.t.Errorf("got %v, want %v", err, want)
		}
	}
}

// put returns a call that adds a volume.
func put(name string) func(*Tx) error {
	return func(tx *Tx) error {
		return tx.PutObject(Row{Identity: driver.Identity{ID: driver.NewID(), Kind: driver.Volume, Name: name}})
	}
}

// volumesIn lists the volumes by name.
func volumesIn(t *testing.T, c *Catalog) (names []string) {
	t.Helper()
	if err := c.View(t.Context(), func(tx *Tx) error {
		return tx.VisibleVolumes(func(r Row) error {
			names = append(names, r.Name)
			return nil
		})
	}); err != nil {
		t.Fatal(err)
	}
	return names
}

func wantVolumes(t *testing.T, c *Catalog, want ...string) {
	t.Helper()
	if got := volumesIn(t, c); !slices.Equal(got, want) {
		t.Errorf("there are %q, want %q", got, want)
	}
}

// synchronous reports whether the transaction will wait for the disk.
func synchronous(t *testing.T, tx *Tx) bool {
	var level int
	if err := tx.queryRow(`PRAGMA synchronous`).Scan(&level); err != nil {
		t.Error(err)
	}
	return level == 2
}

// TestGroupsShareACommit: calls that wait at the same time share a transaction, each durable one waits for the disk,
// and soft ones alone do not.
func TestGroupsShareACommit(t *testing.T) {
	c := openCatalog(t)
	ctx := t.Context()
	w := newCrowd(t, c)
	for i, d := range []Durability{Soft, Soft, Durable, Soft, Durable} {
		name := fmt.Sprint("v", i)
		w.add(ctx, d, func(tx *Tx) error {
			if sync := synchronous(t, tx); sync != (i >= 2) {
				t.Errorf("call %d waits for the disk: %v", i, sync)
			}
			return put(name)(tx)
		}, w.succeeds)
	}
	w.open()

	if len(w.txs) != 5 || w.txs[0] != w.txs[1] || w.txs[1] == w.txs[2] || w.txs[2] != w.txs[3] || w.txs[3] != w.txs[4] {
		t.Errorf("the calls ran in the transactions %v", w.txs)
	}
	wantVolumes(t, c, "v0", "v1", "v2", "v3", "v4")
	if n := c.seen.readCommits(); n != 2 {
		t.Errorf("%d durable commits were noted, want 2", n)
	}
}

// TestNeighboursSurviveFailure: whatever makes a call fail, the others of its group happen, and nothing of it does.
func TestNeighboursSurviveFailure(t *testing.T) {
	failed := errors.New("failed")
	full := strings.Repeat("x", 1<<20)
	for name, fail := range map[string]struct {
		fn   func(*Tx) error
		want error
	}{
		"an error": {func(tx *Tx) error { return errors.Join(put("never")(tx), failed) }, failed},
		"a taken name": {func(tx *Tx) error { return errors.Join(put("never")(tx), put("a")(tx)) },
			&errs.Error{Kind: errs.Exists}},
		"an SQL error": {func(tx *Tx) error {
			_, err := tx.exec(`SELECT nonsense`)
			return errors.Join(put("never")(tx), err)
		}, &errs.Error{Kind: errs.Damaged}},
		"a full disk": {func(tx *Tx) error { return errors.Join(put("never")(tx), tx.SetMeta("full", full)) },
			&errs.Error{Kind: errs.NoSpace}},
		"a full disk that it overlooks": {func(tx *Tx) error {
			_ = tx.SetMeta("full", full)
			return put("never")(tx)
		}, &errs.Error{Kind: errs.NoSpace}},
	} {
		for at := range 3 {
			t.Run(fmt.Sprint(name, " at ", at), func(t *testing.T) {
				c := openCatalog(t)
				if err := c.Update(t.Context(), Durable, put("a")); err != nil {
					t.Fatal(err)
				}
				limitPages(t, c)

				w := newCrowd(t, c)
				for i, neighbour := range []string{"b", "c", "d"} {
					if i == at {
						w.add(t.Context(), Durable, fail.fn, func(err error) {
							if k := errs.KindOf(err); !errors.Is(err, fail.want) && k != errs.KindOf(fail.want) {
								t.Errorf("got %v (%s), want %v", err, k, fail.want)
							}
						})
					}
					w.add(t.Context(), Durable, put(neighbour), w.succeeds)
				}
				w.open()
				wantVolumes(t, c, "a", "b", "c", "d")

				// It goes on.
				if err := c.Update(t.Context(), Durable, put("e")); err != nil {
					t.Error(err)
				}
				wantVolumes(t, c, "a", "b", "c", "d", "e")
			})
		}
	}
}

// limitPages makes the database full soon.
func limitPages(t *testing.T, c *Catalog) {
	t.Helper()
	var pages int
	if err := c.db.QueryRow(`PRAGMA page_count`).Scan(&pages); err != nil {
		t.Fatal(err)
	}
	if _, err := c.db.Exec(fmt.Sprintf(`PRAGMA max_page_count=%d`, pages+20)); err != nil {
		t.Fatal(err)
	}
}

// TestNeighboursSurvivePanic: a call that panics holds up nobody, and nothing of it happens.
func TestNeighboursSurvivePanic(t *testing.T) {
	for at := range 3 {
		c := openCatalog(t)
		w := newCrowd(t, c)
		for i, name := range []string{"a", "b", "c"} {
			if i != at {
				w.add(t.Context(), Soft, put(name), w.succeeds)
				continue
			}
			w.c.turns.mu.Lock()
			before := len(w.c.turns.waiting)
			w.c.turns.mu.Unlock()
			w.wg.Go(func() {
				defer func() {
					if recover() != "oh" {
						t.Error("the panic was lost")
					}
				}()
				_ = c.Update(context.Background(), Soft, func(tx *Tx) error {
					_ = put("never")(tx)
					panic("oh")
				})
			})
			for waiting := before; waiting == before; time.Sleep(100 * time.Microsecond) {
				w.c.turns.mu.Lock()
				waiting = len(w.c.turns.waiting)
				w.c.turns.mu.Unlock()
			}
		}
		w.open()
		want := slices.Delete([]string{"a", "b", "c"}, at, at+1)
		wantVolumes(t, c, want...)
	}
}

// TestCanceledWait: a call that gives up while it waits, or while it runs, holds up nobody and undoes no other.
func TestCanceledWait(t *testing.T) {
	c := openCatalog(t)
	waits, giveUp := context.WithCancel(t.Context())
	runs, stop := context.WithCancel(t.Context())
	defer stop()

	w := newCrowd(t, c)
	w.add(runs, Durable, func(tx *Tx) error {
		stop() // of the call that has begun the transaction
		return put("never")(tx)
	}, w.failsWith(context.Canceled))
	w.add(t.Context(), Durable, put("a"), w.succeeds)
	gaveUp := make(chan struct{})
	w.add(waits, Durable, put("never"), func(err error) {
		w.failsWith(context.Canceled)(err)
		close(gaveUp)
	})
	w.add(t.Context(), Durable, put("b"), w.succeeds)
	giveUp()
	<-gaveUp // before the others go on
	w.open()
	wantVolumes(t, c, "a", "b")
}

// TestGroupsAreBounded: other processes need not wait for all calls of this one.
func TestGroupsAreBounded(t *testing.T) {
	c := openCatalog(t)
	w := newCrowd(t, c)
	const calls = 2*groupMost + 5
	for i := range calls {
		w.add(t.Context(), Soft, put(fmt.Sprint("v", i)), w.succeeds)
	}
	w.open()
	sizes := map[*sql.Tx]int{}
	for _, tx := range w.txs {
		sizes[tx]++
	}
	if len(sizes) != 3 {
		t.Errorf("%d calls ran in %d transactions", calls, len(sizes))
	}
	if got := len(volumesIn(t, c)); got != calls {
		t.Errorf("there are %d volumes, want %d", got, calls)
	}
}

// TestChangesAreToldInOrder: the history has changes in the order in which they were committed.
func TestChangesAreToldInOrder(t *testing.T) {
	c := openCatalog(t)
	var told []string
	c.OnChange(func(_ context.Context, all []Change) {
		for _, ch := range all {
			told = append(told, ch.Ref)
		}
	})
	var ran []string
	var wg sync.WaitGroup
	for g := range 20 {
		wg.Go(func() {
			for i := range 10 {
				name := fmt.Sprintf("g%d-%d", g, i)
				if err := c.Update(t.Context(), Durability(i%2 == 0), func(tx *Tx) error {
					ran = append(ran, name) // under the lock of the connection
					return put(name)(tx)
				}); err != nil {
					t.Error(err)
				}
				if !slices.Contains(volumesIn(t, c), name) {
					t.Errorf("%s is not there after its commit", name)
				}
			}
		})
	}
	wg.Wait()
	if !slices.Equal(told, ran) || len(told) != 200 {
		t.Errorf("told %d changes, of %d, in another order:\n%q\n%q", len(told), len(ran), told, ran)
	}
}

// TestReaderSeesNothingUncommitted: while a group is open, others read the state before it.
func TestReaderSeesNothingUncommitted(t *testing.T) {
	c := openCatalog(t)
	c.reader.crowded = readAt
	if err := c.Update(t.Context(), Soft, func(tx *Tx) error {
		if err := put("a")(tx); err != nil {
			return err
		}
		wantVolumes(t, c)
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if c.reader.db == nil {
		t.Error("there was no second connection")
	}
	wantVolumes(t, c, "a")
}
