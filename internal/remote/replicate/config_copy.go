package replicate

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"pando/internal/base/errs"
	"pando/internal/linux/durable"
	"pando/internal/remote/objstore"
	"pando/internal/remote/repo"
)

// configName is the file with a copy of the repository's config, sealed as on the remote: without the config, nothing
// in the repository could be read.
const configName = "config"

func (r *Remote) configFile() string { return filepath.Join(r.dir, configName) }

// keepConfig stores a copy of the config of an open repository in the pool, unless another process has stored a newer
// one.
func (r *Remote) keepConfig(rp *repo.Repo) error {
	raw := rp.Config()
	if kept, err := os.ReadFile(r.configFile()); err == nil {
		serial, err := repo.ConfigSerial(kept)
		if bytes.Equal(kept, raw) || err == nil && serial > rp.Mark().Serial {
			return nil
		}
	}
	return durable.WriteFile(r.configFile(), raw)
}

// configLost reports whether an error from opening a repository may mean that its config is missing or damaged.
func configLost(err error) bool {
	return errs.Is(err, errs.NotFound, errs.Damaged) || repo.Locked(err)
}

// hintCopy adds a hint to an error from opening a repository if this pool has a copy of its config to restore.
func (r *Remote) hintCopy(ctx context.Context, err error) error {
	var known *errs.Error
	if !configLost(err) || !errors.As(err, &known) {
		return err
	}

	if _, serr := os.Lstat(r.configFile()); serr != nil {
		return err
	}

	for e := known; errors.As(e.Err, &e); { // front ends print the innermost hint
		if e.Hint != "" {
			known = e
		}
	}

	repair := errs.Run("remote repair", r.Name)
	switch can, perr := r.restoreConfig(ctx, true); {
	case can && errs.Is(err, errs.NotFound):
		known.WithHint("check the URL and that the disk is mounted; if the remote has lost its keys, "+
			"restore this pool's copy with %s", repair)
	case can:
		known.WithHint("restore the keys from this pool's copy, which is newer or undamaged, with %s", repair)
	case perr != nil && errs.Is(err, errs.NotFound):
		known.WithHint("check the URL and that the disk is mounted; if the remote has lost its keys, "+
			"restore this pool's copy with %s", repair)
	case errs.Is(err, errs.Damaged):
		known.WithHint("keep %s: earlier pushes may be unreadable without it; this pool's copy must not replace "+
			"the config of this repository, so add the remote under another name", r.configFile())
	}

	return err
}

// restoreConfig restores config from this pool's copy if the repository's own is missing, certainly damaged, or older
// than one that this pool has seen. It keeps the replaced config in the pool. It reports whether it restored anything,
// or in a dry run whether it would.
func (r *Remote) restoreConfig(ctx context.Context, dry bool) (bool, error) {
	raw, err := os.ReadFile(r.configFile())
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, errs.Wrap(opRepair, r.Name, err)
	}

	id, err := repo.Identity(r.identity)
	if err != nil {
		return false, err
	}

	store, err := r.openStore(ctx, 0, false)
	if err != nil {
		return false, err
	}

	defer func() { _ = objstore.Close(store) }() // writes are durable already
	return putConfigBack(ctx, store, raw, r.Mark, filepath.Join(r.dir, damagedDir), dry, id)
}

// putConfigBack is restoreConfig for any copy of the config. keep is the directory for a damaged config.
func putConfigBack(
	ctx context.Context, store objstore.Store, raw []byte, known repo.Mark, keep string, dry bool, secrets ...repo.Secret,
) (bool, error) {
	plan, err := repo.PlanRestore(ctx, store, raw, known, secrets...)
	if err != nil || plan == nil {
		return false, err
	}
	if dry {
		return true, nil
	}

	// Keep the damaged config before it is overwritten.
	if plan.Damaged != nil {
		if err := os.MkdirAll(keep, 0o700); err != nil {
			return false, errs.Wrap(opRepair, keep, err)
		}
		path := filepath.Join(keep, configName+"-"+strconv.FormatInt(time.Now().Unix(), 10))
		if err := durable.WriteFile(path, plan.Damaged); err != nil {
			return false, errs.Wrap(opRepair, path, err)
		}
	}

	return true, plan.Do(ctx)
}
