package repo

import (
	"bytes"
	"context"
	"sync"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/remote/objstore"
)

// versionOf is what config says.
func versionOf(t testing.TB, m *memory) byte {
	t.Helper()
	c, err := decodeConfig(m.data(configKey))
	must(t, err)
	return c.version
}

// versionOne puts a repository back to version 1, as an older program would have made it.
func versionOne(t testing.TB, r *Repo) {
	t.Helper()
	must(t, r.changeConfig(t.Context(), func(k *keyring) error {
		k.version = 1
		return nil
	}))
}

func TestNewRepositoriesAreOfTheNewestVersion(t *testing.T) {
	r, m := made(t)
	if v, err := r.Version(); err != nil || v != configVersion || versionOf(t, m) != configVersion {
		t.Errorf("version %d, %v; config says %d", v, err, versionOf(t, m))
	}
	before := m.data(configKey)
	must(t, r.Upgrade(t.Context()))
	if !bytes.Equal(before, m.data(configKey)) {
		t.Error("an upgrade changed what is of the newest version")
	}
}

func TestUpgrade(t *testing.T) {
	ctx := t.Context()
	g, _, m := golden(t)
	r := goldenRepo(t, m)
	if v, err := r.Version(); err != nil || v != 1 {
		t.Fatalf("the frozen repository is of version %d, %v", v, err)
	}
	old, mark := m.data(configKey), r.Mark()

	// Keys change without an upgrade.
	a := newHost(t, "a")
	must(t, r.AddSlot(ctx, a.slot()))
	if versionOf(t, m) != 1 {
		t.Error("a new key upgraded the repository")
	}

	must(t, r.Upgrade(ctx))
	if v, err := r.Version(); err != nil || v != configVersion || versionOf(t, m) != configVersion {
		t.Errorf("version %d, %v; config says %d", v, err, versionOf(t, m))
	}
	if now := r.Mark(); now.ID != mark.ID || now.Key != mark.Key || now.Serial != mark.Serial+2 {
		t.Errorf("%+v after %+v", now, mark)
	}
	if !a.opens(t, m) {
		t.Error("a cannot open it any more")
	}
	upgraded := m.data(configKey)
	must(t, r.Upgrade(ctx))
	must(t, goldenRepo(t, m).Upgrade(ctx))
	if !bytes.Equal(upgraded, m.data(configKey)) {
		t.Error("it was upgraded twice")
	}

	// What was there before is read as before, and a rotation leaves the version alone.
	other := goldenRepo(t, m)
	must(t, r.Rotate(ctx, passphrasesOf(t, r, goldenPassphrase)))
	if versionOf(t, m) != configVersion {
		t.Error("a rotation changed the version")
	}
	for _, r := range []*Repo{r, other, goldenRepo(t, m)} {
		_, err := r.Manifest(ctx, g.block.ID)
		must(t, err)
	}

	// The old config, put back, is refused by all who have seen the new one.
	mark = r.Mark()
	m.set(configKey, old)
	kind(t, r.Refresh(ctx), errs.Damaged)
	kind(t, goldenRepo(t, m).Check(mark), errs.Damaged)
}

// The version is part of what is authenticated: nobody without a key can change it.
func TestVersionIsAuthenticated(t *testing.T) {
	ctx := t.Context()
	_, m := made(t)
	raw := bytes.Clone(m.data(configKey))
	raw[versionAt] = 1
	m.set(configKey, raw)
	_, err := openRepo(ctx, m, testEnv(), identity(t, testIdentity))
	kind(t, err, errs.Damaged)
}

// Hosts that upgrade at once, and one that adds keys, do not lose each other's changes.
func TestUpgradesAtOnce(t *testing.T) {
	ctx := t.Context()
	_, _, m := golden(t)
	a := newHost(t, "a")
	var all sync.WaitGroup
	for i := range 4 {
		r := goldenRepo(t, m)
		all.Go(func() {
			var err error
			if i == 0 {
				err = r.AddSlot(ctx, a.slot())
			} else {
				err = r.Upgrade(ctx)
			}
			if err != nil {
				t.Errorf("%d: %v", i, err)
			}
		})
	}
	all.Wait()
	c, err := decodeConfig(m.data(configKey))
	must(t, err)
	if c.version != configVersion || c.serial != 1<<40+5 || !a.opens(t, m) {
		t.Errorf("version %d, serial %d", c.version, c.serial)
	}
}

// losing is a store that loses the answer to its next write.
type losing struct {
	*memory
	next bool
}

func (l *losing) Put(ctx context.Context, key string, data []byte, c objstore.Condition) (objstore.Version, error) {
	v, err := l.memory.Put(ctx, key, data, c)
	if err == nil && l.next {
		l.next = false
		_, err = l.memory.Put(ctx, key, data, c) // as a request that is tried again
	}
	return v, err
}

// An upgrade whose answer is lost happens once.
func TestUpgradeWhoseAnswerIsLost(t *testing.T) {
	r, m := made(t)
	versionOne(t, r)
	serial := r.Mark().Serial
	lossy, err := openRepo(t.Context(), &losing{memory: m, next: true}, testEnv(), identity(t, testIdentity))
	must(t, err)
	defer lossy.Close()
	must(t, lossy.Upgrade(t.Context()))
	if versionOf(t, m) != configVersion || lossy.Mark().Serial != serial+1 {
		t.Errorf("version %d, serial %d after %d", versionOf(t, m), lossy.Mark().Serial, serial)
	}
}
