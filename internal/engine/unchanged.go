package engine

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"time"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
)

// ErrChanged is in the chain of the errors of calls that IfUnchanged has made conditional.
var ErrChanged = errors.New("it has changed since it was read")

type unchangedKey struct{}

// IfUnchanged returns a context in which SetLabels, Rename, Pin, Unpin, SetTTL, SetGolden, Destroy and RemoveGolden
// change an object only if its tag is one of tags: another caller may have changed it since it was read. Otherwise they
// return Conflict, with ErrChanged, and change nothing.
func IfUnchanged(ctx context.Context, tags ...string) context.Context {
	return context.WithValue(ctx, unchangedKey{}, tags)
}

// Tag identifies the state of an object: it changes with all that can be set, such as its name and labels, and not with
// what is measured.
func (i Info) Tag() string {
	pinned, expires := time.Time{}, time.Time{}
	if i.PinnedUntil != nil {
		pinned = *i.PinnedUntil
	}
	if i.ExpiresAt != nil {
		expires = *i.ExpiresAt
	}
	sum := sha256.Sum256(fmt.Appendf(nil, "%q %q %q %t %d %d %d %d %q", i.ID, i.Name, i.Labels.Text(),
		i.State == stateCurrent, pinned.UnixNano(), expires.UnixNano(), i.SizeBytes, i.properties.Keep, i.properties.Overlay))
	return hex.EncodeToString(sum[:8])
}

// checkUnchanged returns an error, in the transaction that begins a change, if the object has changed since. Conflict.
func (e *Engine) checkUnchanged(ctx context.Context, tx *catalog.Tx, op string, row catalog.Row) error {
	tags, conditional := ctx.Value(unchangedKey{}).([]string)
	if !conditional {
		return nil
	}

	now := rowInfo(row, e.caps.Name)
	switch row.Kind {
	case driver.Snapshot:
		now.Name = tx.RefOf(row)
	case driver.Generation:
		g, _, err := tx.Golden(row.Golden)
		if err != nil {
			return err
		}
		now = generationInfo(row, g, e.caps.Name)
	}
	for _, t := range tags {
		if t == now.Tag() {
			return nil
		}
	}
	return errs.New(errs.Conflict, op, tx.RefOf(row), "%w", ErrChanged).
		WithHint("read it again, and decide anew: %s", errs.Run("show", tx.RefOf(row)))
}

// checkGoldenUnchanged is checkUnchanged for the golden of which id is the current generation.
func (e *Engine) checkGoldenUnchanged(ctx context.Context, tx *catalog.Tx, op string, id driver.ObjectID) error {
	row, ok, err := tx.Object(id)
	if err != nil || !ok {
		return err
	}
	return e.checkUnchanged(ctx, tx, op, row)
}
