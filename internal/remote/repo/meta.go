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

// Limits of metadata, before compression. Nothing larger is written, and nothing larger
// is decompressed, whatever size an object declares.
const (
	maxHeadBytes     = 20 << 20
	maxSessionBytes  = 4 << 20
	maxSeenBytes     = 4 << 20
	maxManifestBytes = 32 << 20
)

// readAhead is the number of objects that are read concurrently when many are read.
const readAhead = 8

// seal encodes a metadata object for a key.
func (r *Repo) seal(t objectType, key string, content []byte, limit int) ([]byte, error) {
	if len(content) > limit {
		return nil, errs.New(errs.Invalid, "", "", "it would take %d bytes, over the limit of %d", len(content), limit)
	}
	h, aead, err := r.newSealingCipher(infoMetadata)
	if err != nil {
		return nil, err
	}
	return sealMeta(aead, h, t, r.id, key, content, r.env.pack), nil
}

// unseal decrypts a metadata object that was read from a key, and returns its content.
func (r *Repo) unseal(ctx context.Context, t objectType, key string, object []byte, limit int) ([]byte, error) {
	h, err := parseHeader(object, t)
	if errs.Is(err, errs.TooNew) && r.wasKnown(t, key, object, limit) {
		err = changedVersion(object)
	}
	if err != nil {
		return nil, err
	}

	aead, err := r.cipherFor(ctx, h, infoMetadata)
	if err != nil {
		return nil, err
	}

	return openMeta(aead, object, r.id, key, limit)
}

// wasKnown reports whether an object that claims a newer version was written with the known one. The version is
// authenticated, so the object decrypts only with its true version. Such an object is damaged, and may be repaired.
func (r *Repo) wasKnown(t objectType, key string, object []byte, limit int) bool {
	b := withKnownVersion(object)
	h, err := parseHeader(b, t)
	if err != nil {
		return false
	}
	aead, err := r.knownCipher(h, infoMetadata)
	if aead == nil || err != nil {
		return false
	}
	_, err = openMeta(aead, b, r.id, key, limit)
	return err == nil
}

// getContent reads and decrypts a metadata object, and returns its content and its version in the store. A damaged one
// is read twice: a bit may have flipped in transit.
func (r *Repo) getContent(ctx context.Context, t objectType, key string, limit int) ([]byte, objstore.Version, error) {
	content, version, err := r.getContentOnce(ctx, t, key, limit)
	if errs.Is(err, errs.Damaged) {
		return r.getContentOnce(ctx, t, key, limit)
	}
	return content, version, err
}

func (r *Repo) getContentOnce(
	ctx context.Context, t objectType, key string, limit int,
) ([]byte, objstore.Version, error) {
	// Compressed content is never larger than uncompressed content.
	most := int64(limit) + headerSize + metaSize + tagSize
	object, info, err := r.store.Get(ctx, key, 0, most+1)
	if err != nil {
		return nil, "", err
	}
	if int64(len(object)) > most {
		return nil, "", damaged("larger than %d bytes", most)
	}
	content, err := r.unseal(ctx, t, key, object, limit)
	return content, info.Version, err
}

// listIDs yields the IDs in the keys under a prefix, and skips keys that no repository writes.
func (r *Repo) listIDs(ctx context.Context, prefix string) iter.Seq2[ID, error] {
	return listObjects(ctx, r, "list "+prefix+" in", prefix, func(o objstore.Info) (ID, bool) {
		id, err := ParseID(strings.TrimPrefix(o.Key, prefix))
		return id, err == nil
	})
}

// listSegments yields what describe returns for the segments in the keys under a prefix, and their sizes in bytes. It
// skips keys that no repository writes.
func listSegments[T any](
	ctx context.Context, r *Repo, op, prefix string, describe func(s Segment, bytes int64) T,
) iter.Seq2[T, error] {
	return listObjects(ctx, r, op, prefix, func(o objstore.Info) (T, bool) {
		s, ok := parseSegment(strings.TrimPrefix(o.Key, prefix))
		return describe(s, o.Bytes), ok
	})
}

// listObjects yields what parse returns for the objects under a prefix, in the order of their keys, and skips those
// that it rejects. An error ends it.
func listObjects[T any](
	ctx context.Context, r *Repo, op, prefix string, parse func(objstore.Info) (T, bool),
) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		for o, err := range r.store.List(ctx, prefix) {
			if err != nil {
				var none T
				yield(none, errs.Wrap(op, r.store.String(), err))
				return
			}
			if x, ok := parse(o); ok && !yield(x, nil) {
				return
			}
		}
	}
}

// readEach is readInOrder for the IDs under a prefix.
func readEach[T any](
	ctx context.Context, r *Repo, prefix string, get func(context.Context, ID) (T, error),
) iter.Seq2[T, error] {
	return readInOrder(ctx, r.listIDs(ctx, prefix), get)
}

// readInOrder calls get for each of ids, up to readAhead at once, and yields the results in order. An error ends it.
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
		next := func() bool { // yields the oldest result; false: stop
			res := <-waiting[0]
			waiting = waiting[1:]
			return yield(res.value, res.err) && res.err == nil
		}

		// Start the calls, and yield the oldest result when there are enough.
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

		// Yield the rest.
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
