package zfs_test

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/driver"
	driverzfs "pando/internal/driver/zfs"
	"pando/internal/linux/zfs"

	"golang.org/x/sys/unix"
)

// TestEstimates: what programs say of a stream, and of a zpool, is understood, or is nothing.
func TestEstimates(t *testing.T) {
	for out, want := range map[string]int64{
		"full\ttank/a@b\t3071736\nsize\t3071736\n":                3071736,
		"incremental\ttank/a@b\ttank/c@d\t347288\nsize\t347288\n": 347288,
		"full\ttank/size@b\t5\n":                                  0,
		"size\t-1\n":                                              0,
		"size\tmuch\n":                                            0,
		"":                                                        0,
		"full\ttank/a with size@b\t5\nsize\t6\nsize of something\t7\n": 6,
	} {
		if got := driverzfs.Estimate(out); got != want {
			t.Errorf("%q: %d, want %d", out, got, want)
		}
	}
	for _, c := range []struct {
		of   map[string]float64
		want int64
	}{
		{map[string]float64{}, 0}, // OpenZFS 2.1 has no block cloning
		{map[string]float64{"dedupratio": 1, "allocated": 1000}, 0},
		{map[string]float64{"dedupratio": 1.5, "allocated": 1000}, 500},
		{map[string]float64{"bclonesaved": 80, "dedupratio": 1, "allocated": 1000}, 80},
	} {
		if got := driverzfs.SavedBytes(c.of); got != c.want {
			t.Errorf("%v: %d, want %d", c.of, got, c.want)
		}
	}
}

// encryptedPool is a pool in a dataset with a key of its own.
func encryptedPool(t *testing.T, zpool, name string) (p *pool, root, keyFile string) {
	t.Helper()
	root, keyFile = zpool+"/"+name, filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(keyFile, []byte("passphrase of "+name), 0o600); err != nil {
		t.Fatal(err)
	}
	zdo(t, "create", "-o", "encryption=on", "-o", "keyformat=passphrase", "-o", "pbkdf2iters=100000",
		"-o", "keylocation=file://"+keyFile, root)
	return newPool(t, root+"/pando"), root, keyFile
}

// sent is the stream of an object.
func (p *pool) sent(from, base driver.ObjectID) []byte {
	p.t.Helper()
	var b bytes.Buffer
	p.must(p.d.Send(p.ctx(), from, base, &b))
	plan, err := p.d.Plan(p.ctx(), from, base)
	if err != nil || plan.Bytes < int64(b.Len())/2 || plan.Bytes > 2*int64(b.Len())+1<<20 {
		p.t.Errorf("the plan of a stream of %d bytes: %+v, %v", b.Len(), plan, err)
	}
	return b.Bytes()
}

func (p *pool) received(stream []byte, base driver.ObjectID) driver.ObjectID {
	p.t.Helper()
	id := identity(driver.Snapshot, driver.Native)
	p.must(p.d.Receive(p.ctx(), id, base, bytes.NewReader(stream)))
	return id.ID
}

// TestRawStreams: what is encrypted travels without its key, stays under it, and never mixes with what travelled in
// plain.
func TestRawStreams(t *testing.T) {
	zpool := newZpool(t, 1<<30)
	a, aRoot, aKey := encryptedPool(t, zpool, "a")
	c, cRoot, _ := encryptedPool(t, zpool, "c")
	b := newPool(t, zpool+"/b")
	vol := a.create(driver.Native)
	big := strings.Repeat("some text that is compressed ", 20_000)
	a.write(vol, "big", big)
	s1 := a.snapshot(vol, driver.Native)
	plain := func(args ...string) []byte {
		var raw bytes.Buffer
		if err := zfs.Send(t.Context(), args, &raw); err != nil {
			t.Fatal(err)
		}
		return a.frames(raw.Bytes())
	}
	own := func(id driver.ObjectID) string { return a.ds(id) + "@" + string(id) }
	decrypted := plain("-L", "-c", own(s1))
	a.write(vol, "more", "more")

	// All without the key.
	zdo(t, "unload-key", aRoot)
	s2 := a.snapshot(vol, driver.Native)
	if plan, err := a.d.Plan(t.Context(), s2, s1); err != nil || !plan.Raw {
		t.Errorf("plan: %+v, %v", plan, err)
	}
	if same, err := a.d.Same(t.Context(), s2, s1); err != nil || same {
		t.Errorf("same: %v, %v", same, err)
	}
	whole, diff := a.sent(s1, ""), a.sent(s2, s1)
	if bytes.Contains(whole, []byte("some text")) {
		t.Error("there is plain text in the stream")
	}

	for _, to := range []*pool{b, c} { // one without encryption, one with a key of its own
		r1 := to.received(whole, "")
		r2 := to.received(diff, r1)
		clone := to.clone(r2, driver.Native)
		again := to.snapshot(clone, driver.Native)
		fork := to.clone(again, driver.Native)
		for _, id := range []driver.ObjectID{r1, r2, clone, again, fork} {
			if k, err := to.d.Key(t.Context(), id); err != nil || k != (driver.Key{Root: to.ds(r1), Own: true}) {
				t.Errorf("key: %+v, %v", k, err)
			}
		}
		err := to.mounted(fork, func(string) error { return nil })
		if !errs.Is(err, errs.Permission) || !strings.Contains(errs.HintOf(err), "zfs load-key") {
			t.Errorf("a mount without the key: %v (hint %q)", err, errs.HintOf(err))
		}

		// What the key belongs to goes, and it goes on with those that live.
		for _, id := range []driver.ObjectID{r1, r2, again, clone} {
			p := to
			p.must(p.d.Destroy(t.Context(), id))
		}
		k, err := to.d.Key(t.Context(), fork)
		if err != nil || k.Root == "" || k.Loaded || !k.Own {
			t.Fatalf("the key of the last: %+v, %v", k, err)
		}
		zdo(t, "load-key", "-L", "file://"+aKey, k.Root)
		to.wantFile(fork, "big", big)
		to.wantFile(fork, "more", "more")
		if k, err := to.d.Key(t.Context(), fork); err != nil || !k.Loaded {
			t.Errorf("a loaded key: %+v, %v", k, err)
		}
		to.write(fork, "here", "and here")
		to.snapshot(to.clone(to.snapshot(fork, driver.Native), driver.Native), driver.Native)
	}

	// There and back again: an increment made elsewhere.
	r1 := b.received(whole, "")
	zdo(t, "load-key", "-L", "file://"+aKey, b.ds(r1))
	fork := b.clone(r1, driver.Native)
	b.write(fork, "b", "from b")
	home := b.sent(b.snapshot(fork, driver.Native), r1)
	back := a.received(home, s1)
	if k, err := a.d.Key(t.Context(), back); err != nil || k != (driver.Key{Root: aRoot}) {
		t.Errorf("at home it has the pool's key: %+v, %v", k, err)
	}
	zdo(t, "load-key", aRoot)
	a.wantFile(a.clone(back, driver.Native), "b", "from b")

	// Raw upon plain does not fit.
	for _, to := range []*pool{b, c} {
		p1 := to.received(decrypted, "")
		to.wantFile(to.clone(p1, driver.Native), "big", big)
		whole, _ := to.list()
		id := identity(driver.Snapshot, driver.Native)
		err := to.d.Receive(t.Context(), id, p1, bytes.NewReader(diff))
		if !errs.Is(err, errs.Conflict) || errs.HintOf(err) == "" {
			t.Errorf("raw upon plain: %v of kind %q (hint %q)", err, errs.KindOf(err), errs.HintOf(err))
		}
		to.wantExactly("after what was refused", whole...)
	}
	k, err := c.d.Key(t.Context(), c.create(driver.Native))
	if err != nil || k != (driver.Key{Root: cRoot, Loaded: true}) {
		t.Errorf("the key of an encrypted pool: %+v, %v", k, err)
	}
	if k, err := b.d.Key(t.Context(), b.create(driver.Native)); err != nil || k != (driver.Key{}) {
		t.Errorf("the key of what is not encrypted: %+v, %v", k, err)
	}
}

// TestPlanOfSharedBlocks: what block cloning keeps once is in a stream as often as it is there.
func TestPlanOfSharedBlocks(t *testing.T) {
	zpool := newZpool(t, 1<<30)
	p := newPool(t, zpool+"/p")
	const size = 4 << 20
	vol := p.create(driver.Native)
	data := make([]byte, size)
	for i := range data {
		data[i] = byte(i*7 + i>>8*13 + i>>16*31)
	}
	p.write(vol, "a", string(data))
	if err := zfs.Zpool.Do(t.Context(), "sync", zpool); err != nil {
		t.Fatal(err)
	}
	p.must(p.mounted(vol, func(dir string) error {
		from, err := os.Open(filepath.Join(dir, "a"))
		if err != nil {
			return err
		}
		defer from.Close()
		for _, name := range []string{"b", "c"} {
			to, err := os.Create(filepath.Join(dir, name))
			if err == nil {
				err = unix.IoctlFileClone(int(to.Fd()), int(from.Fd()))
				to.Close()
			}
			if err != nil {
				return err
			}
		}
		return nil
	}))
	snap := p.snapshot(vol, driver.Native)
	if err := zfs.Zpool.Do(t.Context(), "sync", zpool); err != nil {
		t.Fatal(err)
	}
	plan, err := p.d.Plan(t.Context(), snap, "")
	if err != nil || plan.Raw || plan.SavedBytes*10 < plan.Bytes*6 || plan.SavedBytes >= plan.Bytes {
		t.Errorf("three copies of one file: %+v, %v", plan, err)
	}
}
