package service

import (
	"bufio"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"os"
	"strings"
	"sync"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
)

// Tokens are the tokens of a service: a name and a hash of each. They are random, so that a fast hash is enough. It is
// safe for concurrent use.
type Tokens struct {
	path string

	mu     sync.RWMutex
	hashes map[string][sha256.Size]byte
}

// Reload reads the file again. If it cannot, the tokens stay as they are. Errors are those of ReadTokens.
func (t *Tokens) Reload() error {
	now, err := ReadTokens(t.path)
	if err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.hashes = now.hashes
	return nil
}

// tokenBytes is how much chance a token has.
const tokenBytes = 32

// tokenPrefix marks a token, so that programs that look for secrets find it.
const tokenPrefix = "pando_"

// ReadTokens reads a file with a line "NAME HASH" for each token. Only its owner may read it. NotFound, Invalid,
// Permission.
func ReadTokens(path string) (*Tokens, error) {
	const op = "read tokens"
	f, err := os.Open(path)
	if err != nil {
		return nil, errs.Wrap(op, path, err)
	}
	defer f.Close()

	info, err := f.Stat()
	if err != nil {
		return nil, errs.Wrap(op, path, err)
	}
	if info.Mode().Perm()&0o077 != 0 {
		return nil, errs.New(errs.Permission, op, path, "others may read or change it (mode %o)", info.Mode().Perm()).
			WithHint("run `chmod 600 %s`", errs.ShellWord(path))
	}

	t := &Tokens{path: path, hashes: map[string][sha256.Size]byte{}}
	lines := bufio.NewScanner(f)
	for n := 1; lines.Scan(); n++ {
		line := strings.TrimSpace(lines.Text())
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		name, hash, ok := strings.Cut(line, " ")
		b, err := hex.DecodeString(strings.TrimPrefix(strings.TrimSpace(hash), "sha256:"))
		if !ok || err != nil || len(b) != sha256.Size || ref.CheckName(op, name) != nil {
			return nil, errs.New(errs.Invalid, op, path, "line %d is not a name and a hash", n).
				WithHint("add tokens with %s", errs.Run("serve token", "NAME", errs.Param("token-file", errs.ShellWord(path))))
		}
		t.hashes[name] = [sha256.Size]byte(b)
	}
	if err := lines.Err(); err != nil {
		return nil, errs.Wrap(op, path, err)
	}
	return t, nil
}

// AddToken makes a token, adds its hash to the file, and returns it. Exists, Invalid, Permission.
func AddToken(path string, name ref.Name) (token string, err error) {
	const op = "add token"
	if _, err := os.Lstat(path); err == nil {
		known, err := ReadTokens(path)
		if err != nil {
			return "", err
		}
		if _, taken := known.hashes[name.String()]; taken {
			return "", errs.New(errs.Exists, op, name.String(), "this name has a token already").
				WithHint("choose another name, or remove its line from %s", path)
		}
	}

	f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return "", errs.Wrap(op, path, err)
	}
	defer f.Close()

	secret := make([]byte, tokenBytes)
	_, _ = rand.Read(secret) // never fails
	token = tokenPrefix + base64.RawURLEncoding.EncodeToString(secret)
	hash := sha256.Sum256([]byte(token))
	if _, err := fmt.Fprintf(f, "%s sha256:%x\n", name, hash); err != nil {
		return "", errs.Wrap(op, path, err)
	}
	return token, errs.Wrap(op, path, f.Sync())
}

// has reports whether there is a token with a name.
func (t *Tokens) has(name string) bool {
	t.mu.RLock()
	defer t.mu.RUnlock()
	_, ok := t.hashes[name]
	return ok
}

// find returns the name of a token. It compares with all, in the same time whatever they have in common.
func (t *Tokens) find(token string) (name string, ok bool) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	hash := sha256.Sum256([]byte(token))
	for n, h := range t.hashes {
		if subtle.ConstantTimeCompare(h[:], hash[:]) == 1 {
			name, ok = n, true
		}
	}
	return name, ok
}
