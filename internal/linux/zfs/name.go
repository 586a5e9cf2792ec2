package zfs

import (
	"strings"

	"pando/internal/base/errs"
)

// maxName is the longest name of a dataset with its snapshot, in bytes.
const maxName = 255

// CheckDataset returns Invalid unless name is the name of a dataset ("tank/a/b"), so
// that nothing else is passed to a program.
func CheckDataset(name string) error {
	bad := func(format string, args ...any) error {
		return errs.New(errs.Invalid, "dataset", name, format, args...).WithHint("use a name like tank/pando")
	}
	switch {
	case name == "":
		return bad("not the name of a dataset")
	case len(name) > maxName:
		return bad("the name of a dataset can have at most %d characters", maxName)
	case !isLetter(name[0]):
		return bad("the name of a pool must begin with a letter")
	}

	for c := range strings.SplitSeq(name, "/") {
		if c == "" || c == "." || c == ".." {
			return bad("%q is not a valid component of a dataset's name", c)
		}
		if strings.TrimSpace(c) != c || c[0] == '-' {
			return bad("a component of a dataset's name cannot begin with %q or end with a space", c[0])
		}
		if i := strings.IndexFunc(c, func(r rune) bool { return !nameRune(r) }); i >= 0 {
			return bad("the name of a dataset cannot contain %q", c[i:])
		}
	}

	return nil
}

func isLetter(c byte) bool { return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' }

func nameRune(r rune) bool {
	return r < 128 && (isLetter(byte(r)) || r >= '0' && r <= '9' || strings.ContainsRune("-_.: ", r))
}

// PoolOf returns the zpool of a dataset.
func PoolOf(dataset string) string {
	pool, _, _ := strings.Cut(dataset, "/")
	return pool
}

// ParentOf returns the parent of a dataset, "" for the root dataset of a pool.
func ParentOf(dataset string) string {
	if i := strings.LastIndexByte(dataset, '/'); i >= 0 {
		return dataset[:i]
	}
	return ""
}
