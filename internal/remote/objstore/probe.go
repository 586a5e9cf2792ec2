package objstore

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"strings"
	"time"

	"pando/internal/base/errs"

	"golang.org/x/sync/errgroup"
)

// ProbePrefix is the prefix of all keys that [Probe] writes.
const ProbePrefix = "probe/"

// probeRacers is the number of writers of one object that race against each other, probeRounds the number of races.
const (
	probeRacers = 3
	probeRounds = 3
)

// Probe tests on objects of its own whether a store keeps the promises of the
// contract: conditions, with several writers at once, ranges, listings, deletion. It
// removes its objects, even when it fails or is canceled. Errors: Unsupported if the
// store breaks a promise; Permission if this user is not allowed to do all of it; and
// those of the store. s should retry failed operations ([Retry]).
func Probe(ctx context.Context, s Store) (err error) {
	p := &probe{s: s, prefix: ProbePrefix + strings.ToLower(rand.Text()) + "."}
	defer func() {
		if cerr := p.removeObjects(ctx); err == nil {
			err = cerr
		}
		var e *errs.Error
		if errs.Is(err, errs.Permission) && errors.As(err, &e) && e.Hint == "" {
			e.Hint = "give this user permission to write, read, list and delete objects of the remote"
		}
	}()

	for _, step := range []func(context.Context) error{p.checkConditions, p.checkRaces, p.checkReading, p.checkRemoving} {
		if err := step(ctx); err != nil {
			return err
		}
	}

	return nil
}

type probe struct {
	s      Store
	prefix string
}

func (p *probe) key(name string) string { return p.prefix + name }

// brokenPromise returns the error of a store that breaks a promise.
func (p *probe) brokenPromise(format string, args ...any) error {
	return errs.New(errs.Unsupported, "test remote", p.s.String(), format, args...).
		WithHint("use another store, or a newer version of its server: on this one, two hosts could destroy each other's " +
			"data")
}

// putConditional writes under a condition and says whether the store accepted it.
func (p *probe) putConditional(
	ctx context.Context, name, data string, c Condition,
) (v Version, accepted bool, err error) {
	v, err = p.s.Put(ctx, p.key(name), []byte(data), c)
	if errs.Is(err, errs.Conflict) && !Temporary(err) {
		return "", false, nil
	}
	return v, err == nil, err
}

// checkConditions checks that conditions of writes are kept.
func (p *probe) checkConditions(ctx context.Context) error {
	// Create an object that must not exist, twice.
	first, ok, err := p.putConditional(ctx, "one", "first", IfAbsent)
	if err != nil {
		return err
	}
	if !ok {
		return p.brokenPromise("it says that an object with a name never used before already exists")
	}
	if first == "" {
		return p.brokenPromise("it does not report the version of an object that was written")
	}

	if _, ok, err := p.putConditional(ctx, "one", "again", IfAbsent); err != nil {
		return err
	} else if ok {
		return p.brokenPromise("it overwrites an object in spite of the condition that the object must not exist")
	}

	// Replace it by its version, the second time by the old one.
	second, ok, err := p.putConditional(ctx, "one", "second", IfVersion(first))
	if err != nil {
		return err
	}
	if !ok {
		return p.brokenPromise("it refuses to replace an object whose version was given correctly")
	}
	if second == first {
		return p.brokenPromise("the version of an object does not change when the object does")
	}

	if _, ok, err := p.putConditional(ctx, "one", "third", IfVersion(first)); err != nil {
		return err
	} else if ok {
		return p.brokenPromise("it replaces an object whose version is not the expected one")
	}

	if _, ok, err := p.putConditional(ctx, "none", "fourth", IfVersion(first)); err != nil {
		return err
	} else if ok {
		return p.brokenPromise("it creates an object in spite of the condition that the object must have a certain version")
	}

	// Only the accepted writes may have had an effect.
	data, info, err := p.s.Get(ctx, p.key("one"), 0, -1)
	if err != nil {
		return err
	}
	if string(data) != "second" || info.Version != second {
		return p.brokenPromise("it does not return the content that was written last")
	}

	return nil
}

// checkRaces lets several writers write at once. Exactly one may succeed.
func (p *probe) checkRaces(ctx context.Context) error {
	version := Version("")
	for range probeRounds {
		c := IfAbsent
		if version != "" {
			c = IfVersion(version)
		}

		var won [probeRacers]bool
		var versions [probeRacers]Version
		g, gctx := errgroup.WithContext(ctx)
		for i := range probeRacers {
			g.Go(func() (err error) {
				versions[i], won[i], err = p.putConditional(gctx, "race", rand.Text(), c)
				return err
			})
		}

		if err := g.Wait(); err != nil {
			return err
		}

		// The winner's version is the condition of the next round.
		winners := 0
		for i, w := range won {
			if w {
				winners++
				version = versions[i]
			}
		}

		if winners != 1 {
			return p.brokenPromise("of %d conditional writes of one object at the same time, %d succeeded instead of 1",
				probeRacers, winners)
		}
	}

	return nil
}

// checkReading checks that ranges of an object can be read.
func (p *probe) checkReading(ctx context.Context) error {
	want := []byte(rand.Text() + rand.Text())
	if _, _, err := p.putConditional(ctx, "read", string(want), Always); err != nil {
		return err
	}

	for _, r := range [][2]int64{{0, -1}, {0, 5}, {7, 9}, {40, -1}, {50, 100}, {int64(len(want)), 10}} {
		got, info, err := p.s.Get(ctx, p.key("read"), r[0], r[1])
		if err != nil {
			return err
		}
		end := int64(len(want))
		if r[1] >= 0 {
			end = min(end, r[0]+r[1])
		}
		if !bytes.Equal(got, want[r[0]:end]) || info.Bytes != int64(len(want)) {
			return p.brokenPromise("it does not return the requested range of an object")
		}
	}

	return nil
}

// checkRemoving checks that listings are complete, and that deleted objects are gone.
func (p *probe) checkRemoving(ctx context.Context) error {
	keys, err := p.listKeys(ctx)
	if err != nil {
		return err
	}

	if want := []string{p.key("one"), p.key("race"), p.key("read")}; !equalKeys(keys, want) {
		return p.brokenPromise("it lists %d objects after %d were written", len(keys), len(want))
	}

	// Delete an object, twice: the second time must succeed as well.
	for range 2 {
		if err := p.s.Delete(ctx, p.key("one")); err != nil {
			return err
		}
	}

	_, _, err = p.s.Get(ctx, p.key("one"), 0, -1)
	if err == nil {
		return p.brokenPromise("it returns an object that was deleted")
	}
	if !errs.Is(err, errs.NotFound) {
		return err
	}

	if keys, err = p.listKeys(ctx); err != nil {
		return err
	}

	if !equalKeys(keys, []string{p.key("race"), p.key("read")}) {
		return p.brokenPromise("it lists an object that was deleted")
	}

	return nil
}

func (p *probe) listKeys(ctx context.Context) (keys []string, err error) {
	for info, err := range p.s.List(ctx, p.prefix) {
		if err != nil {
			return nil, err
		}
		keys = append(keys, info.Key)
	}
	return keys, nil
}

func equalKeys(a, b []string) bool { return strings.Join(a, " ") == strings.Join(b, " ") }

// removeObjects deletes the objects that a probe may have created, by name, so that it
// also works on a store that cannot be listed.
func (p *probe) removeObjects(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 30*time.Second)
	defer cancel()
	var first error
	for _, name := range []string{"one", "none", "race", "read"} {
		if err := p.s.Delete(ctx, p.key(name)); err != nil && first == nil {
			first = err
		}
	}
	return first
}
