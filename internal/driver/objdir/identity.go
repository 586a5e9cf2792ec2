package objdir

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"reflect"
	"strings"
	"unicode/utf8"

	"pando/internal/base/errs"
	"pando/internal/driver"
)

// castagnoli is the polynomial of CRC-32C (RFC 3720).
var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// sumFormat is how an identity ends: with the CRC-32C of all bytes before.
const (
	sumFormat = `,"sum":"%08x"}`
	sumBytes  = len(`,"sum":"01234567"}`)
)

// Encode returns the JSON form of the identity of an object in a pool, with its checksum.
// Invalid if it is longer than driver.MaxIdentityBytes, or could not be read back.
func Encode(id driver.Identity, pool string) ([]byte, error) {
	const op = "write identity"
	id.Version, id.Pool = driver.IdentityVersion, pool
	b, err := json.Marshal(id)
	if err != nil {
		return nil, errs.Wrap(op, string(id.ID), err)
	}

	// Keep the fields that a newer version has added.
	b = b[:len(b)-1]
	if id.Extra != "" {
		b = append(append(b, ','), id.Extra...)
	}

	b = fmt.Appendf(b, sumFormat, crc32.Checksum(b, castagnoli))
	if len(b) > driver.MaxIdentityBytes {
		return nil, errs.New(errs.Invalid, op, string(id.ID), "%d bytes of identity, at most %d fit", len(b),
			driver.MaxIdentityBytes)
	}

	// Refuse what could not be read back: the object would count as damaged.
	if err := readable(id, b); err != nil {
		return nil, &errs.Error{Kind: errs.Invalid, Op: op, Ref: string(id.ID), Err: err}
	}

	return b, nil
}

// readable reports whether Decode would read an identity back from b, its JSON form,
// as it is. It does not parse b unless there are fields in it that this version does
// not know: that would double the time of a clone's identity.
func readable(id driver.Identity, b []byte) error {
	for _, s := range []string{id.Name, id.Golden, id.Origin, id.BootID, id.Before, id.Pool} {
		if !utf8.ValidString(s) {
			return errors.New("a name is not valid UTF-8")
		}
	}
	if id.Extra == "" {
		return checkValues(id)
	}
	_, err := Decode(b)
	return err
}

// Decode reads the JSON form of an identity. Damaged (for example if the checksum is wrong), TooNew.
func Decode(b []byte) (driver.Identity, error) {
	b = bytes.TrimSuffix(b, []byte("\n"))
	version, err := versionOf(b)
	if err != nil {
		return driver.Identity{}, damaged("%w", err)
	}

	if version > driver.IdentityVersion {
		return driver.Identity{}, (&errs.Error{Kind: errs.TooNew,
			Err: fmt.Errorf("identity of format %d, but this pando supports formats up to %d", version,
				driver.IdentityVersion)}).
			WithHint("upgrade pando")
	}

	if b, err = checkSum(b); err != nil {
		return driver.Identity{}, err
	}

	i, err := parseFields(b)
	if err == nil && i.Version != driver.IdentityVersion {
		err = fmt.Errorf("unknown version %d", i.Version)
	}
	if err != nil {
		return driver.Identity{}, damaged("%w", err)
	}

	if err := checkValues(i); err != nil {
		return driver.Identity{}, err
	}

	return i, nil
}

// current is how most identities begin, as Encode writes them.
var current = fmt.Appendf(nil, `{"v":%d,`, driver.IdentityVersion)

// versionOf returns the version of an identity. It does not parse an identity in the form that Encode writes: its
// checksum is checked next.
func versionOf(b []byte) (int, error) {
	if bytes.HasPrefix(b, current) {
		return driver.IdentityVersion, nil
	}
	var v struct {
		Version int `json:"v"`
	}
	err := json.Unmarshal(b, &v)
	return v.Version, err
}

func damaged(format string, args ...any) error {
	return &errs.Error{Kind: errs.Damaged, Err: fmt.Errorf(format, args...)}
}

// checkSum checks the checksum at the end of an identity, and returns the rest of it as
// one JSON object.
func checkSum(b []byte) ([]byte, error) {
	body := b[:max(len(b)-sumBytes, 0)]
	if want := fmt.Appendf(nil, sumFormat, crc32.Checksum(body, castagnoli)); !bytes.Equal(b[len(body):], want) {
		return nil, damaged("its checksum is wrong: it was changed, or is not all there")
	}
	return append(bytes.Clone(body), '}'), nil
}

// parseFields reads the fields that this version knows; the others go into Extra.
func parseFields(b []byte) (driver.Identity, error) {
	var i driver.Identity
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if d.Decode(&i) == nil {
		return i, nil
	}

	// This is rare: a newer version has written it, or it is damaged.
	i = driver.Identity{}
	if err := json.Unmarshal(b, &i); err != nil {
		return driver.Identity{}, err
	}

	var all map[string]json.RawMessage
	if err := json.Unmarshal(b, &all); err != nil {
		return driver.Identity{}, err
	}

	for name := range all {
		if isKnownField(name) {
			delete(all, name)
		}
	}

	if len(all) > 0 {
		extra, err := json.Marshal(all) // in the order of their names
		if err != nil {
			return driver.Identity{}, err
		}
		i.Extra = string(extra[1 : len(extra)-1])
	}

	return i, nil
}

// isKnownField reports whether a field of an identity is one of driver.Identity's. Like
// encoding/json it ignores case.
func isKnownField(name string) bool {
	for _, f := range reflect.VisibleFields(reflect.TypeFor[driver.Identity]()) {
		tag, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		if strings.EqualFold(tag, name) {
			return true
		}
	}
	return strings.EqualFold(name, "sum")
}

// checkValues refuses values that no identity can have. Damaged.
func checkValues(i driver.Identity) error {
	optional := func(id driver.ObjectID) bool { return id == "" || driver.ValidID(string(id)) }
	switch {
	case !driver.ValidID(string(i.ID)), i.SizeBytes < 0, i.Generation < 0, i.Keep < 0,
		!optional(i.Volume), !optional(i.Replaces), !optional(i.OriginID), !optional(i.Lower):
		return damaged("identity with impossible values")
	}

	switch i.Kind {
	case driver.Volume, driver.Snapshot, driver.Generation, driver.Scratch, driver.Layer:
	default:
		return damaged("unknown kind of object %q", i.Kind)
	}

	switch i.Consistency {
	case "", driver.Clean, driver.Crash:
	default:
		return damaged("unknown consistency %q", i.Consistency)
	}

	switch i.FS {
	case driver.Native, driver.Ext4, driver.XFS, driver.None:
	default:
		return damaged("unknown filesystem %q", i.FS)
	}

	return nil
}
