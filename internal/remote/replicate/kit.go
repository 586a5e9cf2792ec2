package replicate

import (
	"context"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"pando/internal/base/errs"
	"pando/internal/linux/durable"
	"pando/internal/remote/repo"
)

const (
	opKit = "remote key export"

	kitConfig = "PANDO REPOSITORY CONFIG"
	kitKey    = "AGE ENCRYPTED FILE" // the PEM type of age's own tools

	// KitLabel begins the labels of keys of recovery kits.
	KitLabel = "recovery kit"

	maxKitBytes = 8 << 20
)

// KitRequest describes a recovery kit to export. Exactly one of Passphrase and Recipient is set.
type KitRequest struct {
	File       string
	Passphrase string // that opens the kit
	Recipient  string // age recipient whose identity opens the kit
	Force      bool   // overwrite an existing file
}

// ExportedKit is the result of ExportKit.
type ExportedKit struct {
	File string `json:"file"` // path of the kit
	Key  Key    `json:"key"`  // key that the kit holds
}

// ExportKit writes a recovery kit: a text file with instructions, a copy of the repository's config, and a key to the
// repository that a passphrase or an age identity opens. ExportKit adds the key to the repository, so that the kit
// still works after a rotation, and so that the key can be removed. The file has mode 0600 and is durable on return.
// instructions returns text that explains what the kit is and how to use it.
// Errors: Exists if there is such a file.
func ExportKit(
	ctx context.Context, r *Remote, q KitRequest, instructions func(KitFacts) string,
) (out ExportedKit, err error) {
	if _, err := os.Lstat(q.File); err == nil && !q.Force {
		return out, errs.New(errs.Exists, opKit, q.File, "file already exists").
			WithHint("choose another file name, or overwrite the file with %s", errs.Param("force"))
	}

	if i, err := os.Stat(filepath.Dir(q.File)); err != nil || !i.IsDir() {
		return out, errs.New(errs.NotFound, opKit, q.File, "the directory for this file does not exist")
	}

	identity, recipient, err := repo.NewIdentity()
	if err != nil {
		return out, err
	}

	// Make the key and seal it first: an invalid request must fail before anything is changed.
	sealed, err := repo.SealText(recipientComment+recipient+"\n"+identity+"\n",
		repo.NewSlot{Label: KitLabel, Passphrase: q.Passphrase, Recipient: q.Recipient})
	if err != nil {
		return out, err
	}

	err = r.withRepo(ctx, func(rp *repo.Repo) error {
		// Add the key to the repository.
		now := time.Now().UTC().Truncate(time.Second)
		slot := repo.NewSlot{Label: KitLabel + " " + now.Format(time.DateOnly), Recipient: recipient}
		if err := addSlot(ctx, rp, slot); err != nil {
			return err
		}

		all, err := listKeys(ctx, r, rp)
		if err != nil {
			return err
		}

		if out.Key, err = findKey(all, r.Name, recipient); err != nil {
			return err
		}

		// Write the file. If that fails, nobody has the key, so remove it again.
		err = writeKit(q, renderKit(r, rp, out.Key, now, sealed, instructions))
		if err != nil {
			if id, perr := repo.ParseID(out.Key.ID); perr == nil {
				_ = rp.RemoveSlot(context.WithoutCancel(ctx), id)
			}
		}

		return err
	})

	out.File = q.File
	return out, err
}

// writeKit writes the file completely or not at all, durably. It overwrites a file only with Force.
func writeKit(q KitRequest, text string) error {
	if q.Force {
		return errs.Wrap(opKit, q.File, durable.WriteFile(q.File, []byte(text)))
	}

	f, err := os.OpenFile(q.File, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if errors.Is(err, fs.ErrExist) {
		return errs.New(errs.Exists, opKit, q.File, "file already exists")
	}

	if err == nil {
		_, err = f.WriteString(text)
		err = errors.Join(err, f.Sync(), f.Close())
		if err == nil {
			err = durable.SyncDir(filepath.Dir(q.File))
		}
		if err != nil {
			err = errors.Join(err, os.Remove(q.File))
		}
	}

	return errs.Wrap(opKit, q.File, err)
}

// KitFacts is what the instructions in a recovery kit say about it.
type KitFacts struct {
	URL        string
	Repository string
	Key        Key // in the kit
	Made       time.Time
}

// renderKit returns the text of the kit: the instructions, and PEM blocks with the config and the key.
func renderKit(
	r *Remote, rp *repo.Repo, k Key, made time.Time, sealed []byte, instructions func(KitFacts) string,
) string {
	facts := KitFacts{URL: r.URL, Repository: rp.ID().String(), Key: k, Made: made}
	config := pem.EncodeToMemory(&pem.Block{Type: kitConfig, Bytes: rp.Config(), Headers: map[string]string{
		"URL": facts.URL, "Repository": facts.Repository,
		"Serial": fmt.Sprint(rp.Mark().Serial), "Made": made.Format(time.RFC3339),
	}})
	key := pem.EncodeToMemory(&pem.Block{Type: kitKey, Bytes: sealed})
	return instructions(facts) + "\n" + string(config) + "\n" + string(key)
}

// Kit is a parsed recovery kit.
type Kit struct {
	URL    string // where the repository was
	config []byte
	key    []byte // age file with an identity
}

// ParseKit parses a recovery kit. Only the two PEM blocks have to be as they were written. Errors: Invalid.
func ParseKit(text []byte) (Kit, error) {
	var k Kit
	rest := []byte(strings.ReplaceAll(string(text[:min(len(text), maxKitBytes)]), "\r\n", "\n"))
	for {
		var b *pem.Block
		if b, rest = pem.Decode(rest); b == nil {
			break
		}
		switch b.Type {
		case kitConfig:
			k.config, k.URL = b.Bytes, b.Headers["URL"]
		case kitKey:
			k.key = b.Bytes
		}
	}

	if len(k.config) == 0 || len(k.key) == 0 {
		return k, errs.New(errs.Invalid, opAdd, "", "this is not a recovery kit, or it is incomplete").
			WithHint("use a complete file written by %s: its last line is -----END %s-----",
				errs.Run("remote key export"), kitKey)
	}

	return k, nil
}

// Open decrypts the key of a kit with a passphrase or the text of an age identity, and changes the request to open the
// repository with that key. Errors: Permission if neither opens the kit.
func (k Kit) Open(q *AddRequest, passphrase, identity string) error {
	var secrets []repo.Secret
	if identity != "" {
		s, err := repo.Identity(identity)
		if err != nil {
			return err
		}
		secrets = append(secrets, s)
	}

	if passphrase != "" {
		secrets = append(secrets, repo.Passphrase(passphrase))
	}

	text, err := repo.OpenText(k.key, secrets...)
	if err != nil {
		return errs.New(errs.Permission, opAdd, "the recovery kit", "%w", err).
			WithHint("enter the passphrase that the kit was made with, or pass its identity with %s",
				errs.Param("identity", "FILE"))
	}

	q.Identity, q.Passphrase, q.Config, q.MustExist = text, "", k.config, true
	if q.URL == "" {
		q.URL = k.URL
	}

	return nil
}
