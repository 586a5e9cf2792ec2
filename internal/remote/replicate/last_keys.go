package replicate

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"pando/internal/base/errs"
	"pando/internal/remote/objstore"
	"pando/internal/remote/repo"
)

// checkAttempts limits how often a store that does not answer is asked which keys a repository has: the pool's copy of
// its config answers, too.
const checkAttempts = 2

// LastKeys returns the names of the remotes of which a pool has the only key: nobody could read them without it. All
// other keys are outside the pool: a passphrase, another recipient, that of a recovery kit, or another pool's. It asks
// the repository, or if that cannot be reached, the pool's copy of its config. A key whose repository is not known, as
// of an interrupted "remote add", counts as the only one.
func LastKeys(ctx context.Context, pool string, access Access) (names []string, err error) {
	entries, err := os.ReadDir(remotesDir(pool))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, errs.Wrap("list remotes", pool, err)
	}

	// Read the keys. Those of the pool do not count for each other, as they would go together.
	var remotes []*Remote
	own := map[string]bool{}
	for _, e := range entries {
		name, adding := strings.CutPrefix(e.Name(), addingPrefix)
		if strings.HasPrefix(name, removePrefix) || !hasKey(filepath.Join(remotesDir(pool), e.Name())) {
			continue
		}

		r, err := Load(pool, name, access)
		if adding || err != nil {
			names = append(names, name)
			continue
		}

		own[r.Recipient] = true
		remotes = append(remotes, r)
	}

	for _, r := range remotes {
		last, err := r.isLastKey(ctx, own)
		if err != nil {
			return nil, err
		}
		if last {
			names = append(names, r.Name)
		}
	}

	slices.Sort(names)
	return slices.Compact(names), nil
}

// hasKey reports whether the directory of a remote has this host's key.
func hasKey(dir string) bool {
	i, err := os.Stat(filepath.Join(dir, identityName))
	return err == nil && i.Size() > 0
}

// isLastKey reports whether only the recipients in own open the repository. The error is that of ctx.
func (r *Remote) isLastKey(ctx context.Context, own map[string]bool) (bool, error) {
	if r.Recipient == "" {
		return false, nil // the key was not made for this remote, so it exists elsewhere
	}

	slots, lost := r.reachableSlots(ctx)
	if err := ctx.Err(); err != nil {
		return false, errs.Wrap("check keys", r.Name, err)
	}

	return !slices.ContainsFunc(slots, func(s repo.SlotInfo) bool {
		// Without the config in the repository, only a kit opens it: a kit has a copy.
		return !own[s.Recipient] && (!lost || strings.HasPrefix(s.Label, KitLabel))
	}), nil
}

// reachableSlots lists the slots of the repository, or if it cannot be reached, those in the pool's copy of its config;
// none if there is no such copy. lost: the repository can be reached, and this host's key does not open its config.
func (r *Remote) reachableSlots(ctx context.Context) (slots []repo.SlotInfo, lost bool) {
	id, err := repo.Identity(r.identity)
	if err != nil {
		return nil, false
	}

	asked := *r
	if asked.access.Attempts == 0 {
		asked.access.Attempts = checkAttempts
	}
	if store, err := asked.openStore(ctx, 0, false); err == nil {
		defer func() { _ = objstore.Close(store) }() // it was only read
		rp, err := repo.Open(ctx, store, id)
		if err == nil {
			defer rp.Close()
			if slots, err = rp.Slots(ctx); err == nil {
				return slots, false
			}
		}
		lost = configLost(err)
	}

	raw, err := os.ReadFile(r.configFile())
	if err != nil {
		return nil, lost
	}
	slots, _ = repo.ConfigSlots(ctx, raw, id) // none, if the copy is damaged
	return slots, lost
}
