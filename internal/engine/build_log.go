package engine

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
)

// What the command of a build prints goes to a file, which processes that wait for the build follow:
//
//	builds/running/KEY.log   of a build that runs, or was killed; KEY is a hash of the golden and the key
//	builds/results/ID.log    of the result with this ID; it is removed with the generation
//	builds/failed/KEY.log    of the last build that failed
//	builds/failed/KEY.json   how it failed; missing if it was interrupted
//
// The files are not synced: a power loss may take the end of a log.

// logMost limits the bytes of a log. What a command prints beyond that is shown, but not kept.
const logMost = 16 << 20

// failedMost limits how many logs of failed builds a pool keeps.
const failedMost = 64

// buildLogs are the files of one key.
type buildLogs struct {
	dir                           string // builds
	running, failedLog, failedHow string
}

func (e *Engine) buildLogs(golden, key string) buildLogs {
	sum := sha256.Sum256([]byte(golden + "\x00" + key))
	name, dir := hex.EncodeToString(sum[:16]), e.pool.BuildsDir()
	return buildLogs{dir, filepath.Join(dir, "running", name+".log"), filepath.Join(dir, "failed", name+".log"),
		filepath.Join(dir, "failed", name+".json")}
}

// resultLog returns the path of the log of a result.
func (e *Engine) resultLog(id driver.ObjectID) string {
	return filepath.Join(e.pool.BuildsDir(), "results", string(id)+".log")
}

// begin makes the log of a build that begins to run. The caller holds the lock of the key.
func (l buildLogs) begin() (*buildLog, error) {
	for _, d := range []string{"running", "results", "failed"} {
		if err := os.MkdirAll(filepath.Join(l.dir, d), 0o700); err != nil {
			return nil, errs.Wrap(opBuild, l.dir, err)
		}
	}

	// The log of a build that was killed may be followed: make another file.
	if err := os.Remove(l.running); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, errs.Wrap(opBuild, l.running, err)
	}
	f, err := os.OpenFile(l.running, os.O_CREATE|os.O_EXCL|os.O_WRONLY|os.O_APPEND, 0o600)
	return &buildLog{file: f, left: logMost}, errs.Wrap(opBuild, l.running, err)
}

// keepResult makes the log that of a result, which is about to be recorded. Without it the result has no log.
func (l buildLogs) keepResult(id driver.ObjectID) {
	_ = os.Rename(l.running, filepath.Join(l.dir, "results", string(id)+".log"))
	_ = os.Remove(l.failedLog)
	_ = os.Remove(l.failedHow)
}

// failedBuild says how a build failed.
type failedBuild struct {
	Golden string    `json:"golden"`
	Key    string    `json:"key"`
	Exit   int       `json:"exit"`
	At     time.Time `json:"at"`
}

// keepFailed keeps the log of a build that has failed or was interrupted.
func (l buildLogs) keepFailed(ctx context.Context, q BuildRequest, failure error) {
	how := failedBuild{Golden: q.Golden.String(), Key: q.Key, Exit: -1, At: time.Now().UTC()}
	var failed *CommandError
	if errors.As(failure, &failed) && ctx.Err() == nil {
		how.Exit = failed.Exit
	}

	b, _ := json.Marshal(how) // strings and numbers only
	if os.WriteFile(l.failedHow, append(b, '\n'), 0o600) != nil || os.Rename(l.running, l.failedLog) != nil {
		_ = os.Remove(l.failedHow)
	}
	l.forgetOldest()
}

// forgetOldest removes the oldest logs of failed builds beyond failedMost.
func (l buildLogs) forgetOldest() {
	all := readFailed(l.dir)
	for _, f := range all[min(len(all), failedMost):] {
		_ = os.Remove(f.path + ".log")
		_ = os.Remove(f.path + ".json")
	}
}

// failedSince reports whether the build that a follower has followed failed, and with which exit status. One that was
// too short to be followed counts if it has failed since the caller has begun to wait; its log is shown now. The caller
// has waited for the lock of the key, and holds it.
func (l buildLogs) failedSince(f *logFollower, begun time.Time) (exit int, failed bool) {
	var how failedBuild
	b, err := os.ReadFile(l.failedHow)
	if err != nil || json.Unmarshal(b, &how) != nil || how.Exit < 0 {
		return 0, false // none has, or it was interrupted
	}

	if f.file == nil {
		if !how.At.After(begun) {
			return 0, false
		}
		f.showUnseen(l.failedLog)
		return how.Exit, true
	}

	log, err := os.Stat(l.failedLog)
	if err != nil {
		return 0, false
	}
	followed, err := f.file.Stat()
	return how.Exit, err == nil && os.SameFile(log, followed)
}

// keptFailure is the log of a failed build.
type keptFailure struct {
	failedBuild
	path string // without .log
}

// readFailed lists the logs of failed builds, the newest first.
func readFailed(dir string) []keptFailure {
	var out []keptFailure
	paths, _ := filepath.Glob(filepath.Join(escapeGlob(dir), "failed", "*.json"))
	for _, p := range paths {
		f := keptFailure{path: strings.TrimSuffix(p, ".json")}
		b, err := os.ReadFile(p)
		if err == nil {
			_ = json.Unmarshal(b, &f.failedBuild) // one that cannot be read is the oldest
			out = append(out, f)
		}
	}

	slices.SortFunc(out, func(a, b keptFailure) int { return b.At.Compare(a.At) })
	return out
}

// escapeGlob returns a pattern that matches only the path.
func escapeGlob(path string) string {
	return strings.NewReplacer(`\`, `\\`, "*", `\*`, "?", `\?`, "[", `\[`).Replace(path)
}

// buildLog is the log of a build that runs.
type buildLog struct {
	file *os.File
	left int64
	out  io.Writer // also gets everything; nil: nobody
}

// Write never fails: the command goes on even if its log cannot be written.
func (l *buildLog) Write(b []byte) (int, error) {
	if l.out != nil {
		_, _ = l.out.Write(b)
	}

	keep := b[:min(int64(len(b)), l.left)]
	if len(keep) > 0 {
		_, _ = l.file.Write(keep)
		if l.left -= int64(len(keep)); l.left == 0 {
			fmt.Fprintf(l.file, "\n[pando keeps only the first %s of a log]\n", errs.FormatBytes(logMost))
		}
	}
	return len(b), nil
}

func (l *buildLog) close() { l.file.Close() }

// logFollower copies the log of a build while another process writes it.
type logFollower struct {
	path string
	out  io.Writer // nil: nobody
	file *os.File  // nil: not found yet
}

// copyNew copies what the log has become longer by. If another build of the same key has begun, it goes on with that.
func (f *logFollower) copyNew() {
	now, err := os.Stat(f.path)
	if err == nil && f.file != nil {
		if st, err := f.file.Stat(); err == nil && !os.SameFile(st, now) {
			f.copyRest()
			f.close()
		}
	}
	if err == nil && f.file == nil {
		f.file, _ = os.Open(f.path)
	}
	f.copyRest()
}

// showUnseen copies the log of a build that has ended, unless the follower has seen one already.
func (f *logFollower) showUnseen(path string) {
	if f.file == nil {
		f.file, _ = os.Open(path)
		f.copyRest()
	}
}

func (f *logFollower) copyRest() {
	if f.file != nil && f.out != nil {
		_, _ = io.Copy(f.out, f.file)
	}
}

func (f *logFollower) close() {
	if f.file != nil {
		f.file.Close()
		f.file = nil
	}
}

// BuildLogRequest says whose log to read.
type BuildLogRequest struct {
	Golden ref.Ref // GOLDEN: its newest result; GOLDEN@N
	Key    string  // of the golden, instead of the newest result
	Failed bool    // of the last build that failed, was interrupted, or runs; with Key, of that key
}

// BuildLog opens what the command of a build printed, in its bytes. The caller closes the file. NotFound.
func (e *Engine) BuildLog(ctx context.Context, q BuildLogRequest) (*os.File, error) {
	const op = "golden log"
	path := ""
	if q.Failed {
		path = e.failedLogPath(q)
	} else {
		row, err := e.loggedResult(ctx, op, q)
		if err != nil {
			return nil, err
		}
		path = e.resultLog(row.ID)
	}

	f, err := os.Open(path)
	if path == "" || errors.Is(err, fs.ErrNotExist) {
		if q.Failed {
			return nil, errs.New(errs.NotFound, op, q.Golden.String(), "no failed build has a log here").
				WithHint("show the log of a result with %s", errs.Run("golden log", q.Golden.Name))
		}
		return nil, errs.New(errs.NotFound, op, q.Golden.String(), "there is no log of it").
			WithHint("results that were fetched from a remote, or whose pool was rebuilt elsewhere, have none")
	}
	return f, errs.Wrap(op, q.Golden.String(), err)
}

// failedLogPath returns the path of the log of a build that failed, was killed, or runs; "" if there is none.
func (e *Engine) failedLogPath(q BuildLogRequest) string {
	if q.Key != "" {
		l := e.buildLogs(q.Golden.Name, q.Key)
		if _, err := os.Lstat(l.running); err == nil {
			return l.running
		}
		return l.failedLog
	}

	for _, f := range readFailed(e.pool.BuildsDir()) {
		if f.Golden == q.Golden.Name {
			return f.path + ".log"
		}
	}
	return ""
}

// loggedResult finds the result whose log to read. NotFound.
func (e *Engine) loggedResult(ctx context.Context, op string, q BuildLogRequest) (row catalog.Row, err error) {
	err = e.cat.View(ctx, func(tx *catalog.Tx) error {
		found := true
		switch {
		case q.Key != "":
			row, found, err = tx.BuildResult(q.Golden.Name, q.Key)
		case q.Golden.At == "":
			row, found, err = tx.LastBuild(q.Golden.Name)
		default:
			row, err = tx.Resolve(op, q.Golden)
			found = row.Kind == driver.Generation && !row.Build.IsZero()
		}
		if err == nil && !found {
			err = errs.New(errs.NotFound, op, q.Golden.String(), "no command has built it").
				WithHint("list the generations with %s; %s shows the last build that failed",
					errs.Run("golden show", q.Golden.Name), errs.Param("failed"))
		}
		return err
	})
	return row, err
}

// removeLogs removes the logs of results that no longer exist, and returns how many. It leaves those alone that a
// process may be about to record.
func (e *Engine) removeLogs(ctx context.Context) (n int, err error) {
	entries, err := os.ReadDir(filepath.Join(e.pool.BuildsDir(), "results"))
	if err != nil {
		return 0, nil // there is none
	}

	err = e.cat.View(ctx, func(tx *catalog.Tx) error {
		for _, entry := range entries {
			id := driver.ObjectID(strings.TrimSuffix(entry.Name(), ".log"))
			if !driver.ValidID(string(id)) {
				continue
			}
			_, exists, err := tx.Object(id)
			if err != nil {
				return err
			}
			marks, err := tx.BlockingMarks(id, "", false)
			if err != nil {
				return err
			}
			if !exists && len(marks) == 0 && os.Remove(e.resultLog(id)) == nil {
				n++
			}
		}
		return nil
	})
	return n, err
}
