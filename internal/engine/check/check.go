// Package check finds what is wrong with a pool, and repairs it: it compares the objects with the catalogue, checks the
// filesystems inside images, repairs both, and rebuilds a lost catalogue.
//
// The engine gives it what it needs of other verbs: see Verbs.
package check

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"pando/internal/base/errs"
	"pando/internal/base/progress"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/engine/content"
	"pando/internal/engine/ledger"
	"pando/internal/engine/pool"
)

// opFsck is the operation of marks on what fsck copies or repairs.
const opFsck = ledger.OpFsck

// Severity of a finding.
const (
	sevError   = "error"   // data is damaged, gone or out of reach
	sevWarning = "warning" // pool and catalogue disagree, or something could not be checked; nothing is lost
	sevNote    = "note"    // the next command or gc cleans it up, or it is intended
)

// byHandRebuild begins the advice where the catalogue itself is wrong.
var byHandRebuild = errs.Messagef("by hand: %s", errs.Run("init", errs.Param("rebuild")))

// Finding is something that is not as it should be.
type Finding struct {
	Severity string       `json:"severity"`           // error, warning or note
	Code     string       `json:"code"`               // stable: see docs/fsck.md
	Ref      string       `json:"ref,omitempty"`      // reference or path
	ID       string       `json:"id,omitempty"`       // ID of the object
	Message  errs.Message `json:"message"`            // what is wrong
	Repair   errs.Message `json:"repair,omitempty"`   // what a repair does, or what the user can do
	Repaired string       `json:"repaired,omitempty"` // what has been done; "": nothing
	Failed   string       `json:"failed,omitempty"`   // why it could not be repaired
	Detail   string       `json:"detail,omitempty"`   // what a program said

	fix        fix    // nil: cannot be repaired
	attachment uint64 // tells attachments of one block device apart: what holds one now need not be what held it before
}

// fix repairs a finding, and says what it did; "": nothing.
type fix func(context.Context) (done string, err error)

// describe sets what was found, and what can be done about it.
func (f *Finding) describe(severity, code string, message, repair errs.Message) {
	f.Severity, f.Code, f.Message, f.Repair = severity, code, message, repair
}

// key tells findings apart.
func (f Finding) key() string {
	return fmt.Sprint(f.Code, "\x00", f.Ref, "\x00", f.ID, "\x00", f.Message, "\x00", f.attachment)
}

// Counts says how much was checked.
type Counts struct {
	Objects     int `json:"object_count"` // number of objects in the pool
	Rows        int `json:"row_count"`    // number of objects in the catalogue
	Attachments int `json:"mount_count"`  // number of mount records
	Images      int `json:"image_count"`  // number of images whose filesystems were checked
	// number of images that were not checked, as they share all blocks with one that was
	Shared int `json:"shared_count"`
	Raw    int `json:"raw_count"`  // number of images without a filesystem, whose content nobody can check
	Trees  int `json:"tree_count"` // number of trees that were opened
	// number of objects that were skipped, as another pando process works on them
	Busy int `json:"busy_count"`
}

// Report is the result of a check.
type Report struct {
	Checked  Counts    `json:"checked"`         // what was checked
	Findings []Finding `json:"findings"`        // what is wrong
	OK       bool      `json:"ok"`              // no error or warning, or all repaired
	Notes    []string  `json:"notes,omitempty"` // what was not checked, and why
}

// Request says what to check.
type Request struct {
	Refs   []ref.Ref // objects whose inner filesystems are checked; nil: all
	Repair bool
}

// Pool is an open pool to check.
type Pool struct {
	*pool.Pool
	Catalog *catalog.Catalog
	Driver  driver.Driver
	Ledger  *ledger.Ledger
	Content *content.Access
	Verbs   Verbs

	// Look finds a program, as [run.Look] does.
	Look func(name string) (path string, err error)
}

// Verbs is what repairs need from the engine's verbs.
type Verbs interface {
	// Sweep does what the first command after a boot does, and returns how many objects it removed.
	Sweep(ctx context.Context) (removed int, err error)

	// LockGolden keeps others from building the same golden.
	LockGolden(ctx context.Context, name string) (unlock func(), err error)

	// WriteIdentity makes the pool know an identity.
	WriteIdentity(ctx context.Context, id driver.Identity) error

	// RestoreIdentity writes the identity of an object into the pool as the catalogue has it, even if the pool's own
	// cannot be read.
	RestoreIdentity(ctx context.Context, id driver.ObjectID) error

	// Remove makes the driver remove an object that no longer has a name.
	Remove(ctx context.Context, id driver.ObjectID, ref, why string) error

	// Succeed replaces a volume by a copy of it that mend has changed, in one commit. find finds the volume in the
	// transaction that claims it. before names the snapshot that keeps the old state.
	Succeed(ctx context.Context, op string, find func(*catalog.Tx) (catalog.Row, error),
		mend func(ctx context.Context, copied driver.ObjectID) error) (before string, err error)
}

// fsck is a running check.
type fsck struct {
	Pool
	q      Request
	report *Report
	seen   map[string]bool // keys of findings
	before string          // the boot before this one, if no command has cleaned up after its end yet
}

func newFsck(p Pool, q Request) *fsck {
	return &fsck{Pool: p, q: q, report: &Report{Findings: []Finding{}}, seen: map[string]bool{}}
}

// Run compares the pool with its catalogue and checks the filesystems inside images, on copies: only Repair changes the
// pool. It skips objects that another process works on. It holds the pool's lock for the comparison, which keeps sweeps
// away; volumes can be used all the time. An error means that the check could not be done; findings are in the report.
// NotFound.
func Run(ctx context.Context, p Pool, q Request) (*Report, error) {
	c := newFsck(p, q)
	for _, r := range q.Refs {
		if err := c.Catalog.View(ctx, func(tx *catalog.Tx) error {
			_, err := tx.Resolve(opFsck, r)
			return err
		}); err != nil && !errs.Is(err, errs.Damaged) {
			return nil, err
		}
	}

	whole, err := c.checkPool(ctx)
	if err != nil || !whole {
		return c.finishReport(), err
	}

	if err := c.checkInside(ctx); err != nil {
		return nil, err
	}

	return c.finishReport(), ctx.Err()
}

// Unreadable returns the report on a pool whose catalogue cannot be opened, for the given reason.
func Unreadable(p *pool.Pool, reason error) *Report {
	c := newFsck(Pool{Pool: p}, Request{})
	c.damagedCatalog(reason.Error())
	return c.finishReport()
}

// finishReport sets whether all is well in the end.
func (c *fsck) finishReport() *Report {
	c.report.OK = true
	for _, f := range c.report.Findings {
		if f.Severity != sevNote && f.Repaired == "" {
			c.report.OK = false
		}
	}
	return c.report
}

// addNote adds a note to the report: what was not checked, and why.
func (c *fsck) addNote(format string, args ...any) {
	c.report.Notes = append(c.report.Notes, fmt.Sprintf(format, args...))
}

// damagedCatalog reports a catalogue that the pool cannot be compared with.
func (c *fsck) damagedCatalog(why string) {
	c.report.Findings = append(c.report.Findings, Finding{
		Severity: sevError, Code: "catalogue", Ref: filepath.Join(c.Dir, "catalog.db"),
		Message: errs.Messagef("%s", why), Repair: byHandRebuild + " rebuilds it from the pool",
	})
}

// passes is how often the pool is compared: a repair can reveal another problem (a snapshot whose volume was
// forgotten).
const passes = 6

// checkPool compares the pool with the catalogue. It returns false if the catalogue is so damaged that nothing else can
// be checked.
func (c *fsck) checkPool(ctx context.Context) (bool, error) {
	unlock, err := pool.Lock(ctx, c.Dir)
	if err != nil {
		return false, err
	}

	defer unlock()

	// Check the catalogue itself.
	progress.From(ctx).Start(progress.CheckingCatalogue, 0, 0)
	bad, err := c.Catalog.Check(ctx)
	if err != nil {
		return false, err
	}

	for _, why := range bad {
		c.damagedCatalog(why)
	}

	if len(bad) > 0 {
		return false, nil
	}

	// Sweep, if no command has since the host started.
	var last catalog.Swept
	if err := c.Catalog.View(ctx, func(tx *catalog.Tx) (err error) {
		last, err = tx.Swept()
		return err
	}); err != nil {
		return false, err
	}

	if c.Catalog.Lost() > 0 {
		c.lostCommits()
	} else if last.BeforeBoot() {
		if err := c.sweepBoot(ctx, last); err != nil {
			return false, err
		}
	}

	// Compare, and repair, until nothing new is found.
	progress.From(ctx).Start(progress.ComparingWithCatalogue, 0, 0)
	for range passes {
		found, err := c.compareTwice(ctx)
		if errs.Is(err, errs.Damaged) {
			c.damagedCatalog(err.Error())
			return false, nil
		}
		if err != nil {
			return false, err
		}
		if c.addFindings(ctx, found) == 0 {
			return true, nil
		}
	}

	return true, nil
}

// sweepBoot sweeps the pool at the first use since the host started, if c repairs. Otherwise it only adds a note.
func (c *fsck) sweepBoot(ctx context.Context, last catalog.Swept) error {
	if !c.q.Repair {
		c.before = last.BootID
		c.addNote("this is the first use since the host started: the next command cleans up some of what is reported here")
		return nil
	}

	removed, err := c.Verbs.Sweep(ctx)
	if err != nil {
		return err
	}

	if err := c.Catalog.Update(ctx, catalog.Durable, func(tx *catalog.Tx) error { return tx.SetSwept() }); err != nil {
		return err
	}

	c.addNote("first use since the host started: removed %d incomplete or ephemeral objects", removed)
	return nil
}

// lostCommits reports a catalogue that lost commits. It cannot tell what the pool should be, so nothing is repaired.
func (c *fsck) lostCommits() {
	c.q.Repair = false
	c.report.Findings = append(c.report.Findings, Finding{
		Severity: sevError, Code: "catalogue-lost", Ref: filepath.Join(c.Dir, "catalog.db"),
		Message: errs.Messagef("%v", c.Catalog.LostError()), Repair: byHandRebuild + " rebuilds it from the pool",
	})
}

// addFindings adds findings to the report, and repairs them if requested. It returns how many repairs succeeded.
func (c *fsck) addFindings(ctx context.Context, found []Finding) (repaired int) {
	for _, f := range found {
		if c.seen[f.key()] {
			continue
		}

		c.seen[f.key()] = true
		if c.q.Repair && f.fix != nil && ctx.Err() == nil {
			done, err := f.fix(ctx)
			switch {
			case err != nil:
				f.Failed = err.Error()
			case done != "":
				f.Repaired = done
				repaired++
			}
		}

		c.report.Findings = append(c.report.Findings, f)
	}

	return repaired
}

// compareTwice compares, and compares again if something is found: a change by another process in the meantime is not
// found twice, and is not wrong.
func (c *fsck) compareTwice(ctx context.Context) ([]Finding, error) {
	first, err := c.compareAll(ctx)
	if err != nil || len(first) == 0 {
		return nil, err
	}

	second, err := c.compareAll(ctx)
	if err != nil {
		return nil, err
	}

	keys := map[string]bool{}
	for _, f := range first {
		keys[f.key()] = true
	}

	var out []Finding
	for _, f := range second {
		if keys[f.key()] {
			out = append(out, f)
		}
	}

	return out, nil
}

// poolFiles are the files of a pool. Not all need to exist.
var poolFiles = []string{
	"pool.json", "catalog.db", "catalog.db-wal", "catalog.db-shm", "catalog.seen", "backing.xfs", "lock", "reserve",
}

// checkDirs checks the directories and files of the pool itself.
func (c *fsck) checkDirs() ([]Finding, error) {
	var out []Finding
	dirs := map[string]bool{"": true, "live": true, "locks": true, "mnt": true, "data": false, "data/objects": false}
	_, outside := c.Driver.(driver.Spacer)
	for _, d := range []string{"", "live", "locks", "mnt", "data", "data/objects"} {
		if outside && d == "data/objects" {
			continue // the objects are not in the directory
		}

		path := filepath.Join(c.Dir, d)
		st, err := os.Lstat(path)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			f := Finding{Ref: path}
			f.describe(sevWarning, "pool-missing", "the directory is missing", "create it")
			f.fix = func(context.Context) (string, error) { return "created", os.Mkdir(path, 0o700) }
			if !dirs[d] {
				f.Severity, f.Repair, f.fix = sevError, "by hand: the objects were in it", nil
			}
			out = append(out, f)
		case err != nil:
			return nil, errs.Wrap(opFsck, path, err)
		case !st.IsDir():
			f := Finding{Ref: path}
			f.describe(sevError, "pool-missing", "it is not a directory", "by hand: move it away")
			out = append(out, f)
		default:
			out = append(out, wrongMode(path, st, 0o700)...)
		}
	}

	for _, n := range poolFiles {
		path := filepath.Join(c.Dir, n)
		if st, err := os.Lstat(path); err == nil {
			out = append(out, wrongMode(path, st, 0o600)...)
		} else if !errors.Is(err, fs.ErrNotExist) {
			return nil, errs.Wrap(opFsck, path, err)
		}
	}

	return out, nil
}

// wrongMode finds permissions that let other users in, or lock the owner out.
func wrongMode(path string, st fs.FileInfo, want fs.FileMode) []Finding {
	if st.Mode().Perm() == want {
		return nil
	}
	f := Finding{Ref: path}
	f.describe(sevWarning, "pool-mode", errs.Messagef("its mode is %04o, not %04o", st.Mode().Perm(), want),
		"set the mode")
	f.fix = func(context.Context) (string, error) { return "set", errs.Wrap(opFsck, path, os.Chmod(path, want)) }
	return []Finding{f}
}
