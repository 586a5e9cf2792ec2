package cli

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"pando/internal/base/errs"

	"golang.org/x/term"
)

// Environment variables for the passphrase, if no flag names a file.
const (
	passphraseFileVariable = "PANDO_PASSPHRASE_FILE"
	passphraseVariable     = "PANDO_PASSPHRASE"
)

// secretVariables are the environment variables from which pando reads secrets or their location.
var secretVariables = []string{
	passphraseVariable, passphraseFileVariable,
	"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_SHARED_CREDENTIALS_FILE", "AWS_PROFILE",
	"AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI",
	"AWS_CONTAINER_AUTHORIZATION_TOKEN", "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
	"GOOGLE_APPLICATION_CREDENTIALS",
}

// withoutSecrets removes them from an environment: a command in a clone may be untrusted code, and must not get
// access to the remotes of the host.
func withoutSecrets(env []string) []string {
	return slices.DeleteFunc(slices.Clone(env), func(entry string) bool {
		name, _, _ := strings.Cut(entry, "=")
		return slices.Contains(secretVariables, name)
	})
}

// maxSecretBytes is the largest accepted file with a passphrase or identities: a larger one is some other file.
const maxSecretBytes = 64 << 10

// passphraseSources is a sentence for help texts.
const passphraseSources = `pando reads a passphrase from --passphrase-file, from the file named by
$PANDO_PASSPHRASE_FILE, from $PANDO_PASSPHRASE, or else from the terminal.`

// passphraseGiven reports whether a passphrase is available without asking.
func passphraseGiven(file string) bool {
	return file != "" || os.Getenv(passphraseFileVariable) != "" || os.Getenv(passphraseVariable) != ""
}

// passphrase reads a passphrase from file, the environment, or the terminal. On the terminal it prompts with what,
// twice if the passphrase is new. It returns "" if there is none and no terminal. Invalid, NotFound, Permission.
func (a *App) passphrase(ctx context.Context, op, file, what string, fresh bool) (string, error) {
	if file == "" {
		file = os.Getenv(passphraseFileVariable)
	}

	if file != "" {
		b, err := a.readSecret(op, file)
		if err != nil {
			return "", err
		}
		// An editor ends a file with a newline; nobody types one.
		return checkPassphrase(op, file, strings.TrimSuffix(strings.TrimSuffix(string(b), "\n"), "\r"))
	}

	if p, set := os.LookupEnv(passphraseVariable); set && p != "" {
		return checkPassphrase(op, "$"+passphraseVariable, p)
	}

	if !a.onTerminal() {
		return "", nil
	}

	p, err := a.askPassphrase(ctx, op, what)
	if err != nil {
		return "", err
	}

	if p, err = checkPassphrase(op, what, p); err != nil || !fresh {
		return p, err
	}

	again, err := a.askPassphrase(ctx, op, what+", again")
	if err != nil {
		return "", err
	}
	if again != p {
		return "", errs.New(errs.Invalid, op, what, "the passphrases do not match").WithHint("nothing was changed; try again")
	}

	return p, nil
}

func checkPassphrase(op, where, p string) (string, error) {
	switch {
	case p == "":
		return "", errs.New(errs.Invalid, op, where, "the passphrase is empty")
	case strings.ContainsAny(p, "\n\x00"):
		return "", errs.New(errs.Invalid, op, where,
			"a passphrase must be a single line of text").WithHint("check that this is the right file")
	}
	return p, nil
}

// readSecret reads a small file, and warns if other users can read it; "-" is standard input.
func (a *App) readSecret(op, file string) (b []byte, err error) {
	f := a.Stdin
	if file != "-" {
		if f, err = os.Open(file); err != nil {
			return nil, wrapReadError(op, file, err)
		}
		defer f.Close()
		if i, err := f.Stat(); err == nil && i.Mode().IsRegular() && i.Mode().Perm()&0o077 != 0 {
			a.printWarning("other users can read %s (mode %04o); restrict it with `chmod 600 %s`", file, i.Mode().Perm(),
				shellWord(file))
		}
	}

	if b, err = io.ReadAll(io.LimitReader(f, maxSecretBytes+1)); err != nil {
		return nil, wrapReadError(op, file, err)
	}

	if len(b) > maxSecretBytes {
		return nil, errs.New(errs.Invalid, op, file, "larger than %s, so neither a passphrase nor an identity",
			formatBytes(maxSecretBytes)).WithHint("check that this is the right file")
	}

	return b, nil
}

// wrapReadError returns the error of reading a file that the user named, with a hint.
func wrapReadError(op, file string, err error) error {
	out := &errs.Error{Kind: errs.KindOf(err), Op: op, Ref: file, Err: err}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return out.WithHint("check the path: `ls -l %s` lists the directory",
			shellWord(filepath.Dir(file)))
	case errors.Is(err, fs.ErrPermission):
		return out.WithHint("run pando as a user who can read the file; `ls -l %s` shows its permissions", shellWord(file))
	case errors.Is(err, syscall.EISDIR):
		out.Kind = errs.Invalid
		return out.WithHint("name a file in this directory; `ls -l %s` lists them", shellWord(file))
	}

	return errs.Wrap(op, file, err)
}

func (a *App) onTerminal() bool { return a.Stdin != nil && term.IsTerminal(int(a.Stdin.Fd())) }

// askPassphrase reads a line from the terminal without echo. It always restores the terminal.
func (a *App) askPassphrase(ctx context.Context, op, what string) (string, error) {
	fd := int(a.Stdin.Fd())
	before, err := term.GetState(fd)
	if err != nil {
		return "", errs.Wrap(op, "terminal", err)
	}

	fmt.Fprintf(a.Stderr, "%s: ", what)
	type answer struct {
		line []byte
		err  error
	}
	got := make(chan answer, 1) // if interrupted, the reader stays behind until the process ends
	go func() {
		line, err := term.ReadPassword(fd)
		got <- answer{line, err}
	}()

	select {
	case <-ctx.Done():
		_ = term.Restore(fd, before)
		fmt.Fprintln(a.Stderr)
		return "", (&errs.Error{Kind: errs.Canceled, Op: op, Err: errors.New("interrupted; nothing was changed")})
	case r := <-got:
		fmt.Fprintln(a.Stderr)
		if r.err != nil && !errors.Is(r.err, io.EOF) {
			return "", errs.Wrap(op, "terminal", r.err)
		}
		return string(bytes.TrimRight(r.line, "\r\n")), nil
	}
}
