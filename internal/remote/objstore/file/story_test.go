package file_test

import (
	"context"
	"strings"

	"pando/internal/base/errs"
	"pando/internal/remote/objstore"
)

// The story that is told: an object is made in a new directory, a head is replaced
// to name it, and what it named before is deleted.
var (
	newManifest = strings.Repeat("m", 100_000)
	oldHead     = strings.Repeat("h", 1000)
	newHead     = strings.Repeat("H", 2000)
	oldSegment  = strings.Repeat("s", 3000)

	before = map[string]string{"heads/h": oldHead, "segments/old/0": oldSegment}
	after  = map[string]string{"heads/h": newHead, "manifests/new/m": newManifest}
)

// tell can be called again after it was cut short at any point.
func tell(ctx context.Context, s objstore.Store) error {
	_, err := s.Put(ctx, "manifests/new/m", []byte(newManifest), objstore.IfAbsent)
	if err != nil && !errs.Is(err, errs.Conflict) {
		return err
	}
	head, info, err := s.Get(ctx, "heads/h", 0, -1)
	if err != nil {
		return err
	}
	if string(head) != newHead {
		if _, err := s.Put(ctx, "heads/h", []byte(newHead), objstore.IfVersion(info.Version)); err != nil {
			return err
		}
	}
	return s.Delete(ctx, "segments/old/0")
}
