package repo

import (
	"context"
	"encoding/json"
	"iter"
	"strings"
	"sync"

	"pando/internal/base/errs"
	"pando/internal/remote/objstore"
)

// Limits of metadata, before compression. Nothing larger is written, and nothing
// larger is unpacked, whatever an object says.
const (
	maxHeadBytes     = 20 << 20
	maxFirstHead     = 16 << 20 // of a head of version 1
	maxSessionBytes  = 4 << 20
	maxSeenBytes     = 4 << 20
	maxManifestBytes = 32 << 20
)

// readAhead is how many objects are read at once where many are.
const readAhead = 8

// seal makes a metadata object for a key.
func (r *Repo) seal(t objectType, key string, content []byte, limit int) ([]byte, error) {
	return r.sealVersion(t, objectVersion, key, content, limit)
}

// sealVersion is seal for an object of a version.
func (r *Repo) sealVersion(t objectType, version byte, key string, content []byte, limit int) ([]byte, error) {
	if len(content) > limit {
		return nil, errs.New(errs.Invalid, "", "", "it would take %d bytes, over the limit of %d", len(content), limit)
	}
	h, aead, err := r.newSealingCipher(infoMetadata)
	if err != nil {
		return nil, err
	}
	h.version = version
	return sealMeta(aead, h, t, r.id, key, content, r.env.pack), nil
}

// openedObject is a metadata object that was read.
type openedObject struct {
	content []byte
	format  byte             // version of the object
	version objstore.Version // in the store
}

// unseal is the content of a metadata object that was read from a key.
func (r *Repo) unseal(ctx context.Context, t objectType, key string, object []byte, limit int) (openedObject, error) {
	h, err := parseHeader(object, t)
	if errs.Is(err, errs.TooNew) && r.wasOlder(t, key, object, limit) {
		err = changedVersion(object)
	}
	if err != nil {
		return openedObject{}, err
	}

	aead, err := r.cipherFor(ctx, h, infoMetadata)
	if err != nil {
		return openedObject{}, err
	}

	content, err := openMeta(aead, object, r.id, key, limit)
	return openedObject{content: content, format: h.version}, err
}

// wasOlder reports whether an object that says it is of a newer version was written as one of a version that is known:
// the version is authenticated, so nothing else opens then. Such an object is damaged, and may be repaired.
func (r *Repo) wasOlder(t objectType, key string, object []byte, limit int) bool {
	for version := range newestVersion(t) {
		b := withVersion(object, version+1)
		h, err := parseHeader(b, t)
		if err != nil {
			continue
		}
		aead, err := r.knownCipher(h, infoMetadata)
		if aead == nil || err != nil {
			continue
		}
		if _, err := openMeta(aead, b, r.id, key, limit); err == nil {
			return true
		}
	}

	return false
}

// getContent reads a metadata object. What does not authenticate is read once more: a bit may have flipped on its way.
func (r *Repo) getContent(ctx context.Context, t objectType, key string, limit int) ([]byte, objstore.Version, error) {
	o, err := r.getObject(ctx, t, key, limit)
	return o.content, o.version, err
}

// getObject is get with all that there is to know of the object.
func (r *Repo) getObject(ctx context.Context, t objectType, key string, limit int) (openedObject, error) {
	o, err := r.getObjectOnce(ctx, t, key, limit)
	if errs.Is(err, errs.Damaged) {
		return r.getObjectOnce(ctx, t, key, limit)
	}
	return o, err
}

func (r *Repo) getObjectOnce(ctx context.Context, t objectType, key string, limit int) (openedObject, error) {
	// What is packed is never larger than what is not.
	most := int64(limit) + headerSize + metaSize + tagSize
	object, info, err := r.store.Get(ctx, key, 0, most+1)
	if err != nil {
		return openedObject{}, err
	}
	if int64(len(object)) > most {
		return openedObject{}, damaged("larger than %d bytes", most)
	}
	o, err := r.unseal(ctx, t, key, object, limit)
	o.version = info.Version
	return o, err
}

// listIDs yields the IDs in the keys under a prefix. Other keys are not ours.
func (r *Repo) listIDs(ctx context.Context, prefix string) iter.Seq2[ID, error] {
	return func(yield func(ID, error) bool) {
		for o, err := range r.store.List(ctx, prefix) {
			if err != nil {
				yield(ID{}, errs.Wrap("list "+prefix+" in", r.store.String(), err))
				return
			}
			id, err := ParseID(strings.TrimPrefix(o.Key, prefix))
			if err != nil {
				continue
			}
			if !yield(id, nil) {
				return
			}
		}
	}
}

// readEach is inOrder for the IDs under a prefix.
func readEach[T any](
	ctx context.Context, r *Repo, prefix string, get func(context.Context, ID) (T, error),
) iter.Seq2[T, error] {
	return readInOrder(ctx, r.listIDs(ctx, prefix), get)
}

// readInOrder calls get for each of ids, several at once, and yields what it gave in order. An error ends it.
func readInOrder[K, T any](
	ctx context.Context,
	ids iter.Seq2[K, error],
	get func(context.Context, K) (T, error),
) iter.Seq2[T, error] {
	type result struct {
		value T
		err   error
	}
	return func(yield func(T, error) bool) {
		ctx, cancel := context.WithCancel(ctx)
		var running sync.WaitGroup
		defer running.Wait()
		defer cancel()

		var waiting []chan result
		next := func() bool { // yields the oldest; false: no more is wanted
			res := <-waiting[0]
			waiting = waiting[1:]
			return yield(res.value, res.err) && res.err == nil
		}

		for id, err := range ids {
			if err != nil {
				for len(waiting) > 0 {
					if !next() {
						return
					}
				}
				var none T
				yield(none, err)
				return
			}

			c := make(chan result, 1)
			waiting = append(waiting, c)
			running.Go(func() {
				v, err := get(ctx, id)
				c <- result{v, err}
			})
			if len(waiting) == readAhead && !next() {
				return
			}
		}

		for len(waiting) > 0 {
			if !next() {
				return
			}
		}
	}
}

func encodeJSON(v any) ([]byte, error) {
	b, err := json.Marshal(v)
	if err != nil {
		return nil, errs.New(errs.Invalid, "", "", "%v", err)
	}
	return b, nil
}

func decodeJSON(b []byte, v any) error {
	if err := json.Unmarshal(b, v); err != nil {
		return damaged("cannot parse the content: %v", err)
	}
	return nil
}
