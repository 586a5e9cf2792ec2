// Package policy reads which users may do what through the service. It decides nothing by itself: a Grant has the
// decisions, and the service holds to them.
package policy

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"os/user"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/quantity"
	"pando/internal/base/tomlfile"
)

// DefaultFile is the policy of a service that gets no other file.
const DefaultFile = "/etc/pando/policy.toml"

const op = "read policy"

// DefaultMounts is where volumes of users may be mounted unless a rule says otherwise.
const DefaultMounts = "/run/pando/{uid}"

// maxFileBytes limits the size of a policy: a larger file is some other file.
const maxFileBytes = 1 << 20

// file is the form of a policy. It is stable: see docs/service.md.
type file struct {
	Rules []ruleText `toml:"rule"`
}

type ruleText struct {
	Users      []string  `toml:"users"`
	Groups     []string  `toml:"groups"`
	Goldens    []string  `toml:"goldens"`
	Publish    []string  `toml:"publish"`
	MaxVolumes *int      `toml:"max_volumes"`
	MaxBytes   string    `toml:"max_bytes"`
	MaxTTL     string    `toml:"max_ttl"`
	Mounts     *[]string `toml:"mounts"`
	SeeAll     bool      `toml:"see_all"`
	Import     bool      `toml:"import"`
}

const keysHint = "keys of a [[rule]] are users, groups, goldens, publish, max_volumes, max_bytes, " +
	"max_ttl, mounts, see_all and import"

// Policy has rules: the first one that names a user applies. It does not change.
type Policy struct {
	rules       []rule
	subordinate []idRange
}

type rule struct {
	everyone bool
	uids     []uint32
	gids     []uint32
	mounts   []string // with {uid} and {user}
	Grant
}

// Grant is what a rule allows a user.
type Grant struct {
	Rule    int      `json:"rule"`    // its number, from 1
	Goldens []string `json:"goldens"` // globs of goldens that the user may see and clone
	Publish []string `json:"publish"` // globs of goldens whose generations the user may make

	MaxVolumes int           `json:"max_volumes"` // 0: any number
	MaxBytes   int64         `json:"max_bytes"`   // 0: any number
	MaxTTL     time.Duration `json:"-"`           // 0: any
	Mounts     []string      `json:"mounts"`      // directories below which volumes may be mounted
	SeeAll     bool          `json:"see_all"`     // may see volumes of others
	Import     bool          `json:"import"`      // may import archives into the goldens of Publish
}

// idRange is a range of numbers of users.
type idRange struct{ first, count uint64 }

// subordinateFile lists the numbers that users may use in user namespaces of their own. Tests set it.
var subordinateFile = "/etc/subuid"

// subordinateIDs reads the ranges of a subordinateFile, without those of root, who needs no limits. Lines that it
// cannot read are skipped, as by newuidmap.
func subordinateIDs(text string) (out []idRange) {
	for line := range strings.Lines(text) {
		fields := strings.Split(strings.TrimSpace(line), ":")
		if len(fields) != 3 || fields[0] == "root" || fields[0] == "0" {
			continue
		}
		first, err := strconv.ParseUint(fields[1], 10, 32)
		count, cerr := strconv.ParseUint(fields[2], 10, 32)
		if err == nil && cerr == nil {
			out = append(out, idRange{first, count})
		}
	}
	return out
}

// isSubordinate reports whether a user may be another one in a user namespace.
func (p *Policy) isSubordinate(uid uint32) bool {
	return slices.ContainsFunc(p.subordinate, func(r idRange) bool {
		return uint64(uid) >= r.first && uint64(uid)-r.first < r.count
	})
}

// User is who asks.
type User struct {
	UID  uint32
	Name string   // "": it has none
	GIDs []uint32 // all groups
}

// Read reads a policy. Only root, or the user of this process, may be able to write to the file: it decides who may do
// what with root's rights. NotFound, Permission, Invalid (with the line).
func Read(name string) (*Policy, error) {
	f, err := os.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, readError(name, err)
	}
	defer f.Close()

	st, err := f.Stat()
	if err != nil {
		return nil, readError(name, err)
	}
	if !st.Mode().IsRegular() || st.Size() > maxFileBytes {
		return nil, errs.New(errs.Invalid, op, name, "not a policy: it must be a file of at most %s",
			errs.FormatBytes(maxFileBytes))
	}
	if st.Mode().Perm()&0o022 != 0 {
		return nil, errs.New(errs.Permission, op, name, "others may change it (mode %o)", st.Mode().Perm()).
			WithHint("run `chmod go-w %s`", errs.ShellWord(name))
	}
	if sys, ok := st.Sys().(*syscall.Stat_t); ok && sys.Uid != 0 && int(sys.Uid) != os.Geteuid() {
		return nil, errs.New(errs.Permission, op, name, "it belongs to user %d, who could change it", sys.Uid).
			WithHint("run `chown root %s`", errs.ShellWord(name))
	}

	text, err := io.ReadAll(io.LimitReader(f, maxFileBytes))
	if err != nil {
		return nil, readError(name, err)
	}
	p, err := parse(name, text)
	if err != nil {
		return nil, err
	}
	sub, err := os.ReadFile(subordinateFile)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, readError(subordinateFile, err)
	}
	p.subordinate = subordinateIDs(string(sub))
	return p, nil
}

func readError(name string, err error) error {
	if errors.Is(err, os.ErrNotExist) {
		return errs.New(errs.NotFound, op, name, "it does not exist").
			WithHint("create it, or omit %s: then only root may use the service", errs.Param("policy"))
	}
	return errs.Wrap(op, name, err)
}

// parse reads the text of a policy. Invalid.
func parse(name string, text []byte) (*Policy, error) {
	var f file
	if err := tomlfile.Decode(op, name, text, &f, keysHint); err != nil {
		return nil, err
	}

	p := &Policy{}
	everyone := 0
	lines := tomlfile.LinesOf(text)
	for i, t := range f.Rules {
		r, key, err := t.check()
		if err == nil && everyone > 0 {
			key, err = "users", errs.New(errs.Invalid, "", "", "it never applies: rule %d names everyone", everyone).
				WithHint("put it before that rule")
		}
		if err != nil {
			return nil, (&errs.Error{Kind: errs.Invalid, Op: op, Ref: name, Err: atLine(lines, i, key, err)}).
				WithHint("%s", errs.HintIn(err))
		}
		if r.Rule = i + 1; r.everyone {
			everyone = r.Rule
		}
		p.rules = append(p.rules, r)
	}
	return p, nil
}

// atLine adds to an error which line of a policy it is about.
func atLine(lines tomlfile.Lines, i int, key string, err error) error {
	table := fmt.Sprintf("rule.%d", i)
	if line := cmp.Or(lines[table+"."+key], lines[table]); line > 0 {
		return errs.New(errs.Invalid, "", "", "line %d: %s: %s", line, key, errs.Reason(err))
	}
	return errs.New(errs.Invalid, "", "", "rule %d: %s: %s", i+1, key, errs.Reason(err))
}

// bad returns an error about a value.
func bad(format string, args ...any) *errs.Error {
	return errs.New(errs.Invalid, "", "", format, args...)
}

// valueError adds the value to the error about it.
func valueError(value string, err error) error {
	if err == nil {
		return nil
	}
	return bad("%q is %s", value, errs.Reason(err)).WithHint("%s", errs.HintIn(err))
}

// check returns the rule of a text, or what is wrong with which key.
func (t ruleText) check() (r rule, key string, err error) {
	r.Grant = Grant{Goldens: t.Goldens, Publish: t.Publish, SeeAll: t.SeeAll, Import: t.Import}

	for _, step := range []struct {
		key string
		fn  func() error
	}{
		{"users", func() error { return t.checkUsers(&r) }},
		{"groups", func() error { return t.checkGroups(&r) }},
		{"goldens", func() error { return checkGlobs(t.Goldens) }},
		{"publish", func() error { return checkGlobs(t.Publish) }},
		{"max_volumes", func() error { return t.checkVolumes(&r) }},
		{"max_bytes", func() (err error) {
			if t.MaxBytes != "" {
				r.MaxBytes, err = quantity.ParseSize("", t.MaxBytes)
			}
			return valueError(t.MaxBytes, err)
		}},
		{"max_ttl", func() (err error) {
			if t.MaxTTL != "" {
				r.MaxTTL, err = quantity.ParseDuration("", t.MaxTTL)
			}
			return valueError(t.MaxTTL, err)
		}},
		{"mounts", func() error { return t.checkMounts(&r) }},
		{"import", func() error {
			if t.Import && len(t.Publish) == 0 {
				return bad("it allows nothing: publish names no golden").WithHint("name goldens in publish")
			}
			return nil
		}},
	} {
		if err := step.fn(); err != nil {
			return r, step.key, err
		}
	}

	return r, "", nil
}

func (t ruleText) checkUsers(r *rule) error {
	if len(t.Users)+len(t.Groups) == 0 {
		return bad("the rule names nobody").WithHint(`add users = ["NAME"] or groups = ["NAME"]`)
	}
	for _, name := range t.Users {
		if name == "*" {
			r.everyone = true
			continue
		}
		id, err := idOf(name, func() (string, error) {
			u, err := user.Lookup(name)
			if err != nil {
				return "", err
			}
			return u.Uid, nil
		})
		if err != nil {
			return bad("there is no user %q in /etc/passwd", name).
				WithHint("use the number of the user if it comes from another directory of users")
		}
		r.uids = append(r.uids, id)
	}
	return nil
}

func (t ruleText) checkGroups(r *rule) error {
	for _, name := range t.Groups {
		id, err := idOf(name, func() (string, error) {
			g, err := user.LookupGroup(name)
			if err != nil {
				return "", err
			}
			return g.Gid, nil
		})
		if err != nil {
			return bad("there is no group %q in /etc/group", name).
				WithHint("use the number of the group if it comes from another directory of groups")
		}
		r.gids = append(r.gids, id)
	}
	return nil
}

// idOf returns the number of a user or group, given as such or by its name.
func idOf(name string, lookup func() (string, error)) (uint32, error) {
	text := name
	if strings.Trim(name, "0123456789") != "" || name == "" {
		var err error
		if text, err = lookup(); err != nil {
			return 0, err
		}
	}
	n, err := strconv.ParseUint(text, 10, 32)
	if err == nil && uint32(n) == ^uint32(0) {
		err = strconv.ErrRange // stands for no user
	}
	return uint32(n), err
}

func checkGlobs(globs []string) error {
	for _, g := range globs {
		if _, err := path.Match(g, ""); err != nil || g == "" {
			return bad("the pattern %q is malformed", g).WithHint("use *, ? and [a-z]")
		}
		if strings.ContainsAny(g, "@/") {
			return bad("%q cannot be the name of a golden", g).WithHint("use names without generations, such as web-*")
		}
	}
	return nil
}

func (t ruleText) checkVolumes(r *rule) error {
	if t.MaxVolumes == nil {
		return nil
	}
	if *t.MaxVolumes < 1 {
		return bad("it must be at least 1 (got %d)", *t.MaxVolumes).WithHint("to allow no clones, omit goldens")
	}
	r.MaxVolumes = *t.MaxVolumes
	return nil
}

func (t ruleText) checkMounts(r *rule) error {
	r.mounts = []string{DefaultMounts}
	if t.Mounts != nil {
		r.mounts = *t.Mounts
	}
	for _, m := range r.mounts {
		plain := strings.NewReplacer("{uid}", "1", "{user}", "u").Replace(m)
		switch {
		case !filepath.IsAbs(m) || filepath.Clean(m) != m || m == "/":
			return bad("%q is not the absolute path of a directory below /", m)
		case strings.ContainsAny(plain, "{}*?["):
			return bad("%q has a pattern that is not supported", m).WithHint("use {uid} and {user}")
		}
	}
	return nil
}

// Rules returns how many rules there are.
func (p *Policy) Rules() int { return len(p.rules) }

// For returns what a user may do; nil: nothing, as no rule names the user. Rules for groups and for everybody leave
// out subordinate numbers: with these, one user would be thousands, each with limits of its own.
func (p *Policy) For(u User) *Grant {
	sub := p.isSubordinate(u.UID)
	for _, r := range p.rules {
		member := r.everyone ||
			slices.ContainsFunc(u.GIDs, func(g uint32) bool { return slices.Contains(r.gids, g) })
		if !slices.Contains(r.uids, u.UID) && (sub || !member) {
			continue
		}
		g := r.Grant
		g.Mounts = mountsOf(r.mounts, u)
		return &g
	}
	return nil
}

// mountsOf returns the directories that patterns stand for. One with {user} is none for a user without a name that can
// be that of a directory.
func mountsOf(patterns []string, u User) []string {
	out := []string{}
	for _, m := range patterns {
		if strings.Contains(m, "{user}") && (u.Name == "" || u.Name == "." || u.Name == ".." ||
			strings.ContainsAny(u.Name, "/\x00")) {
			continue
		}
		uid := strconv.FormatUint(uint64(u.UID), 10)
		out = append(out, strings.NewReplacer("{uid}", uid, "{user}", u.Name).Replace(m))
	}
	return out
}

// MayPublish reports whether the user may make generations of a golden.
func (g *Grant) MayPublish(golden string) bool { return matches(g.Publish, golden) }

// Sees reports whether the user may see and clone a golden. Those who publish it see it, too.
func (g *Grant) Sees(golden string) bool { return matches(g.Goldens, golden) || g.MayPublish(golden) }

func matches(globs []string, name string) bool {
	return slices.ContainsFunc(globs, func(g string) bool {
		ok, _ := path.Match(g, name) // checked when it was read
		return ok
	})
}
