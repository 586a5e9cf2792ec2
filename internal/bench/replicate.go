package bench

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/linux/durable"
	"pando/internal/linux/treewalk"

	"golang.org/x/sys/unix"
)

// Scenario is data of one size that grows, bytes.
type Scenario struct {
	Base   int64 `json:"base_bytes"`
	Append int64 `json:"append_bytes"`
}

// Scenarios are those of the measurements that Pando's replication answers: see
// docs/bench-replicate.md.
var Scenarios = []Scenario{{100 << 20, 1 << 20}, {500 << 20, 5 << 20}, {2 << 30, 10 << 20}, {10 << 30, 50 << 20}}

// ReplicateConfig says what to measure.
type ReplicateConfig struct {
	Dir       string // where to work: pools, repositories and copies go below it
	Driver    string // of the pools, "auto"
	Program   string // the executable of pando, which is measured
	Scenarios []Scenario
	Appends   int      // of each
	Freeze    bool     // pushes freeze the volume's filesystem
	Peers     bool     // the others too, where they are installed
	Only      []string // names of those to measure; empty: all
}

// Transfer is what one contender did in one scenario. Times are in seconds and
// include, for all, that what was written is on the disk.
type Transfer struct {
	Name         string    `json:"name"`
	Skipped      string    `json:"skipped,omitempty"` // why it was not measured
	Push         float64   `json:"push_seconds"`      // of all data
	PushBytes    int64     `json:"push_bytes"`        // that the repository grew by
	Appends      []float64 `json:"append_seconds"`    // to push each growth
	AppendBytes  int64     `json:"append_bytes"`      // that the repository grew by, on average
	Idle         []float64 `json:"idle_seconds"`      // to push nothing new: the floor of latency
	Restore      float64   `json:"restore_seconds"`   // of the first state, into an empty place
	Refreshes    []float64 `json:"refresh_seconds"`   // to bring that up to date, each time; empty: it cannot
	RestoreAll   float64   `json:"restore_all_seconds"`
	Verified     bool      `json:"verified"` // what was restored is what was written
	decode, disk float64
}

// ReplicateScenario is what came of one scenario.
type ReplicateScenario struct {
	Scenario
	Skipped   string     `json:"skipped,omitempty"`
	Transfers []Transfer `json:"transfers"`
	Decode    float64    `json:"decode_seconds"` // of the bare pipeline: only to decrypt and decompress everything
	Disk      float64    `json:"disk_seconds"`   // only to write everything
}

// ReplicateReport is what Replicate measured.
type ReplicateReport struct {
	Dir       string              `json:"dir"`
	Driver    string              `json:"driver"`
	Scenarios []ReplicateScenario `json:"scenarios"`
	Targets   []Target            `json:"targets"`
}

// contender is a way to keep a copy of growing data somewhere else. Each works in a
// directory of its own. The runner takes the time of push, restore and refresh,
// with a syncfs of where they write.
type contender interface {
	name() string
	// open makes ready for data of up to room bytes. Unsupported: it cannot be
	// measured here, and why.
	open(ctx context.Context, dir string, room int64) error
	// grow writes more records, durably.
	grow(ctx context.Context, r *records, n int64) error
	push(ctx context.Context) error
	repository() string // a directory
	restored() string   // a directory: where restore writes
	// restore brings the newest state into a place where nothing is.
	restore(ctx context.Context) error
	// refresh brings what was restored to the newest state. false: it cannot.
	refresh(ctx context.Context) (bool, error)
	// forget removes what was restored.
	forget(ctx context.Context) error
	// digest reads what was restored.
	digest(ctx context.Context) ([32]byte, error)
	close(ctx context.Context) error
}

const (
	replicatePrefix = "pando-bench-replicate-"
	idlePushes      = 5
	idleSeconds     = 5.0 // no more pushes of nothing than begin within them: some tools read everything
	// roomFactor times the data are on the disk at once: in one contender's
	// volume and restored, with repository and slack.
	roomFactor = 2.6
)

// Replicate measures pushes and restores of Pando beside those of other tools and
// of a bare pipeline, with the same data, one after the other, and removes all that
// it made. Invalid, Permission, NoSpace if no scenario has room.
func Replicate(ctx context.Context, c ReplicateConfig) (_ *ReplicateReport, err error) {
	if err := c.checkReplicate(); err != nil {
		return nil, err
	}

	if err := cleanReplicate(ctx, c); err != nil {
		return nil, err
	}

	top, err := os.MkdirTemp(c.Dir, replicatePrefix)
	if err != nil {
		return nil, errs.Wrap("bench", c.Dir, err)
	}

	lock, err := tryLock(top)
	if err == nil && lock == nil {
		err = errs.New(errs.InUse, "bench", top, "another benchmark has locked it")
	}
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(top))
	}

	defer func() {
		err = errors.Join(err, treewalk.Remove(context.WithoutCancel(ctx), top))
		lock.Close()
	}()

	out := &ReplicateReport{Dir: c.Dir, Driver: c.Driver}
	measured := false
	for _, s := range c.Scenarios {
		sc := ReplicateScenario{Scenario: s}
		if sc.Skipped, err = noRoom(c.Dir, s, c.Appends); err != nil {
			return nil, err
		}
		if sc.Skipped == "" {
			measured = true
			if err := c.scenario(ctx, top, &sc); err != nil {
				return nil, err
			}
		}
		out.Scenarios = append(out.Scenarios, sc)
	}

	if !measured {
		return nil, errs.New(errs.NoSpace, "bench", c.Dir, "not enough space for any of the sizes: %s",
			out.Scenarios[0].Skipped).
			WithHint("use %s for less data, or %s for another disk", errs.Param("size"), errs.Param("dir"))
	}

	out.judge()
	return out, nil
}

func (c *ReplicateConfig) checkReplicate() error {
	if os.Geteuid() != 0 {
		return errs.New(errs.Permission, "bench", "replicate", "creating and mounting pools needs root").
			WithHint("run the benchmark as root")
	}

	for _, s := range c.Scenarios {
		if s.Base < 1<<20 || s.Append < 4096 || s.Base > 1<<42 || s.Append > s.Base {
			return errs.New(errs.Invalid, "bench", "--size",
				"%d bytes that grow by %d are not at least 1M that grow by 4K, and by no more than they are", s.Base, s.Append)
		}
	}

	if len(c.Scenarios) == 0 || c.Appends < 1 || c.Appends > 1000 {
		return errs.New(errs.Invalid, "bench", "--appends", "must be between 1 and 1000 (got %d)", c.Appends)
	}

	for _, n := range c.Only {
		known := slices.ContainsFunc(contenders(c), func(x contender) bool { return x.name() == n })
		if !known {
			return errs.New(errs.Invalid, "bench", n, "unknown contender").
				WithHint("choose from %s", strings.Join(contenderNames(c), ", "))
		}
	}

	return nil
}

func contenderNames(c *ReplicateConfig) []string {
	var out []string
	for _, x := range contenders(c) {
		out = append(out, x.name())
	}
	return out
}

// contenders are those that can be measured, Pando first.
func contenders(c *ReplicateConfig) []contender {
	return []contender{
		&pandoContender{c: c}, &pipeline{}, &sendStream{}, &restic{}, &litestream{},
	}
}

func noRoom(dir string, s Scenario, appends int) (string, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return "", errs.Wrap("bench", dir, err)
	}
	need := int64(roomFactor*float64(s.Base+int64(appends)*s.Append)) + 1<<30
	if free := int64(st.Bavail) * st.Bsize; free < need {
		return fmt.Sprintf("it needs %.1f GiB, %.1f GiB are free", float64(need)/(1<<30), float64(free)/(1<<30)), nil
	}
	return "", nil
}

// cleanReplicate removes what killed runs have left in the directory.
func cleanReplicate(ctx context.Context, c ReplicateConfig) error {
	entries, err := os.ReadDir(c.Dir)
	if err != nil {
		return errs.Wrap("bench", c.Dir, err)
	}

	for _, e := range entries {
		if !e.IsDir() || !strings.HasPrefix(e.Name(), replicatePrefix) {
			continue
		}

		top := filepath.Join(c.Dir, e.Name())
		lock, err := tryLock(top)
		if err != nil || lock == nil {
			continue // it lives, or is being removed
		}

		for _, x := range contenders(&c) {
			if l, ok := x.(interface {
				clean(ctx context.Context, dir string) error
			}); ok {
				err = errors.Join(err, l.clean(ctx, filepath.Join(top, x.name())))
			}
		}
		if err == nil {
			err = treewalk.Remove(ctx, top)
		}

		lock.Close()
		if err != nil {
			return errs.Wrap("bench", top, err)
		}
	}

	return nil
}

func (c *ReplicateConfig) scenario(ctx context.Context, top string, sc *ReplicateScenario) error {
	for _, x := range contenders(c) {
		_, own := x.(*pandoContender)
		_, bare := x.(*pipeline)
		if len(c.Only) > 0 && !slices.Contains(c.Only, x.name()) || !c.Peers && !own && !bare {
			continue
		}

		progress.From(ctx).StartOf(progress.RunningBenchmark, fmt.Sprintf("%s, %d MiB", x.name(), sc.Base>>20), 0, 0)
		t, err := c.transfer(progress.With(ctx, nil), x, filepath.Join(top, x.name()), sc.Scenario)
		if err != nil && (!errs.Is(err, errs.Unsupported) || own) {
			return errs.Wrap("bench", x.name(), err)
		}
		if err != nil {
			t = Transfer{Name: x.name(), Skipped: err.Error()}
		}
		if bare {
			sc.Decode, sc.Disk = t.decode, t.disk
		}

		sc.Transfers = append(sc.Transfers, t)
	}

	return nil
}

// transfer takes one contender through a scenario: the first push, a restore, changes with a push and a refresh each,
// pushes without changes, and a restore from nothing. It compares restored data with the original.
func (c *ReplicateConfig) transfer(ctx context.Context, x contender, dir string, s Scenario) (t Transfer, err error) {
	t.Name = x.name()
	if err := os.Mkdir(dir, 0o700); err != nil {
		return t, err
	}

	defer func() {
		ctx := context.WithoutCancel(ctx)
		if err = errors.Join(err, x.close(ctx)); err == nil || !errs.Is(err, errs.InUse) {
			err = errors.Join(err, treewalk.Remove(ctx, dir))
		}
	}()

	if err := x.open(ctx, dir, s.Base+int64(c.Appends)*s.Append); err != nil {
		return t, err
	}

	r := newRecords(1)
	push := func() (float64, int64, error) {
		before, err := treeBytes(x.repository())
		if err != nil {
			return 0, 0, err
		}
		took, err := timedSync(func() error { return x.push(ctx) }, x.repository())
		if err != nil {
			return 0, 0, err
		}
		after, err := treeBytes(x.repository())
		return took, after - before, err
	}

	// Push and restore the base.
	if err := x.grow(ctx, r, s.Base); err != nil {
		return t, err
	}

	if t.Push, t.PushBytes, err = push(); err != nil {
		return t, err
	}

	if t.Restore, err = timedSync(func() error { return x.restore(ctx) }, x.restored()); err != nil {
		return t, err
	}

	if err := c.appendAndRefresh(ctx, x, r, s, &t, push); err != nil {
		return t, err
	}

	// Push without changes.
	for spent := 0.0; len(t.Idle) < idlePushes && spent < idleSeconds; {
		took, _, err := push()
		if err != nil {
			return t, err
		}
		t.Idle = append(t.Idle, took)
		spent += took
	}

	// Check the refreshed copy, and restore everything again without it.
	if len(t.Refreshes) > 0 {
		if err := c.same(ctx, x, r, "refreshed"); err != nil {
			return t, err
		}
	}

	if err := x.forget(ctx); err != nil {
		return t, err
	}

	if t.RestoreAll, err = timedSync(func() error { return x.restore(ctx) }, x.restored()); err != nil {
		return t, err
	}

	if err := c.same(ctx, x, r, "restored"); err != nil {
		return t, err
	}

	t.Verified = true
	if p, ok := x.(*pipeline); ok {
		if t.decode, t.disk, err = p.parts(ctx); err != nil {
			return t, err
		}
	}

	return t, nil
}

// appendAndRefresh changes the data c.Appends times, and measures each push and, if the contender can refresh a
// restored copy, each refresh.
func (c *ReplicateConfig) appendAndRefresh(
	ctx context.Context, x contender, r *records, s Scenario, t *Transfer, push func() (float64, int64, error),
) error {
	for range c.Appends {
		if err := x.grow(ctx, r, s.Append); err != nil {
			return err
		}

		took, n, err := push()
		if err != nil {
			return err
		}

		t.Appends = append(t.Appends, took)
		t.AppendBytes += n / int64(c.Appends)
		can := false
		took, err = timedSync(func() (err error) { can, err = x.refresh(ctx); return err }, x.restored())
		if err != nil {
			return err
		}
		if can {
			t.Refreshes = append(t.Refreshes, took)
		}
	}

	return nil
}

// same checks that the contender brought back the data that was written: without that, figures are worth nothing.
func (c *ReplicateConfig) same(ctx context.Context, x contender, r *records, what string) error {
	got, err := x.digest(ctx)
	if err == nil && got != r.digest() {
		err = errs.New(errs.Damaged, "bench", x.name(), "the %s data differs from the original", what)
	}
	return err
}

// timedSync is how long fn takes until what it wrote to the filesystem of dir is on
// the disk, in seconds.
func timedSync(fn func() error, dir string) (float64, error) {
	start := time.Now()
	if err := fn(); err != nil {
		return 0, err
	}
	if err := durable.SyncFS(dir); err != nil {
		return 0, errs.Wrap("bench", dir, err)
	}
	return time.Since(start).Seconds(), nil
}

// treeBytes is the size of all files below dir.
func treeBytes(dir string) (n int64, err error) {
	err = filepath.WalkDir(dir, func(_ string, e fs.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return err
		}
		info, err := e.Info()
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err == nil {
			n += info.Size()
		}
		return err
	})

	return n, errs.Wrap("bench", dir, err)
}
