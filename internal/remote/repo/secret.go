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

// Secret is what opens a repository: an identity of age, or a passphrase. The zero
// value opens nothing. It stays in memory until the Repo is closed and garbage
// collected: Go's strings cannot be wiped.
type Secret struct {
	identities []age.Identity
	passphrase string
}

// Identity reads identities as age-keygen writes them ("AGE-SECRET-KEY-1...", one a
// line, comments and blank lines between). Invalid if there is none, or one of a
// kind that slots are not made for (plugins, SSH).
func Identity(text string) (Secret, error) {
	// The errors of age may cite the line, which is a secret: not repeated here.
	identities, err := age.ParseIdentities(strings.NewReader(text))
	if err != nil {
		return Secret{}, errs.New(errs.Invalid, "read identity", "", "not an age identity").
			WithHint("create an identity with `age-keygen`: it is a line that begins with AGE-SECRET-KEY-1")
	}
	return Secret{identities: identities}, nil
}

// Passphrase is a secret of words. Trying it costs about a second and 256 MiB for
// every slot that has one, on purpose.
func Passphrase(text string) Secret { return Secret{passphrase: text} }

// NewIdentity makes an identity, the secret, and its recipient, which is public.
func NewIdentity() (identity, recipient string, err error) {
	i, err := age.GenerateX25519Identity()
	if err != nil {
		return "", "", errs.Wrap("create identity", "", err)
	}
	return i.String(), i.Recipient().String(), nil
}

// SlotKind is what opens a slot.
type SlotKind string

const (
	SlotRecipient  SlotKind = "recipient"
	SlotPassphrase SlotKind = "passphrase"
)

// NewSlot asks for one more way to open a repository: exactly one of Recipient and
// Passphrase is set.
type NewSlot struct {
	Label      string // for people: 1 to 128 bytes, printable
	Recipient  string // "age1...", also the post-quantum kind "age1pq1..."
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
	// The cost of a passphrase, as a power of two: what age itself uses. More is not
	// tried, since it is from who may write config: each step doubles time and memory.
	scryptCost = 18
)

// check is Invalid if the slot cannot be made.
func (n NewSlot) check(op string) error {
	switch {
	case n.Label == "" || len(n.Label) > maxLabel || !printable(n.Label):
		return badInput(op, "", "the label of a key must have between 1 and %d bytes, all printable", maxLabel)
	case (n.Recipient == "") == (n.Passphrase == ""):
		return badInput(op, n.Label, "a key needs either a recipient or a passphrase")
	case n.Recipient != "":
		if _, err := parseRecipient(n.Recipient); err != nil {
			return errs.Wrap("read recipient", n.Recipient, err)
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

// CheckRecipient is Invalid if no slot can be made for the recipient.
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
			WithHint("use a recipient that begins with age1, as `age-keygen -y` prints it; plugin recipients and SSH keys are not supported")
	}

	return r, nil
}

// wrap encrypts a secret for one slot, as a whole age file.
func wrap(secret []byte, n NewSlot, cost int) ([]byte, error) {
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

// unwrap opens what wrap made, if one of the secrets can: otherwise nil without an
// error. Damaged: a secret fits, but not the rest.
func unwrap(file []byte, kind SlotKind, secrets []Secret, size int) ([]byte, error) {
	for _, s := range secrets {
		var with []age.Identity
		switch {
		case kind == SlotRecipient:
			with = s.identities
		case s.passphrase != "":
			i, err := age.NewScryptIdentity(s.passphrase)
			if err != nil {
				continue
			}
			i.SetMaxWorkFactor(scryptCost)
			with = []age.Identity{i}
		}

		if len(with) == 0 {
			continue
		}

		r, err := age.Decrypt(bytes.NewReader(file), with...)
		if err != nil {
			continue // another's, or broken: who has no other key is told that none fits
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

// String does not show the secret.
func (s Secret) String() string {
	if s.passphrase != "" {
		return "a passphrase"
	}
	return fmt.Sprintf("%d identities", len(s.identities))
}

// GoString neither.
func (s Secret) GoString() string { return s.String() }
