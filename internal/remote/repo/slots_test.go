package repo

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/remote/objstore"
	"pando/internal/testing/storetest"
)

// host is somebody with an identity.
type host struct {
	label, recipient string
	secret           Secret
}

func newHost(t testing.TB, label string) host {
	t.Helper()
	id, recipient, err := NewIdentity()
	must(t, err)
	return host{label, recipient, identity(t, id)}
}

func (h host) slot() NewSlot { return NewSlot{Label: h.label, Recipient: h.recipient} }

// opens is whether the host can open the repository, and read what is in it.
func (h host) opens(t *testing.T, s objstore.Store) bool {
	t.Helper()
	r, err := openRepo(t.Context(), s, testEnv(), h.secret)
	if errs.Is(err, errs.Permission) {
		return false
	}
	if err != nil {
		t.Fatalf("%s: %v", h.label, err)
	}
	defer r.Close()
	for _, err := range r.Heads(t.Context()) {
		must(t, err)
	}
	return true
}

func labels(t testing.TB, r *Repo) []string {
	t.Helper()
	slots, err := r.Slots(t.Context())
	must(t, err)
	var all []string
	for _, s := range slots {
		all = append(all, s.Label)
	}
	return all
}

func slotOf(t testing.TB, r *Repo, label string) ID {
	t.Helper()
	slots, err := r.Slots(t.Context())
	must(t, err)
	for _, s := range slots {
		if s.Label == label {
			return s.ID
		}
	}
	t.Fatalf("no slot %q", label)
	return ID{}
}

func TestSlots(t *testing.T) {
	ctx := t.Context()
	r, m := made(t)
	a := newHost(t, "a")
	must(t, r.AddSlot(ctx, a.slot()))
	must(t, r.AddSlot(ctx, NewSlot{Label: "paper", Passphrase: "on paper"}))
	if !a.opens(t, m) {
		t.Error("a cannot open it")
	}
	p, err := openRepo(ctx, m, testEnv(), Passphrase("on paper"))
	must(t, err)
	defer p.Close()
	if got := labels(t, p); !slices.Equal(got, []string{"test", "a", "paper"}) {
		t.Error(got)
	}

	// What is refused changes nothing.
	before := m.data(configKey)
	for _, n := range []NewSlot{
		{}, {Label: "x"}, {Label: "x", Recipient: testRecipient, Passphrase: "both"}, {Recipient: a.recipient}, {Label: "x\n",
			Passphrase: "p"},
		{Label: strings.Repeat("x", 129), Passphrase: "p"}, {Label: "x", Recipient: "age1nonsense"}, {Label: "x",
			Recipient: "ssh-ed25519 AAAA"},
		{Label: "x", Recipient: testIdentity}, {Label: "x", Recipient: a.recipient + " "},
	} {
		err := r.AddSlot(ctx, n)
		kind(t, err, errs.Invalid)
		if strings.Contains(err.Error(), "AGE-SECRET") && !strings.Contains(n.Recipient, "AGE-SECRET") {
			t.Errorf("shows a secret: %v", err)
		}
	}
	kind(t, r.AddSlot(ctx, NewSlot{Label: "another", Recipient: a.recipient}), errs.Exists)
	kind(t, r.AddSlot(ctx, NewSlot{Label: "a", Passphrase: "p"}), errs.Exists)
	kind(t, r.RemoveSlot(ctx, NewID()), errs.NotFound)
	if string(before) != string(m.data(configKey)) {
		t.Error("config was changed")
	}

	must(t, r.RemoveSlot(ctx, slotOf(t, r, "a")))
	if a.opens(t, m) {
		t.Error("a still opens it")
	}
	must(t, p.RemoveSlot(ctx, slotOf(t, p, "test")))
	// Its slot is gone, but it is open: it can be used, until the keys change.
	if got := labels(t, r); !slices.Equal(got, []string{"paper"}) {
		t.Error(got)
	}
	err = r.RemoveSlot(ctx, slotOf(t, r, "paper"))
	kind(t, err, errs.Conflict)
	if errs.HintOf(err) == "" {
		t.Error("no hint")
	}
	kind(t, r.Rotate(ctx, nil), errs.Invalid)
	kind(t, r.Rotate(ctx, map[ID]string{slotOf(t, r, "paper"): "on papier"}), errs.Permission)
	must(t, p.Rotate(ctx, map[ID]string{slotOf(t, r, "paper"): "on paper"}))
	_, err = r.Slots(ctx)
	kind(t, err, errs.Permission)
}

func TestRotate(t *testing.T) {
	ctx := t.Context()
	r, m := made(t)
	a, b := newHost(t, "a"), newHost(t, "b")
	must(t, r.AddSlot(ctx, a.slot()))
	must(t, r.AddSlot(ctx, b.slot()))
	must(t, r.AddSlot(ctx, NewSlot{Label: "paper", Passphrase: "on paper"}))
	head := Head{Name: "old", Lineage: "l", NextSeq: 1}
	_, err := r.PutHead(ctx, head, "")
	must(t, err)
	text := []byte("what was stored before")
	w, err := r.NewSegment(NewID(), 0)
	must(t, err)
	f, err := w.Add(text, Raw, len(text))
	must(t, err)
	must(t, r.PutSegment(ctx, w.Segment(), w.Finish()))
	sum, mark := r.Sum(text), r.Mark()

	other, err := openRepo(ctx, m, testEnv(), a.secret)
	must(t, err)
	defer other.Close()
	removed, err := openRepo(ctx, m, testEnv(), b.secret)
	must(t, err)
	defer removed.Close()
	must(t, r.RemoveSlot(ctx, slotOf(t, r, "b")))
	must(t, r.Rotate(ctx, map[ID]string{slotOf(t, r, "paper"): "on paper"}))

	if now := r.Mark(); now.Key == mark.Key || now.ID != mark.ID || now.Serial != mark.Serial+2 {
		t.Errorf("%+v after %+v", now, mark)
	}
	head.Name = "new"
	v, err := r.PutHead(ctx, head, "")
	must(t, err)
	for _, who := range []*Repo{r, other} { // the other learns of the key from the object
		for _, name := range []string{"old", "new"} {
			if _, _, err := who.Head(ctx, name); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
		c, err := who.ReadFrames(ctx, []Frame{f})
		if err != nil || string(c[0]) != string(text) {
			t.Errorf("%q, %v", c, err)
		}
		if who.Sum(text) != sum {
			t.Error("sums have changed")
		}
		if who.Mark() != r.Mark() {
			t.Errorf("%+v, %+v", who.Mark(), r.Mark())
		}
	}
	// Names are the same, so that the same head is written over.
	head.Epoch = 2
	if _, err := other.PutHead(ctx, head, v); err != nil {
		t.Error(err)
	}
	// Who was removed reads what they could read, and nothing new, although they have
	// all keys that there were, and all objects.
	if _, _, err := removed.Head(ctx, "old"); err != nil {
		t.Error(err)
	}
	_, _, err = removed.Head(ctx, "new")
	kind(t, err, errs.Permission)
	if b.opens(t, m) {
		t.Error("b still opens it")
	}
	p, err := openRepo(ctx, m, testEnv(), Passphrase("on paper"))
	must(t, err)
	p.Close()
}

// A process that stays, as `push --every` does, writes under the new key soon.
func TestRotationIsNoticedBySessions(t *testing.T) {
	ctx := t.Context()
	r, m := made(t)
	other := goldenRepo(t, m)
	faulty := storetest.Faulty(m)
	other.store = faulty
	s := other.NewSession(Push, nil, Writer{})
	must(t, other.PutSession(ctx, &s))
	if n := faulty.Count(); n != 1 {
		t.Errorf("the first session after opening costs %d requests: %v", n, faulty.Calls())
	}
	must(t, r.Rotate(ctx, nil))
	must(t, other.PutSession(ctx, &s)) // renewals do not look
	if other.Mark() == r.Mark() {
		t.Error("a renewal looked at config")
	}
	s = other.NewSession(Push, nil, Writer{})
	must(t, other.PutSession(ctx, &s))
	if other.Mark() != r.Mark() {
		t.Error("the rotation was not noticed")
	}
}

// faults runs change with each of its operations on the store failing, before and
// after its effect. good says what must hold of the store then; the same again must
// succeed, or say that it is done.
func faults(
	t *testing.T, prepare func(*testing.T) *memory, change func(context.Context,
		objstore.Store) error, good func(t *testing.T, s objstore.Store, retried bool), done errs.Kind,
) {
	t.Helper()
	for _, when := range []storetest.When{storetest.Before, storetest.After} {
		for i := 0; ; i++ {
			fired := true
			t.Run(fmt.Sprintf("%d/%d", when, i), func(t *testing.T) {
				m := prepare(t)
				s := storetest.Faulty(m, storetest.Fault{At: i, When: when})
				err := change(t.Context(), s)
				if fired = s.Fired() > 0; !fired {
					must(t, err)
					good(t, m, true)
					return
				}
				if err == nil {
					t.Fatal("the fault was not reported")
				}
				if !objstore.Temporary(err) {
					t.Errorf("it does not say that it is temporary: %v", err)
				}
				good(t, m, false)
				s.Heal()
				if err := change(t.Context(), s); err != nil && !errs.Is(err, done) {
					t.Fatalf("again: %v", err)
				}
				good(t, m, true)
			})
			if !fired {
				if i == 0 {
					t.Fatal("no operations")
				}
				break
			}
		}
	}
}

func TestFaultsWhileKeysChange(t *testing.T) {
	a, b, c := newHost(t, "a"), newHost(t, "b"), newHost(t, "c")
	prepare := func(t *testing.T) *memory {
		m := newMemory()
		r, err := createRepo(t.Context(), m, a.slot(), testEnv())
		must(t, err)
		defer r.Close()
		must(t, r.AddSlot(t.Context(), b.slot()))
		_, err = r.PutHead(t.Context(), Head{Name: "web", NextSeq: 1}, "")
		must(t, err)
		return m
	}
	by := func(change func(context.Context, *Repo) error) func(context.Context, objstore.Store) error {
		return func(ctx context.Context, s objstore.Store) error {
			r, err := openRepo(ctx, s, testEnv(), a.secret)
			if err != nil {
				return err
			}
			defer r.Close()
			return change(ctx, r)
		}
	}
	who := func(t *testing.T, s objstore.Store, want ...host) {
		t.Helper()
		for _, h := range want {
			if !h.opens(t, s) {
				t.Errorf("%s cannot open it", h.label)
			}
		}
	}
	t.Run("add", func(t *testing.T) {
		faults(t, prepare, by(func(ctx context.Context, r *Repo) error {
			return r.AddSlot(ctx, c.slot())
		}), func(t *testing.T, s objstore.Store, retried bool) {
			who(t, s, a, b)
			if retried && !c.opens(t, s) {
				t.Error("c cannot open it")
			}
		}, errs.Exists)
	})
	t.Run("remove", func(t *testing.T) {
		faults(t, prepare, by(func(ctx context.Context, r *Repo) error {
			slots, err := r.Slots(ctx)
			if err != nil {
				return err
			}
			for _, s := range slots {
				if s.Label == "b" {
					return r.RemoveSlot(ctx, s.ID)
				}
			}
			return errs.New(errs.NotFound, "find", "b", "gone")
		}), func(t *testing.T, s objstore.Store, retried bool) {
			who(t, s, a)
			if retried && b.opens(t, s) {
				t.Error("b opens it")
			}
		}, errs.NotFound)
	})
	t.Run("rotate", func(t *testing.T) {
		faults(t, prepare, by(func(ctx context.Context, r *Repo) error {
			return r.Rotate(ctx, nil)
		}), func(t *testing.T, s objstore.Store, retried bool) {
			who(t, s, a, b)
			r, err := openRepo(t.Context(), s, testEnv(), a.secret)
			must(t, err)
			defer r.Close()
			if n := len(r.ring.keys); retried && n < 2 {
				t.Errorf("%d keys", n)
			}
			_, v, err := r.Head(t.Context(), "web")
			must(t, err)
			_, err = r.PutHead(t.Context(), Head{Name: "web", NextSeq: 1}, v)
			must(t, err)
		}, "")
	})
	t.Run("create", func(t *testing.T) {
		faults(t, func(*testing.T) *memory { return newMemory() }, func(ctx context.Context, s objstore.Store) error {
			r, err := createRepo(ctx, s, a.slot(), testEnv())
			if err == nil {
				r.Close()
			}
			return err
		}, func(t *testing.T, s objstore.Store, retried bool) {
			if retried {
				who(t, s, a)
			}
		}, errs.Exists)
	})
}

// With Retry above the store nothing of this is seen at all.
func TestFaultsBelowRetry(t *testing.T) {
	ctx := t.Context()
	for _, when := range []storetest.When{storetest.Before, storetest.After} {
		m := newMemory()
		s := objstore.Retry(storetest.Faulty(m, faultEach(when)...), objstore.RetryOptions{First: 1, Longest: 1})
		a, b := newHost(t, "a"), newHost(t, "b")
		r, err := createRepo(ctx, s, a.slot(), testEnv())
		must(t, err)
		defer r.Close()
		r.secrets = []Secret{a.secret}
		must(t, r.AddSlot(ctx, b.slot()))
		must(t, r.Rotate(ctx, nil))
		session := r.NewSession(Push, nil, Writer{})
		must(t, r.PutSession(ctx, &session))
		must(t, r.PutSession(ctx, &session))
		h := Head{Name: "web", NextSeq: 1}
		v, err := r.PutHead(ctx, h, "")
		must(t, err)
		_, err = r.PutHead(ctx, h, v)
		must(t, err)
		must(t, r.PutManifest(ctx, Manifest{ID: NewID(), Volume: "web", Content: Block, Session: session.ID}))
		w, err := r.NewSegment(session.ID, 0)
		must(t, err)
		_, err = w.Add([]byte("x"), Raw, 1)
		must(t, err)
		must(t, r.PutSegment(ctx, w.Segment(), w.Finish()))
		must(t, r.RemoveSlot(ctx, slotOf(t, r, "b")))
		must(t, r.EndSession(ctx, &session))
	}
}

// faultEach strikes every second call.
func faultEach(when storetest.When) (all []storetest.Fault) {
	for i := range 100 {
		all = append(all, storetest.Fault{At: 2 * i, When: when})
	}
	return all
}

// Changes of keys by many hosts at once: all happen, one after the other.
func TestConcurrentChangesOfKeys(t *testing.T) {
	ctx := t.Context()
	r, m := made(t)
	doomed := newHost(t, "doomed")
	must(t, r.AddSlot(ctx, doomed.slot()))
	id := slotOf(t, r, "doomed")
	var hosts []host
	var all sync.WaitGroup
	start := make(chan struct{})
	do := func(change func(*Repo) error) {
		mine := goldenRepo(t, m) // the same identity
		all.Go(func() {
			<-start
			if err := change(mine); err != nil {
				t.Error(err)
			}
		})
	}
	for i := range 3 {
		h := newHost(t, fmt.Sprint("host", i))
		hosts = append(hosts, h)
		do(func(r *Repo) error { return r.AddSlot(ctx, h.slot()) })
	}
	for range 2 {
		do(func(r *Repo) error { return r.Rotate(ctx, nil) })
	}
	do(func(r *Repo) error { return r.RemoveSlot(ctx, id) })
	close(start)
	all.Wait()
	for _, h := range hosts {
		if !h.opens(t, m) {
			t.Errorf("%s cannot open it", h.label)
		}
	}
	if doomed.opens(t, m) {
		t.Error("who was removed opens it")
	}
	must(t, r.Refresh(ctx))
	if got := r.Mark().Serial; got != 8 {
		t.Errorf("serial %d", got)
	}
	if len(r.ring.keys) != 3 {
		t.Errorf("%d keys", len(r.ring.keys))
	}
}

func TestCreate(t *testing.T) {
	ctx := t.Context()
	a := newHost(t, "a")
	// Two at once: one wins.
	m := newMemory()
	var all sync.WaitGroup
	won := make(chan *Repo, 8)
	for range 8 {
		all.Go(func() {
			r, err := createRepo(ctx, m, a.slot(), testEnv())
			if err == nil {
				won <- r
			} else if !errs.Is(err, errs.Exists) {
				t.Error(err)
			}
		})
	}
	all.Wait()
	close(won)
	if len(won) != 1 {
		t.Fatalf("%d have made it", len(won))
	}
	r := <-won
	defer r.Close()
	opened, err := openRepo(ctx, m, testEnv(), a.secret)
	must(t, err)
	defer opened.Close()
	if opened.ID() != r.ID() || opened.Mark() != r.Mark() {
		t.Errorf("%+v, %+v", opened.Mark(), r.Mark())
	}
	must(t, opened.Check(r.Mark()))

	// What a probe left is no obstacle; anything else is.
	m = newMemory()
	m.set("probe/x", nil)
	r2, err := createRepo(ctx, m, a.slot(), testEnv())
	must(t, err)
	r2.Close()
	kind(t, r2.Refresh(ctx), errs.Internal)
	m = newMemory()
	m.set("holiday.jpg", nil)
	_, err = createRepo(ctx, m, a.slot(), testEnv())
	kind(t, err, errs.Exists)
	if len(m.keys()) != 1 {
		t.Error("something was written")
	}
	_, err = openRepo(ctx, m, testEnv(), a.secret)
	kind(t, err, errs.NotFound)
	if errs.HintOf(err) == "" {
		t.Error("no hint")
	}
	_, err = createRepo(ctx, newMemory(), NewSlot{}, testEnv())
	kind(t, err, errs.Invalid)
}

// Two creators that both saw nothing: the second has its write refused.
func TestCreateThatIsOvertaken(t *testing.T) {
	ctx := t.Context()
	a, b := newHost(t, "a"), newHost(t, "b")
	m := newMemory()
	s := storetest.Faulty(m, storetest.Fault{Match: storetest.Ops(storetest.Put), Do: func(storetest.Call) {
		r, err := createRepo(ctx, m, a.slot(), testEnv())
		if err != nil {
			t.Error(err)
			return
		}
		r.Close()
	}})
	_, err := createRepo(ctx, s, b.slot(), testEnv())
	kind(t, err, errs.Exists)
	if !a.opens(t, m) || b.opens(t, m) {
		t.Error("the wrong one has won")
	}
}

// Config put back to an earlier state, or made by somebody who knows old keys only.
func TestOldConfigIsNoticed(t *testing.T) {
	ctx := t.Context()
	r, m := made(t)
	b := newHost(t, "b")
	must(t, r.AddSlot(ctx, b.slot()))
	old := m.data(configKey)
	insider, err := openRepo(ctx, m, testEnv(), b.secret)
	must(t, err)
	defer insider.Close()
	must(t, r.RemoveSlot(ctx, slotOf(t, r, "b")))
	removed := r.Mark() // the same key as before, but a later config
	now := m.data(configKey)
	m.set(configKey, old)
	kind(t, r.Refresh(ctx), errs.Damaged)
	kind(t, goldenRepo(t, m).Check(removed), errs.Damaged)
	m.set(configKey, now)
	must(t, r.Rotate(ctx, nil))
	mark := r.Mark()
	m.set(configKey, old)
	kind(t, r.Refresh(ctx), errs.Damaged)
	again := goldenRepo(t, m) // has seen nothing of it
	kind(t, again.Check(mark), errs.Damaged)
	kind(t, r.AddSlot(ctx, newHost(t, "x").slot()), errs.Damaged)

	// b, whose key was removed, writes a config with what they know, and any serial.
	for range 10 {
		must(t, insider.AddSlot(ctx, NewSlot{Label: NewID().String(), Passphrase: "p"}))
	}
	kind(t, goldenRepo(t, m).Check(mark), errs.Damaged)
	kind(t, r.Refresh(ctx), errs.Damaged)
	must(t, insider.Rotate(ctx, passphrasesOf(t, insider, "p")))
	kind(t, goldenRepo(t, m).Check(mark), errs.Damaged)
	kind(t, r.Refresh(ctx), errs.Damaged)

	// Another repository in its place.
	fresh, other := made(t)
	kind(t, fresh.Check(mark), errs.Conflict)
	m.set(configKey, other.data(configKey))
	kind(t, r.Refresh(ctx), errs.Conflict)
	must(t, fresh.Check(fresh.Mark()))
	must(t, fresh.Rotate(ctx, nil))
}

func passphrasesOf(t *testing.T, r *Repo, p string) map[ID]string {
	t.Helper()
	slots, err := r.Slots(t.Context())
	must(t, err)
	all := map[ID]string{}
	for _, s := range slots {
		if s.Kind == SlotPassphrase {
			all[s.ID] = p
		}
	}
	return all
}

// A store's operator who knows a recipient can wrap a key for it, but not make a
// config that has the repository's ID.
func TestConfigOfAnOperator(t *testing.T) {
	ctx := t.Context()
	r, m := made(t)
	mark := r.Mark()
	e := testEnv()
	k := keyring{
		id:      mark.ID,
		serial:  mark.Serial,
		ringKey: e.randomBytes(keySize),
		keys:    []masterKey{newMasterKey(e.randomBytes(keySize), e.utcNow())},
	}
	s, err := k.newSlot(e.newID(), NewSlot{Label: "test", Recipient: testRecipient}, e)
	must(t, err)
	k.slots = []slot{s}
	raw, err := k.encode(e.randomBytes(saltSize))
	must(t, err)
	m.set(configKey, raw)
	_, err = openRepo(ctx, m, e, identity(t, testIdentity))
	kind(t, err, errs.Damaged)
	kind(t, r.Refresh(ctx), errs.Damaged)
}

func TestPostQuantumRecipient(t *testing.T) {
	ctx := t.Context()
	r, m := made(t)
	const hybrid = "AGE-SECRET-KEY-PQ-1"
	id, recipient := newHybrid(t)
	if !strings.HasPrefix(id, hybrid) {
		t.Fatal(id)
	}
	must(t, r.AddSlot(ctx, NewSlot{Label: "pq", Recipient: recipient}))
	must(t, CheckRecipient(recipient))
	o, err := openRepo(ctx, m, testEnv(), identity(t, id))
	must(t, err)
	defer o.Close()
	must(t, o.Rotate(ctx, nil))
	must(t, r.Refresh(ctx))
}

func TestSecretsDoNotShow(t *testing.T) {
	for _, s := range []Secret{Passphrase("on paper"), identity(t, testIdentity)} {
		for _, f := range []string{"%v", "%+v", "%#v", "%s"} {
			if text := fmt.Sprintf(f, s); strings.Contains(text, "paper") || strings.Contains(text, "SECRET") {
				t.Error(text)
			}
		}
	}
	_, err := Identity("AGE-SECRET-KEY-1WRONG")
	kind(t, err, errs.Invalid)
	if strings.Contains(err.Error(), "WRONG") {
		t.Error(err)
	}
	_, err = Identity("")
	kind(t, err, errs.Invalid)
	s, err := Identity("# a comment\n\n" + testIdentity + "\n")
	if err != nil || len(s.identities) != 1 {
		t.Error(s, err)
	}
}

func TestManySlots(t *testing.T) {
	e := testEnv()
	k := keyring{
		serial:  1,
		ringKey: e.randomBytes(keySize),
		keys:    []masterKey{newMasterKey(e.randomBytes(keySize), e.utcNow())},
	}
	k.id = derivedID(k.keys[0].secret, infoRepoID)
	h := newHost(t, "last")
	for i := range maxSlots {
		n := NewSlot{Label: fmt.Sprint(i), Recipient: testRecipient}
		if i == maxSlots-1 {
			n.Recipient = h.recipient
		}
		s, err := k.newSlot(e.newID(), n, e)
		must(t, err)
		k.slots = append(k.slots, s)
	}
	for len(k.keys) < maxKeys {
		k.keys = append(k.keys, newMasterKey(e.randomBytes(keySize), e.utcNow()))
	}
	raw, err := k.encode(e.randomBytes(saltSize))
	must(t, err)
	m := newMemory()
	m.set(configKey, raw)
	if !h.opens(t, m) {
		t.Error("the last of many cannot open it")
	}
	r, err := openRepo(t.Context(), m, e, h.secret)
	must(t, err)
	defer r.Close()
	kind(t, r.AddSlot(t.Context(), newHost(t, "x").slot()), errs.Invalid)
	kind(t, r.Rotate(t.Context(), nil), errs.Invalid)
	must(t, r.RemoveSlot(t.Context(), k.slots[0].ID))
}
