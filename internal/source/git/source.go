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
	"strings"

	"pando/internal/base/errs"
	"pando/internal/base/mask"
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
		return "git " + mask.URL(s.URL)
	}
	return "git " + mask.URL(s.URL) + " (" + strings.Join(more, ", ") + ")"
}

// schemes are the kinds of URLs that git is given. Others, such as ext::, could run programs.
var schemes = map[string]bool{"https": true, "http": true, "ssh": true, "git": true, "file": true}

// check returns an error if git cannot be given the source. Invalid.
func (s Source) check() error {
	bad := func(format string, args ...any) *errs.Error {
		return errs.New(errs.Invalid, opImport, mask.URL(s.URL), format, args...)
	}
	u, err := url.Parse(s.URL)
	scp := !strings.Contains(s.URL, "://") && !strings.HasPrefix(s.URL, "-") &&
		strings.Contains(s.URL, ":") && !strings.Contains(s.URL, "::") &&
		!strings.Contains(strings.SplitN(s.URL, ":", 2)[0], "/")
	switch {
	case mask.HasSecret(s.URL):
		return bad("the URL contains a credential, a password or a token, which every volume would contain").
			WithHint("remove what precedes the host, and let git ask a credential helper: `git help credentials`")
	case scp:
	case err != nil || !schemes[u.Scheme]:
		return bad("not the URL of a git repository").
			WithHint("name it as https://HOST/PATH, ssh://HOST/PATH or file:///PATH")
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
