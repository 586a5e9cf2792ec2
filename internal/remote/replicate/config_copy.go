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

// configName is the copy of the repository's config, sealed as it is there: without that nothing could be read.
const configName = "config"

func (r *Remote) configFile() string { return filepath.Join(r.dir, configName) }

// keepConfig keeps a copy of the config of a repository that was opened, unless another process has kept a newer one.
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

// configLost reports whether an error of opening a repository may be one of a config that is missing or damaged.
func configLost(err error) bool {
	return errs.Is(err, errs.NotFound) || errs.Is(err, errs.Damaged) || repo.Locked(err)
}

// hintCopy says with an error of opening a repository if this pool has a copy of its config that can be put back.
func (r *Remote) hintCopy(ctx context.Context, err error) error {
	var known *errs.Error
	if !configLost(err) || !errors.As(err, &known) {
		return err
	}

	if _, serr := os.Lstat(r.configFile()); serr != nil {
		return err
	}

	for e := known; errors.As(e.Err, &e); { // whose hint is the one that people read
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

// restoreConfig puts this pool's copy of config back, if that of the repository is missing, certainly damaged, or older
// than one that this pool has seen; what was there is kept in the pool. False: it is none of these. A dry run only says
// whether it would.
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

	defer func() { _ = objstore.Close(store) }() // what was written is durable
	return putConfigBack(ctx, store, raw, r.Mark, filepath.Join(r.dir, damagedDir), dry, id)
}

// putConfigBack is restoreConfig with any copy. keep is the directory for what is damaged.
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
