// Package git makes goldens of git repositories, and generations of what is new in them. Volumes cloned from such a
// golden are independent and complete repositories.
package git

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"unicode/utf8"

	"pando/internal/base/errs"
)

// Source is where a golden comes from, and how it is made. Its JSON form is stable: see FORMAT.md.
type Source struct {
	URL        string   `json:"url"`                   // https, http, ssh, git, file, or USER@HOST:PATH; has no password
	Depth      int      `json:"depth,omitempty"`       // commits of each branch; 0: all
	Submodules bool     `json:"submodules,omitempty"`  // fetch them, too
	LFS        bool     `json:"lfs,omitempty"`         // fetch the files of Git LFS, not only pointers
	Prepare    string   `json:"prepare,omitempty"`     // shell command that runs after a checkout
	PrepareKey []string `json:"prepare_key,omitempty"` // files on which its result depends; nil: on everything
	Prepared   string   `json:"prepared,omitempty"`    // SHA-256 of the command and these files when it ran last
	PreparedIn string   `json:"prepared_in,omitempty"` // ID of the volume that was filled last, for which Prepared holds
}

// fetches reports whether another source fetches the same.
func (s Source) fetches(o Source) bool {
	return s.URL == o.URL && s.Depth == o.Depth && s.Submodules == o.Submodules && s.LFS == o.LFS
}

// asks reports whether a user who asks for another source asks for the same.
func (s Source) asks(o Source) bool {
	return s.fetches(o) && s.Prepare == o.Prepare && slices.Equal(s.PrepareKey, o.PrepareKey)
}

// golden is the source of a golden.
type golden struct {
	Git *Source `json:"git,omitempty"`
}

// encode returns the source in the form in which a golden keeps it.
func (s Source) encode() (string, error) {
	b, err := json.Marshal(golden{&s})
	return string(b), errs.Wrap(opRefresh, s.URL, err)
}

// ParseSource reads the source of a golden. Invalid: it does not come from git.
func ParseSource(op, name, text string) (Source, error) {
	var g golden
	if text != "" {
		if err := json.Unmarshal([]byte(text), &g); err != nil {
			return Source{}, errs.New(errs.Damaged, op, name, "cannot read where the golden comes from: %w", err).
				WithHint("import it again with %s", errs.Run("golden import", name, "URL", errs.Param("git"), errs.Param("update")))
		}
	}
	if g.Git == nil {
		return Source{}, errs.New(errs.Invalid, op, name, "this golden was not made from a git repository").
			WithHint("import one with %s", errs.Run("golden import", "NAME", "URL", errs.Param("git")))
	}
	return *g.Git, nil
}

// Describe returns the source of a golden in words; "" if it has none that is known.
func Describe(source []byte) string {
	var g golden
	if len(source) == 0 || json.Unmarshal(source, &g) != nil || g.Git == nil {
		return ""
	}

	s, more := g.Git, []string{}
	if s.Depth > 0 {
		more = append(more, fmt.Sprintf("depth %d", s.Depth))
	}
	if s.Submodules {
		more = append(more, "submodules")
	}
	if s.LFS {
		more = append(more, "Git LFS")
	}
	if s.Prepare != "" {
		more = append(more, fmt.Sprintf("prepared by %q", s.Prepare))
	}

	if len(more) == 0 {
		return "git " + s.URL
	}
	return "git " + s.URL + " (" + strings.Join(more, ", ") + ")"
}

// schemes are the kinds of URLs that git is given. Others, such as ext::, could run programs.
var schemes = map[string]bool{"https": true, "http": true, "ssh": true, "git": true, "file": true}

// check returns an error if git cannot be given the source. Invalid.
func (s Source) check() error {
	bad := func(format string, args ...any) *errs.Error {
		return errs.New(errs.Invalid, opImport, s.URL, format, args...)
	}
	u, err := url.Parse(s.URL)
	host, _, colon := strings.Cut(s.URL, ":")
	scp := colon && !strings.Contains(s.URL, "://") && !strings.HasPrefix(s.URL, "-") &&
		!strings.Contains(s.URL, "::") && !strings.Contains(host, "/")
	switch {
	case strings.ContainsFunc(s.URL, func(c rune) bool { return c < ' ' || c == 0x7f || c == utf8.RuneError }):
		return bad("the URL has control characters, or is not UTF-8")
	case scp && errs.MaskURLs(s.URL) == s.URL:
	case !scp && (err != nil || !schemes[u.Scheme]):
		return bad("not the URL of a git repository").
			WithHint("name it as https://HOST/PATH, ssh://HOST/PATH or file:///PATH")
	case scp || containsSecret(u):
		return bad("the URL contains a password, a token or another credential, which every volume would contain").
			WithHint("remove it from the URL, and let git find it: `git help credentials`")
	}

	switch {
	case s.Depth < 0:
		return bad("the depth must be at least 1 (got %d)", s.Depth)
	case len(s.PrepareKey) > 0 && s.Prepare == "":
		return bad("files decide when %s runs, and it is missing", errs.Param("prepare"))
	}

	for _, f := range s.PrepareKey {
		if !filepath.IsLocal(f) {
			return bad("%q is not a path in the repository", f)
		}
	}

	return nil
}

// containsSecret reports whether a URL may contain a secret. Hosts take tokens as the user name, and as parameters, so
// URLs of http have neither; with ssh, the user is no secret.
func containsSecret(u *url.URL) bool {
	if u.Scheme == "http" || u.Scheme == "https" {
		return u.User != nil || u.RawQuery != "" || strings.HasSuffix(u.Host, ":") // as in user:/word@host
	}
	_, password := u.User.Password()
	return password
}

// prepareSum returns the SHA-256 of the command and of the files that it depends on, in the work tree dir. That files
// do not exist counts, too.
func (s Source) prepareSum(dir string) (string, error) {
	h := sha256.New()
	fmt.Fprintf(h, "%d %s\n", len(s.Prepare), s.Prepare)
	root, err := os.OpenRoot(dir) // follows no link to outside
	if err != nil {
		return "", err
	}
	defer root.Close()

	for _, name := range s.PrepareKey {
		fmt.Fprintf(h, "%d %s ", len(name), name)
		f, err := root.Open(name)
		if errors.Is(err, fs.ErrNotExist) {
			fmt.Fprint(h, "-\n")
			continue
		}
		if err != nil {
			return "", errs.Wrap("read", name, err)
		}

		file := sha256.New()
		_, err = io.Copy(file, f)
		f.Close()
		if err != nil {
			return "", errs.Wrap("read", name, err)
		}
		fmt.Fprintf(h, "%x\n", file.Sum(nil))
	}

	return hex.EncodeToString(h.Sum(nil)), nil
}
