package bench

import (
	"context"
	"crypto/sha256"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"

	"pando/internal/base/errs"
	"pando/internal/linux/loopdev"
	"pando/internal/linux/mount"
	runs "pando/internal/linux/run"

	_ "modernc.org/sqlite" // for the database that Litestream replicates
)

// installed finds a program. Unsupported if it is not there.
func installed(name string) (string, error) {
	path, err := exec.LookPath(name)
	if err != nil {
		return "", errs.New(errs.Unsupported, "bench", name, "not installed")
	}
	return path, nil
}

// restic backs up a directory into a local repository.
type restic struct {
	program, dir string
}

func (x *restic) name() string       { return "restic" }
func (x *restic) repository() string { return filepath.Join(x.dir, "repository") }
func (x *restic) restored() string   { return filepath.Join(x.dir, "restored") }

func (x *restic) run(ctx context.Context, args ...string) error {
	_, err := program(ctx, x.dir, x.program,
		append([]string{"-q", "--repo", x.repository(), "--password-file", filepath.Join(x.dir, "password"), "--cache-dir",
			filepath.Join(x.dir, "cache")}, args...)...)
	return err
}

func (x *restic) open(ctx context.Context, dir string, _ int64) (err error) {
	if x.program, err = installed("restic"); err != nil {
		return err
	}

	x.dir = dir
	for _, d := range []string{x.restored(), filepath.Join(dir, "source")} {
		if err := os.Mkdir(d, 0o700); err != nil {
			return err
		}
	}

	if err := os.WriteFile(filepath.Join(dir, "password"), []byte("only for a benchmark\n"), 0o600); err != nil {
		return err
	}

	return x.run(ctx, "init")
}

func (x *restic) grow(_ context.Context, r *records, n int64) error {
	return appendRecords(filepath.Join(x.dir, "source", benchFile), r, n)
}

func (x *restic) push(ctx context.Context) error { return x.run(ctx, "backup", "source") }
func (x *restic) restore(ctx context.Context) error {
	return x.run(ctx, "restore", "latest", "--target", x.restored())
}
func (x *restic) refresh(context.Context) (bool, error) { return false, nil }

func (x *restic) forget(context.Context) error {
	if err := os.RemoveAll(x.restored()); err != nil {
		return err
	}
	return os.Mkdir(x.restored(), 0o700)
}

func (x *restic) digest(context.Context) ([32]byte, error) {
	return fileDigest(filepath.Join(x.restored(), "source", benchFile))
}

func (x *restic) close(context.Context) error { return nil }

// litestream replicates an SQLite database that has the records as rows. The
// database stays open in the meantime, as an application would have it.
type litestream struct {
	program, dir string
	db           *sql.DB
}

func (x *litestream) name() string       { return "litestream" }
func (x *litestream) repository() string { return filepath.Join(x.dir, "repository") }
func (x *litestream) restored() string   { return filepath.Join(x.dir, "restored") }
func (x *litestream) database() string   { return filepath.Join(x.dir, "source", "records.db") }
func (x *litestream) url() string        { return "file://" + x.repository() }

func (x *litestream) open(ctx context.Context, dir string, _ int64) (err error) {
	if x.program, err = installed("litestream"); err != nil {
		return err
	}

	x.dir = dir
	for _, d := range []string{x.repository(), x.restored(), filepath.Dir(x.database())} {
		if err := os.Mkdir(d, 0o700); err != nil {
			return err
		}
	}

	if x.db, err = sql.Open("sqlite",
		"file:"+x.database()+"?_pragma=journal_mode(wal)&_pragma=synchronous(full)&_pragma=busy_timeout(10000)"); err != nil {
		return err
	}

	x.db.SetMaxOpenConns(1)
	_, err = x.db.ExecContext(ctx, "CREATE TABLE records (id INTEGER PRIMARY KEY, line BLOB NOT NULL)")
	return err
}

func (x *litestream) grow(ctx context.Context, r *records, n int64) error {
	return r.lines(n, func(b []byte) (err error) {
		tx, err := x.db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}

		defer func() {
			if err != nil {
				err = errors.Join(err, tx.Rollback())
			}
		}()

		stmt, err := tx.PrepareContext(ctx, "INSERT INTO records (line) VALUES (?)")
		if err != nil {
			return err
		}

		defer stmt.Close()

		for len(b) > 0 {
			end := 0
			for b[end] != '\n' {
				end++
			}
			if _, err = stmt.ExecContext(ctx, b[:end+1]); err != nil {
				return err
			}
			b = b[end+1:]
		}

		return tx.Commit()
	})
}

func (x *litestream) push(ctx context.Context) error {
	_, err := program(ctx, x.dir, x.program, "replicate", "-once", "-log-level", "error", x.database(), x.url())
	return err
}

func (x *litestream) restore(ctx context.Context) error {
	_, err := program(ctx, x.dir, x.program, "restore", "-o", filepath.Join(x.restored(), "records.db"), x.url())
	return err
}

func (x *litestream) refresh(context.Context) (bool, error) { return false, nil }

func (x *litestream) forget(context.Context) error {
	if err := os.RemoveAll(x.restored()); err != nil {
		return err
	}
	return os.Mkdir(x.restored(), 0o700)
}

func (x *litestream) digest(ctx context.Context) (sum [32]byte, err error) {
	db, err := sql.Open("sqlite", "file:"+filepath.Join(x.restored(), "records.db"))
	if err != nil {
		return sum, err
	}

	defer db.Close()
	rows, err := db.QueryContext(ctx, "SELECT line FROM records ORDER BY id")
	if err != nil {
		return sum, err
	}

	defer rows.Close()
	h := sha256.New()
	for rows.Next() {
		var line sql.RawBytes
		if err := rows.Scan(&line); err != nil {
			return sum, err
		}
		h.Write(line)
	}

	return [32]byte(h.Sum(nil)), rows.Err()
}

func (x *litestream) close(context.Context) error {
	if x.db == nil {
		return nil
	}
	return x.db.Close()
}

// sendStream is `btrfs send | zstd -3`, without encryption, on a btrfs of its own in
// a sparse file; increments by -p.
type sendStream struct {
	dir    string
	mounts []string
	pushed int
	have   int // streams that have been received
}

func (x *sendStream) name() string       { return "btrfs-send" }
func (x *sendStream) repository() string { return filepath.Join(x.dir, "repository") }
func (x *sendStream) restored() string   { return filepath.Join(x.dir, "to") }
func (x *sendStream) source() string     { return filepath.Join(x.dir, "from") }

func (x *sendStream) open(ctx context.Context, dir string, room int64) error {
	for _, p := range []string{"btrfs", "mkfs.btrfs", "zstd"} {
		if _, err := installed(p); err != nil {
			return err
		}
	}

	x.dir = dir
	if err := os.Mkdir(x.repository(), 0o700); err != nil {
		return err
	}

	for _, at := range []string{x.source(), x.restored()} {
		if err := x.mount(ctx, at, 2*room+2<<30); err != nil {
			return err
		}
	}

	_, err := runs.Program(ctx, "btrfs", "subvolume", "create", filepath.Join(x.source(), "data"))
	return err
}

func (x *sendStream) mount(ctx context.Context, at string, size int64) error {
	image := at + ".img"
	f, err := os.OpenFile(image, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}

	defer f.Close()

	if err := f.Truncate(size); err != nil {
		return err
	}

	if _, err := runs.Program(ctx, "mkfs.btrfs", "-q", image); err != nil {
		return err
	}

	if err := os.Mkdir(at, 0o700); err != nil {
		return err
	}

	dev, err := loopdev.Attach(ctx, f, loopdev.Options{DirectIO: true})
	if err != nil {
		return err
	}

	defer dev.Close() // the mount holds it

	m, err := mount.Device("btrfs", dev.Path, nil, false)
	if err != nil {
		return err
	}

	_, err = m.MoveTo(at)
	if err == nil {
		x.mounts = append(x.mounts, at)
	}

	return errors.Join(err, m.Close())
}

func (x *sendStream) grow(_ context.Context, r *records, n int64) error {
	return appendRecords(filepath.Join(x.source(), "data", benchFile), r, n)
}

// shell runs a pipe, whose first failure is its own.
func (x *sendStream) shell(ctx context.Context, script string) error {
	_, err := program(ctx, x.dir, "/bin/bash", "-o", "pipefail", "-ec", script)
	return err
}

func (x *sendStream) push(ctx context.Context) error {
	n, parent := strconv.Itoa(x.pushed), ""
	if x.pushed > 0 {
		parent = "-p from/s" + strconv.Itoa(x.pushed-1)
	}
	if err := x.shell(ctx,
		fmt.Sprintf("btrfs -q subvolume snapshot -r from/data from/s%s; btrfs -q send %s from/s%s | zstd -q -3 -T0 -o "+
			"repository/%06d", n, parent, n, x.pushed)); err != nil {
		return err
	}
	x.pushed++
	return nil
}

func (x *sendStream) restore(ctx context.Context) error {
	_, err := x.refresh(ctx)
	return err
}

func (x *sendStream) refresh(ctx context.Context) (bool, error) {
	for ; x.have < x.pushed; x.have++ {
		if err := x.shell(ctx, fmt.Sprintf("zstd -q -dc repository/%06d | btrfs -q receive to", x.have)); err != nil {
			return true, err
		}
	}
	return true, nil
}

func (x *sendStream) forget(ctx context.Context) error {
	for ; x.have > 0; x.have-- {
		if _, err := runs.Program(ctx, "btrfs", "subvolume", "delete", "-c",
			filepath.Join(x.restored(), "s"+strconv.Itoa(x.have-1))); err != nil {
			return err
		}
	}
	return nil
}

func (x *sendStream) digest(context.Context) ([32]byte, error) {
	return fileDigest(filepath.Join(x.restored(), "s"+strconv.Itoa(x.have-1), benchFile))
}

func (x *sendStream) close(context.Context) error {
	var all []error
	for _, at := range x.mounts {
		all = append(all, mount.Unmount(at))
	}
	return errors.Join(all...)
}

func (x *sendStream) clean(_ context.Context, dir string) error {
	for _, n := range []string{"from", "to"} {
		if err := mount.Unmount(filepath.Join(dir, n)); err != nil && !errs.Is(err, errs.NotFound) {
			return err
		}
	}
	return nil
}
