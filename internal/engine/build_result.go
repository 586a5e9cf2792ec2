package engine

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"time"
	"unicode"
	"unicode/utf8"

	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/linux/run"
)

const opBuild = "build"

// maxKeyBytes is the length of the longest key of a build.
const maxKeyBytes = 256

// BuildRequest says what to build.
type BuildRequest struct {
	Golden ref.Name // gets the result as its next generation; created if it does not exist
	From   ref.Ref  // the generation or snapshot that the key is valid for
	In     ref.Ref  // what the command runs in a clone of, instead of From: an earlier step
	Key    string   // under which the result is found again; at most 256 bytes, printable
	Again  bool     // build even if there is a result
	May    Rights   // of the mount

	// Prepare is called with the mounted clone before the command runs. It may be nil.
	Prepare func(ctx context.Context, dir string) error

	// Fetch is called before the command, if there is no result. It may make one with PublishFetched, and reports whether
	// it did. No other process builds or fetches the same result. It may be nil.
	Fetch func(ctx context.Context) (bool, error)

	Command []string
	Dir     string   // in the clone, that the command runs in; "": its root
	Env     []string // of the command, in addition to PANDO_VOLUME, PANDO_MOUNT and PWD; it inherits no others
	Signals run.Signals
	Output  io.Writer // also gets what the command prints; nil: nobody
	Keep    *int      // of the golden: newest generations to keep from now on, 0: all; nil: as before
	Labels  map[string]string
	Tracker *progress.Tracker
}

// Built is the result of Build. Its JSON form is stable.
type Built struct {
	Info
	Key     string   `json:"key"`
	Cached  bool     `json:"cached"`            // the command did not run
	Waited  bool     `json:"waited"`            // for another process that built it
	Fetched bool     `json:"fetched"`           // from a remote
	Seconds float64  `json:"seconds"`           // that the command took; 0 if it did not run
	Removed []string `json:"removed,omitempty"` // older generations, by the golden's retention
}

// maxSignal is the highest signal of Linux.
const maxSignal = 64

// CommandError is in the error of a build whose command failed.
type CommandError struct {
	Exit   int  // exit status of the command; 128 + signal if a signal ended it
	Waited bool // it ran in another process, for which this one waited
}

func (e *CommandError) Error() string {
	who := "the command"
	if e.Waited {
		who = "the command, which another pando process ran,"
	}
	if e.Exit > 128 && e.Exit <= 128+maxSignal {
		return fmt.Sprintf("%s failed with exit status %d (signal %d)", who, e.Exit, e.Exit-128)
	}
	return fmt.Sprintf("%s failed with exit status %d", who, e.Exit)
}

// Build runs a command in a clone, and publishes the clone as the next generation of a golden if the command succeeds;
// otherwise nothing remains but its log. If there is a result for the key, Build returns it at once. If another process
// is building it, Build writes what that command prints to q.Output, and returns its result, or fails with it; it runs
// the command itself if the other process was interrupted. Durable on return; the generation is sealed later: see Seal.
// Build passes on the signals of q.Signals. The errors of Clone and Publish; Conflict (the key belongs to another
// base), Invalid with a CommandError.
func (e *Engine) Build(ctx context.Context, q BuildRequest) (Built, error) {
	ctx, end := e.ledger.Begin(ctx)
	defer end()

	if err := q.check(); err != nil {
		return Built{}, err
	}

	// Keep to what From leads to now, whatever is published while it is built.
	begun := time.Now()
	var err error
	if q.From, err = e.BuildBase(ctx, q.From); err != nil {
		return Built{}, err
	}

	// Return a result at once.
	out, found, err := e.CachedBuild(ctx, q)
	if err != nil || found && !q.Again {
		return out, err
	}

	if err := e.needRoot(opBuild, q.Golden.String()); err != nil {
		return Built{}, err
	}

	// Let one process build it, and show what its command prints.
	names := e.buildLogs(q.Golden.String(), q.Key)
	replaced := out.ID // by q.Again
	follow := &logFollower{path: names.running, out: q.Output}
	defer follow.close()
	unlock, waited, err := e.lockBuilding(ctx, q.Golden.String(), buildLock(q), follow.copyNew)
	if err != nil {
		return Built{}, err
	}
	defer unlock()

	// Another process may have built it since, even if that one has let the lock go already.
	if waited {
		follow.copyNew()
	}
	if out, found, err = e.CachedBuild(ctx, q); err != nil {
		return Built{}, err
	}
	if found && out.ID != replaced {
		follow.showUnseen(e.resultLog(driver.ObjectID(out.ID)))
		out.Waited = true
		return out, nil
	}
	if waited {
		if exit, failed := names.failedSince(follow, begun); failed {
			return Built{}, errs.New(errs.Invalid, opBuild, q.Golden.String(), "%w", &CommandError{exit, true})
		}
	}

	b := &resultBuild{e: e, q: q, logs: names}
	return b.run(ctx)
}

// check checks a request. Invalid.
func (q BuildRequest) check() error {
	if err := q.Golden.Required(opBuild); err != nil {
		return err
	}

	bad := func(r rune) bool { return !unicode.IsPrint(r) }
	switch {
	case q.Key == "":
		return errs.New(errs.Invalid, opBuild, q.Golden.String(), "the key is empty").
			WithHint("name what the result depends on, such as the checksum of a lock file: %s",
				errs.Param("key", `"$(sha256sum < package-lock.json)"`))
	case len(q.Key) > maxKeyBytes || !utf8.ValidString(q.Key) || strings.ContainsFunc(q.Key, bad):
		return errs.New(errs.Invalid, opBuild, q.Golden.String(),
			"the key must be printable and have at most %d bytes (got %d)", maxKeyBytes, len(q.Key)).
			WithHint("use a checksum of what the result depends on")
	case len(q.Command) == 0:
		return errs.New(errs.Invalid, opBuild, q.Golden.String(), "no command to run").
			WithHint("add a command: %s",
				errs.Run("golden build", q.Golden.String(), errs.Param("from", q.From.String()), "--", "COMMAND"))
	}

	return nil
}

// CachedBuild returns the result for the key of a request, if there is one, and notes that it was used. NotFound
// (From), Invalid (it is a volume), Conflict (the result was made from another base).
func (e *Engine) CachedBuild(ctx context.Context, q BuildRequest) (out Built, found bool, err error) {
	var row catalog.Row
	if err = e.cat.View(ctx, func(tx *catalog.Tx) error {
		base, err := buildBase(tx, q.From)
		if err != nil {
			return err
		}
		if row, found, err = tx.BuildResult(q.Golden.String(), q.Key); err != nil || !found {
			return err
		}
		if row.Build.Base != base.ID {
			return otherBase(tx, q, row)
		}

		g, _, err := tx.Golden(row.Golden)
		out = Built{Info: generationInfo(row, g, e.caps.Name), Key: q.Key, Cached: true}
		return err
	}); err != nil || !found {
		return Built{}, false, err
	}

	// When it was used matters only to prune, and root alone can note it.
	_ = e.cat.Update(ctx, catalog.Soft, func(tx *catalog.Tx) error { return tx.SetUsed(row.ID, time.Now()) })
	return out, true, nil
}

// BuildBase returns a reference of what a build begins with that names one object: a golden gets the number of its
// current generation. NotFound, Invalid, Unsupported (a snapshot of an overlay).
func (e *Engine) BuildBase(ctx context.Context, from ref.Ref) (exact ref.Ref, err error) {
	err = e.cat.View(ctx, func(tx *catalog.Tx) error {
		base, err := buildBase(tx, from)
		if err != nil {
			return err
		}
		exact, err = ref.Parse(opBuild, tx.RefOf(base))
		return err
	})
	return exact, err
}

// buildBase finds what a build begins with. NotFound, Invalid, Unsupported (a snapshot of an overlay).
func buildBase(tx *catalog.Tx, from ref.Ref) (catalog.Row, error) {
	base, err := tx.Resolve(opBuild, from)
	switch {
	case err != nil:
	case !base.Kind.Immutable():
		err = errs.New(errs.Invalid, opBuild, from.String(), "it is a volume, whose content can change").
			WithHint("build from a generation or a snapshot: take one with %s", errs.Run("snapshot", from))
	case base.IsOverlay():
		err = errs.New(errs.Unsupported, opBuild, from.String(), "it is a snapshot of an overlay, which has only changes").
			WithHint("make a generation of the overlay with %s, and build from that",
				errs.Run("golden publish", "GOLDEN", from.Name))
	}
	return base, err
}

// otherBase is the error for a key whose result was made from another base.
func otherBase(tx *catalog.Tx, q BuildRequest, result catalog.Row) error {
	was := "a base that no longer exists"
	if base, ok, err := tx.Object(result.Build.Base); err == nil && ok {
		was = tx.RefOf(base)
	}
	name := tx.RefOf(result)
	conflict := errs.New(errs.Conflict, opBuild, q.Golden.String(),
		"key %q belongs to %s, which was built from %s, not from %s", q.Key, name, was, q.From)
	if g, ok, err := tx.Golden(result.Golden); err == nil && ok && g.Current == result.Generation {
		return conflict.WithHint("use a key that names the base, too") // the current generation cannot be removed
	}
	return conflict.WithHint("use a key that names the base, too, or remove that result with %s",
		errs.Run("golden rm", name))
}

// resultBuild is a build that runs its command.
type resultBuild struct {
	e    *Engine
	q    BuildRequest
	logs buildLogs

	base, made catalog.Row // From, and what the command runs in a clone of
	baseRef    string
	seconds    float64
	out        Published
}

// run builds the result. The caller holds the lock of its key.
func (b *resultBuild) run(ctx context.Context) (Built, error) {
	e, q := b.e, b.q
	if q.Fetch != nil {
		fetched, err := q.Fetch(ctx)
		if err != nil {
			return Built{}, err
		}
		if fetched {
			out, found, err := e.CachedBuild(ctx, q)
			if out.Fetched = true; err != nil || found {
				return out, err
			}
		}
	}

	if err := b.findBase(ctx); err != nil {
		return Built{}, err
	}
	program, err := q.program()
	if err != nil {
		return Built{}, err
	}

	log, err := b.logs.begin()
	if err != nil {
		return Built{}, err
	}

	// Run the command in a clone that only serves the build, and publish that.
	in := q.From
	if q.In.Name != "" {
		in = q.In
	}
	name := ref.MustName("build-" + string(e.newIdentity("").ID[:10]))
	_, err = e.Run(Unrecorded(ctx), RunRequest{From: in, Name: name, May: q.May, Tracker: q.Tracker,
		Do:      func(ctx context.Context, vol Info) error { return b.runCommand(ctx, program, vol, log) },
		publish: func(_ context.Context, vol catalog.Row) error { return b.publish(ctx, vol) },
	})
	log.close()
	if err != nil && b.out.Name == "" {
		b.logs.keepFailed(ctx, q, err)
		return Built{}, errs.Wrap(opBuild, q.Golden.String(), err)
	}

	return Built{Info: b.out.Info, Key: q.Key, Seconds: b.seconds, Removed: b.out.Removed}, nil
}

// findBase finds the base, and what the command runs in a clone of.
func (b *resultBuild) findBase(ctx context.Context) error {
	return b.e.cat.View(ctx, func(tx *catalog.Tx) (err error) {
		if b.base, err = buildBase(tx, b.q.From); err != nil {
			return err
		}
		b.made = b.base
		if b.q.In.Name != "" {
			b.made, err = buildBase(tx, b.q.In)
		}
		b.baseRef = tx.RefOf(b.made)
		return err
	})
}

// program returns the path of the command, as Run finds it. NotFound.
func (q BuildRequest) program() (string, error) {
	name := q.Command[0]
	if strings.Contains(name, "/") {
		return name, nil
	}
	path, err := run.Find(name, q.Env)
	if err != nil {
		return "", errs.New(errs.NotFound, opBuild, name, "no such program")
	}
	return path, nil
}

// runCommand runs the command in the mounted clone. Invalid with a CommandError.
func (b *resultBuild) runCommand(ctx context.Context, program string, vol Info, log *buildLog) error {
	q := b.q
	log.out = q.Output
	if q.Prepare != nil {
		if err := q.Prepare(ctx, vol.Mountpoint); err != nil {
			return err
		}
	}

	dir, err := dirInside(vol.Mountpoint, q.Dir)
	if err != nil {
		return err
	}

	// Its output goes through a pipe, which does not outlive the command for long: what it left behind may hold it open.
	r, w, err := os.Pipe()
	if err != nil {
		return errs.Wrap(opBuild, q.Command[0], err)
	}
	defer r.Close()

	copied := make(chan struct{})
	go func() {
		defer close(copied)
		_, _ = io.Copy(log, r)
	}()

	cmd := &exec.Cmd{Path: program, Args: q.Command, Dir: dir, Stdout: w, Stderr: w,
		Env:         append(slices.Clone(q.Env), "PANDO_VOLUME="+vol.Name, "PANDO_MOUNT="+vol.Mountpoint, "PWD="+dir),
		SysProcAttr: &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}}
	q.Tracker.Start("", 0, 0) // what the command prints is shown instead
	begun := time.Now()
	sealed := b.e.sealMeanwhile(ctx)
	exit, interrupted, err := foreground(ctx, cmd, q.Signals)
	b.seconds = time.Since(begun).Seconds()
	w.Close()
	sealed()
	select {
	case <-copied:
	case <-time.After(outputPatience):
	}

	switch {
	case err != nil:
		return errs.Wrap(opBuild, q.Command[0], err)
	case interrupted || ctx.Err() != nil:
		return context.Canceled
	case exit != 0:
		return errs.New(errs.Invalid, opBuild, q.Golden.String(), "%w", &CommandError{Exit: exit}).
			WithHint("see what it printed with %s",
				errs.Run("golden log", q.Golden.String(), errs.Param("key", q.Key), errs.Param("failed")))
	}
	return nil
}

// outputPatience is how long a build waits for the end of the output after its command has ended.
const outputPatience = time.Second

// foreground is run.ForegroundGroup of a command that dies with this process, and with ctx if nobody passes signals on.
// It reports whether a signal was passed on, which ctx may learn of only later.
func foreground(ctx context.Context, cmd *exec.Cmd, signals run.Signals) (exit int, interrupted bool, err error) {
	if signals == nil {
		signals = func() (<-chan os.Signal, func()) {
			c := make(chan os.Signal, 1)
			stop := context.AfterFunc(ctx, func() { c <- os.Kill })
			return c, func() { stop() }
		}
	}

	var passed atomic.Bool
	noting := func() (<-chan os.Signal, func()) {
		arriving, stop := signals()
		noted, ended := make(chan os.Signal), make(chan struct{})
		go func() {
			for {
				select {
				case s := <-arriving:
					passed.Store(true)
					select {
					case noted <- s:
					case <-ended:
					}
				case <-ended:
					return
				}
			}
		}()
		return noted, func() { close(ended); stop() }
	}

	runtime.LockOSThread() // the command would die with the thread that started it
	defer runtime.UnlockOSThread()
	exit, err = run.ForegroundGroup(cmd, noting)
	return exit, passed.Load(), err
}

// dirInside returns the path of a directory in a volume, without leading out of it through a link. Invalid, NotFound.
func dirInside(mountpoint, dir string) (string, error) {
	if dir == "" || dir == "." {
		return mountpoint, nil
	}
	if !filepath.IsLocal(dir) {
		return "", errs.New(errs.Invalid, opBuild, dir, "it leads out of the volume").
			WithHint("name a directory relative to the root of the volume")
	}

	root, err := os.OpenRoot(mountpoint)
	if err != nil {
		return "", errs.Wrap(opBuild, dir, err)
	}
	defer root.Close()

	st, err := root.Stat(dir)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return "", errs.New(errs.NotFound, opBuild, dir, "the volume has no such directory")
	case err != nil:
		return "", errs.Wrap(opBuild, dir, err)
	case !st.IsDir():
		return "", errs.New(errs.Invalid, opBuild, dir, "not a directory of the volume")
	}
	return mountpoint + "/" + dir, nil
}

// publish makes the unmounted clone the next generation, without sealing it.
func (b *resultBuild) publish(ctx context.Context, vol catalog.Row) (err error) {
	if err := ctx.Err(); err != nil { // interrupted after the command had ended
		return err
	}
	if vol.OriginID != "" && vol.OriginID != b.made.ID {
		return errs.New(errs.Conflict, opBuild, b.q.Golden.String(), "%s was replaced while the build began", b.baseRef).
			WithHint("run the build again")
	}

	sum := sha256.Sum256([]byte(strings.Join(b.q.Command, "\x00")))
	record := driver.Build{Key: b.q.Key, Base: b.base.ID, Command: hex.EncodeToString(sum[:])}
	if b.made.ID != b.base.ID {
		record.Parent = b.made.ID
	}

	b.out, err = b.e.publishResult(ctx, resultRequest{golden: b.q.Golden.String(), vol: vol, record: record,
		origin: b.made, originRef: b.baseRef, keep: b.q.Keep, labels: b.q.Labels, tracker: b.q.Tracker,
		made: b.logs.keepResult})
	return err
}
