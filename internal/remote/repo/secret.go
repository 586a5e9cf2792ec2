package repo

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"filippo.io/age"

	"pando/internal/base/errs"
)

// Secret opens a repository: it holds age identities, or a passphrase. The zero value
// opens nothing. It stays in memory until the Repo is closed and garbage collected,
// because Go strings cannot be wiped.
type Secret struct {
	identities []age.Identity
	passphrase string
}

// Identity parses identities as age-keygen writes them ("AGE-SECRET-KEY-1...", one per
// line, with comments and blank lines). Invalid: the text has no identity, or one of an
// unsupported kind (plugins, SSH).
func Identity(text string) (Secret, error) {
	// The errors of age may quote the line, which is secret, so they are dropped.
	identities, err := age.ParseIdentities(strings.NewReader(text))
	if err != nil {
		return Secret{}, errs.New(errs.Invalid, "read identity", "", "not an age identity").
			WithHint("create an identity with `age-keygen`: it is a line that begins with AGE-SECRET-KEY-1")
	}
	return Secret{identities: identities}, nil
}

// Passphrase returns a secret that is a passphrase. On purpose, trying it takes about a
// second and 256 MiB for every slot with a passphrase.
func Passphrase(text string) Secret { return Secret{passphrase: text} }

// NewIdentity generates an identity, which is secret, and its recipient, which is public.
func NewIdentity() (identity, recipient string, err error) {
	i, err := age.GenerateX25519Identity()
	if err != nil {
		return "", "", errs.Wrap("create identity", "", err)
	}
	return i.String(), i.Recipient().String(), nil
}

// SlotKind is the kind of secret that opens a slot.
type SlotKind string

const (
	SlotRecipient  SlotKind = "recipient"
	SlotPassphrase SlotKind = "passphrase"
)

// NewSlot describes a slot to add: exactly one of Recipient and Passphrase must be set.
type NewSlot struct {
	Label      string // informational: 1 to 128 printable bytes
	Recipient  string // "age1...", or the post-quantum kind "age1pq1..."
	Passphrase string
}

// SlotInfo describes a slot.
type SlotInfo struct {
	ID        ID
	Label     string
	Kind      SlotKind
	Recipient string // of SlotRecipient
	CreatedAt time.Time
}

const (
	maxLabel     = 128
	maxRecipient = 2048
	// The cost of a passphrase, as a power of two: the value that age itself uses. A higher
	// cost is refused, because anyone who can write config could choose it, and each step
	// doubles time and memory.
	scryptCost = 18
)

// check returns Invalid if the slot cannot be created.
func (n NewSlot) check(op string) error {
	switch {
	case n.Label == "" || len(n.Label) > maxLabel || !printable(n.Label):
		return badInput(op, "", "the label of a key must have between 1 and %d bytes, all printable", maxLabel)
	case (n.Recipient == "") == (n.Passphrase == ""):
		return badInput(op, n.Label, "a key needs either a recipient or a passphrase")
	case n.Recipient != "":
		if _, err := parseRecipient(n.Recipient); err != nil {
			return errs.Wrap(op, n.Recipient, err)
		}
	}
	return nil
}

func (n NewSlot) kind() SlotKind {
	if n.Recipient != "" {
		return SlotRecipient
	}
	return SlotPassphrase
}

func printable(s string) bool {
	return utf8.ValidString(s) && !strings.ContainsFunc(s, func(r rune) bool { return !unicode.IsPrint(r) })
}

// CheckRecipient returns Invalid if no slot can be created for the recipient.
func CheckRecipient(text string) error {
	_, err := parseRecipient(text)
	return errs.Wrap("read recipient", text, err)
}

func parseRecipient(text string) (age.Recipient, error) {
	var r age.Recipient
	var err error
	switch {
	case len(text) > maxRecipient:
		err = errors.New("too long")
	case strings.HasPrefix(text, "age1pq1"):
		r, err = age.ParseHybridRecipient(text)
	default:
		r, err = age.ParseX25519Recipient(text)
	}
	if err != nil {
		return nil, errs.New(errs.Invalid, "", "", "not an age recipient").
			WithHint("use a recipient that begins with age1, as `age-keygen -y` prints it; plugin recipients and SSH keys " +
				"are not supported")
	}

	return r, nil
}

// wrap encrypts a secret for one slot, as an age file.
func wrap(secret []byte, n NewSlot, cost int) ([]byte, error) {
	// Build the recipient.
	var to age.Recipient
	if n.Recipient != "" {
		r, err := parseRecipient(n.Recipient)
		if err != nil {
			return nil, err
		}
		to = r
	} else {
		r, err := age.NewScryptRecipient(n.Passphrase)
		if err != nil {
			return nil, errs.New(errs.Invalid, "", "", "cannot use this passphrase: %v", err)
		}
		r.SetWorkFactor(cost)
		to = r
	}

	// Encrypt the secret.
	var out bytes.Buffer
	w, err := age.Encrypt(&out, to)
	if err == nil {
		_, err = w.Write(secret)
	}
	if err == nil {
		err = w.Close()
	}
	if err != nil {
		return nil, errs.New(errs.Internal, "", "", "cannot encrypt the key for %q: %v", n.Label, err)
	}

	return out.Bytes(), nil
}

// unwrap decrypts the output of wrap with the first secret that fits, and returns nil
// without an error if none does. Damaged: a secret fits, but the content is malformed.
func unwrap(file []byte, kind SlotKind, secrets []Secret, size int) ([]byte, error) {
	for _, s := range secrets {
		r := s.decrypt(file, kind)
		if r == nil {
			continue // for another secret, or damaged: if nothing else fits, the caller reports that no secret does
		}

		secret := make([]byte, size)
		if _, err := io.ReadFull(r, secret); err != nil {
			return nil, damaged("a key slot holds a damaged key: %v", err)
		}

		if n, err := r.Read(make([]byte, 1)); n != 0 || err != io.EOF {
			return nil, damaged("a key slot holds a damaged key: it is too long")
		}

		return secret, nil
	}

	return nil, nil
}

// decrypt decrypts an age file for a passphrase or a recipient; nil if the secret is of the other kind or does not fit.
func (s Secret) decrypt(file []byte, kind SlotKind) io.Reader {
	with := s.identities
	if kind == SlotPassphrase {
		with = nil
		if i, err := age.NewScryptIdentity(s.passphrase); err == nil {
			i.SetMaxWorkFactor(scryptCost)
			with = []age.Identity{i}
		}
	}

	r, err := age.Decrypt(bytes.NewReader(file), with...)
	if err != nil {
		return nil
	}
	return r
}

// String describes the secret without revealing it.
func (s Secret) String() string {
	if s.passphrase != "" {
		return "a passphrase"
	}
	return fmt.Sprintf("%d identities", len(s.identities))
}

// GoString returns String, so that %#v does not reveal the secret either.
func (s Secret) GoString() string { return s.String() }
