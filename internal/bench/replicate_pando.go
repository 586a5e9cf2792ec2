package bench

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	"pando/internal/base/errs"
	runs "pando/internal/linux/run"
)

// pandoContender is Pando: whole commands, as a person or a timer would run them.
// Two pools, one that pushes and one that pulls, and a repository in a directory.
type pandoContender struct {
	c     *ReplicateConfig
	dir   string
	room  int64
	from  string // directory of the pool that pushes
	to    string // directory of the pool that pulls
	mount string // of the volume
}

const (
	benchVolume = "data"
	benchRemote = "bench"
	benchFile   = "records.json"
)

func (p *pandoContender) name() string       { return "pando" }
func (p *pandoContender) repository() string { return filepath.Join(p.dir, "repository") }
func (p *pandoContender) restored() string   { return p.to }

// pando runs the program on a pool and returns what it printed.
func (p *pandoContender) pando(ctx context.Context, pool string, args ...string) (string, error) {
	return program(ctx, p.dir, p.c.Program, append([]string{"--pool", pool, "--no-progress"}, args...)...)
}

// program runs a program and returns its standard output. IO with its last words if
// it fails.
func program(ctx context.Context, dir, path string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, path, args...)
	gentle(cmd)
	cmd.Dir = dir
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		if ctx.Err() != nil {
			return "", ctx.Err()
		}
		return "", errs.New(errs.IO, "bench", filepath.Base(path)+" "+strings.Join(args, " "), "%w: %s", err,
			runs.LastLines(stderr.String(), 3))
	}

	return stdout.String(), nil
}

func (p *pandoContender) open(ctx context.Context, dir string, room int64) error {
	p.dir, p.room, p.from, p.to = dir, room, filepath.Join(dir, "from"), filepath.Join(dir, "to")
	if err := p.initPool(ctx, p.from, "--create"); err != nil {
		return err
	}

	empty := filepath.Join(dir, "empty")
	if err := os.Mkdir(empty, 0o700); err != nil {
		return err
	}

	size := strconv.FormatInt(p.room+p.room/4+256<<20, 10)
	if _, err := p.pando(ctx, p.from, "golden", "import", "empty", empty, "--fs", "ext4", "--size", size); err != nil {
		return err
	}

	p.mount = filepath.Join(dir, "mnt")
	if _, err := p.pando(ctx, p.from, "clone", "empty", benchVolume, "--mount", p.mount); err != nil {
		return err
	}

	return p.initPool(ctx, p.to)
}

func (p *pandoContender) initPool(ctx context.Context, pool string, remote ...string) error {
	args := []string{"init", "--driver", p.c.Driver}
	if p.c.Driver == "auto" {
		args = append(args, "--size", strconv.FormatInt(3*p.room+4<<30, 10))
	}

	if _, err := p.pando(ctx, pool, args...); err != nil {
		return err
	}

	key := filepath.Join(p.dir, "passphrase")
	if err := os.WriteFile(key, []byte("only for a benchmark\n"), 0o600); err != nil {
		return err
	}

	_, err := p.pando(ctx, pool,
		append([]string{"remote", "add", benchRemote, "file:" + p.repository(), "--passphrase-file", key}, remote...)...)
	return err
}

func (p *pandoContender) grow(_ context.Context, r *records, n int64) error {
	return appendRecords(filepath.Join(p.mount, benchFile), r, n)
}

// appendRecords adds records to a file, and waits for the disk.
func appendRecords(path string, r *records, n int64) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	err = r.writeTo(f, n)
	if err == nil {
		err = f.Sync()
	}
	return errs.Wrap("bench", path, errors.Join(err, f.Close()))
}

func (p *pandoContender) push(ctx context.Context) error {
	args := []string{"push", benchVolume, "--to", benchRemote}
	if p.c.Freeze {
		args = append(args, "--freeze")
	} else {
		args = append(args, "--no-freeze")
	}
	_, err := p.pando(ctx, p.from, args...)
	return err
}

func (p *pandoContender) restore(ctx context.Context) error {
	_, err := p.pando(ctx, p.to, "pull", benchRemote, benchVolume)
	return err
}

func (p *pandoContender) refresh(ctx context.Context) (bool, error) {
	_, err := p.pando(ctx, p.to, "pull", benchRemote, benchVolume, "--update")
	return true, err
}

func (p *pandoContender) forget(ctx context.Context) error {
	if _, err := p.pando(ctx, p.to, "deinit", "--force", "--lose-keys"); err != nil {
		return err
	}
	return p.initPool(ctx, p.to)
}

func (p *pandoContender) digest(ctx context.Context) (sum [32]byte, err error) {
	mnt := filepath.Join(p.dir, "restored")
	if _, err = p.pando(ctx, p.to, "mount", benchVolume, mnt); err != nil {
		return sum, err
	}
	sum, err = fileDigest(filepath.Join(mnt, benchFile))
	_, uerr := p.pando(context.WithoutCancel(ctx), p.to, "umount", benchVolume)
	return sum, errors.Join(err, uerr)
}

func fileDigest(path string) (sum [sha256.Size]byte, err error) {
	f, err := os.Open(path)
	if err != nil {
		return sum, err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.CopyBuffer(h, f, make([]byte, 1<<20)); err != nil {
		return sum, err
	}
	return [sha256.Size]byte(h.Sum(nil)), nil
}

func (p *pandoContender) close(ctx context.Context) error { return p.clean(ctx, p.dir) }

// clean removes the pools of a run, also of one that was killed.
func (p *pandoContender) clean(ctx context.Context, dir string) error {
	p.dir = dir
	var all []error
	for _, n := range []string{"from", "to"} {
		pool := filepath.Join(dir, n)
		if _, err := os.Stat(filepath.Join(pool, "pool.json")); err != nil {
			continue
		}
		_, err := p.pando(ctx, pool, "deinit", "--force", "--lose-keys")
		if err != nil {
			err = errs.New(errs.InUse, "bench", pool, "%w", err).
				WithHint("end the programs that use it, then run the benchmark again, which cleans up")
		}
		all = append(all, err)
	}

	return errors.Join(all...)
}

// pipeline is the least that anything must do that compresses and encrypts: read,
// zstd, AES-GCM, write, in this process, as many at once as there are processors.
// It keeps no names and no index, and could not tell what has changed: it is told.
type pipeline struct {
	dir    string
	done   int64
	pieces []string
	key    [32]byte
}

func (p *pipeline) name() string       { return "pipeline" }
func (p *pipeline) repository() string { return filepath.Join(p.dir, "repository") }
func (p *pipeline) restored() string   { return filepath.Join(p.dir, "restored") }
func (p *pipeline) source() string     { return filepath.Join(p.dir, "source", benchFile) }

func (p *pipeline) open(_ context.Context, dir string, _ int64) error {
	p.dir = dir
	for _, d := range []string{p.repository(), p.restored(), filepath.Dir(p.source())} {
		if err := os.Mkdir(d, 0o700); err != nil {
			return err
		}
	}
	return nil
}

func (p *pipeline) grow(_ context.Context, r *records, n int64) error {
	return appendRecords(p.source(), r, n)
}

func (p *pipeline) push(ctx context.Context) error {
	st, err := os.Stat(p.source())
	if err != nil || st.Size() == p.done {
		return err
	}
	path := filepath.Join(p.repository(), fmt.Sprintf("%06d", len(p.pieces)))
	if err := sealFile(ctx, p.source(), p.done, st.Size()-p.done, path, p.key, len(p.pieces)); err != nil {
		return err
	}
	p.pieces, p.done = append(p.pieces, path), st.Size()
	return nil
}

func (p *pipeline) restore(ctx context.Context) error {
	return openFiles(ctx, p.pieces, p.key, filepath.Join(p.restored(), benchFile))
}

func (p *pipeline) refresh(context.Context) (bool, error) { return false, nil }

func (p *pipeline) forget(context.Context) error {
	return os.Remove(filepath.Join(p.restored(), benchFile))
}

func (p *pipeline) digest(context.Context) ([32]byte, error) {
	return fileDigest(filepath.Join(p.restored(), benchFile))
}

func (p *pipeline) close(context.Context) error { return nil }

// parts measures the halves of a restore: to decrypt and decompress everything and
// write nothing, and to write everything as it is.
func (p *pipeline) parts(ctx context.Context) (decode, disk float64, err error) {
	if decode, err = timedSync(func() error {
		return openFiles(ctx, p.pieces, p.key, os.DevNull)
	}, p.restored()); err != nil {
		return 0, 0, err
	}

	if err := p.forget(ctx); err != nil {
		return 0, 0, err
	}

	disk, err = timedSync(func() error {
		return plainCopy(p.source(), filepath.Join(p.restored(), benchFile))
	}, p.restored())
	return decode, disk, err
}

// plainCopy copies by reading and writing: no reflink, no copy_file_range.
func plainCopy(from, to string) error {
	src, err := os.Open(from)
	if err != nil {
		return err
	}

	defer src.Close()
	dst, err := os.Create(to)
	if err != nil {
		return err
	}

	buf := make([]byte, 1<<20)
	for {
		n, rerr := src.Read(buf)
		if _, err := dst.Write(buf[:n]); err != nil {
			return errors.Join(err, dst.Close())
		}
		if rerr == io.EOF {
			return dst.Close()
		}
		if rerr != nil {
			return errors.Join(rerr, dst.Close())
		}
	}
}
