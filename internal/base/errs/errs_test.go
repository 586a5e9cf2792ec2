package errs_test

import (
	"context"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"pando/internal/base/errs"
)

// declared are the kinds in the source of the package.
func declared(t *testing.T) (kinds []errs.Kind) {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), "errs.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	ast.Inspect(file, func(n ast.Node) bool {
		v, ok := n.(*ast.ValueSpec)
		if !ok {
			return true
		}
		if id, ok := v.Type.(*ast.Ident); ok && id.Name == "Kind" {
			s, err := strconv.Unquote(v.Values[0].(*ast.BasicLit).Value)
			if err != nil {
				t.Fatal(err)
			}
			kinds = append(kinds, errs.Kind(s))
		}
		return true
	})
	return kinds
}

func TestTableIsComplete(t *testing.T) {
	kinds := errs.Kinds()
	if want := declared(t); len(want) < 10 || !slices.Equal(kinds, want) {
		t.Errorf("Kinds gives %q, declared are %q", kinds, want)
	}
	exits := map[int]errs.Kind{}
	last := 0
	for _, k := range kinds {
		c := k.Codes()
		if other, taken := exits[c.Exit]; taken {
			t.Errorf("%s and %s have the same exit code %d", k, other, c.Exit)
		}
		exits[c.Exit] = k
		if k != errs.Internal && c == errs.Internal.Codes() {
			t.Errorf("%s has no codes of its own", k)
		}
		if c.Exit <= last || c.Exit > 130 || c.Exit > 13 && k != errs.Canceled {
			t.Errorf("%s: exit code %d behind %d", k, c.Exit, last)
		}
		if c.HTTP < 400 || c.HTTP > 599 || c.GRPC < 1 || c.GRPC > 16 {
			t.Errorf("%s: %+v", k, c)
		}
		last = c.Exit
	}
	if errs.Kind("no such kind").Codes() != errs.Internal.Codes() {
		t.Error("an unknown kind has other codes than internal")
	}
}

// Scripts rely on these.
func TestExitCodesAreFrozen(t *testing.T) {
	for k, want := range map[errs.Kind]int{
		"internal": 1, "invalid": 2, "not_found": 3, "exists": 4, "in_use": 5, "no_space": 6, "permission": 7,
		"unsupported": 8, "conflict": 9, "damaged": 10, "too_new": 11, "io": 12, "command_failed": 13, "canceled": 130,
	} {
		if got := k.Codes().Exit; got != want {
			t.Errorf("%s: %d, want %d", k, got, want)
		}
	}
}

func TestKindOfErrno(t *testing.T) {
	for e, want := range map[syscall.Errno]errs.Kind{
		syscall.ENOSPC: errs.NoSpace, syscall.EDQUOT: errs.NoSpace, syscall.EFBIG: errs.NoSpace,
		syscall.EPERM: errs.Permission, syscall.EACCES: errs.Permission, syscall.EROFS: errs.Permission,
		syscall.ENOENT: errs.NotFound, syscall.ENOTDIR: errs.NotFound, syscall.ENXIO: errs.NotFound,
		syscall.ENODEV: errs.NotFound,
		syscall.EEXIST: errs.Exists, syscall.ENOTEMPTY: errs.Exists,
		syscall.EBUSY: errs.InUse, syscall.ETXTBSY: errs.InUse,
		syscall.EOPNOTSUPP: errs.Unsupported, syscall.ENOSYS: errs.Unsupported,
		syscall.ENOTTY: errs.Unsupported, syscall.EXDEV: errs.Unsupported, syscall.EMLINK: errs.Unsupported,
		syscall.EIO:    errs.IO,
		syscall.EINVAL: errs.Invalid, syscall.ENAMETOOLONG: errs.Invalid, syscall.ELOOP: errs.Invalid,
		syscall.EISDIR: errs.Invalid, syscall.ENOTBLK: errs.Invalid,
		syscall.EUCLEAN: errs.Damaged, syscall.EBADMSG: errs.Damaged,
		syscall.EINTR:  errs.Canceled,
		syscall.ENOMEM: errs.Internal, syscall.EMFILE: errs.Internal, syscall.EBADF: errs.Internal,
	} {
		for _, err := range []error{
			e,
			&fs.PathError{Op: "open", Path: "/x", Err: e},
			os.NewSyscallError("open", e),
			&os.LinkError{Op: "rename", Old: "/a", New: "/b", Err: e},
			fmt.Errorf("doing: %w", fmt.Errorf("this: %w", e)),
			errors.Join(errors.New("other"), e),
			errs.Wrap("op", "ref", e),
		} {
			if got := errs.KindOf(err); got != want {
				t.Errorf("%#v is %s, want %s", err, got, want)
			}
			if !errs.Is(err, want) || errs.Is(err, "other") {
				t.Errorf("Is of %#v", err)
			}
		}
	}
}

func TestKindOf(t *testing.T) {
	inner := errs.New(errs.Damaged, "read", "x", "%w", syscall.ENOENT)
	for _, c := range []struct {
		err  error
		want errs.Kind
	}{
		{nil, ""},
		{errors.New("anything"), errs.Internal},
		{context.Canceled, errs.Canceled},
		{context.DeadlineExceeded, errs.Canceled},
		{fs.ErrNotExist, errs.NotFound},
		{fs.ErrExist, errs.Exists},
		{fs.ErrPermission, errs.Permission},
		{inner, errs.Damaged}, // what was said counts more than the number
		{fmt.Errorf("x: %w", inner), errs.Damaged},
		{errs.New(errs.Invalid, "y", "", "%w", inner), errs.Invalid}, // who knows more says more
		{&errs.Error{Err: syscall.EBUSY}, errs.InUse},
		{&errs.Error{}, errs.Internal},
	} {
		if got := errs.KindOf(c.err); got != c.want {
			t.Errorf("%v is %q, want %q", c.err, got, c.want)
		}
	}
	if errs.Is(nil, "") || errs.Is(nil, errs.Internal) {
		t.Error("nil is of a kind")
	}
}

func TestWrap(t *testing.T) {
	if err := errs.Wrap("op", "ref", nil); err != nil {
		t.Errorf("nil became %v", err)
	}
	named := errs.New(errs.Conflict, "publish", "web", "it moved").WithHint("try again")
	for _, err := range []error{named, fmt.Errorf("outer: %w", named)} {
		if got := errs.Wrap("op", "ref", err); got != err {
			t.Errorf("what has a name already became %v", got)
		}
	}
	nameless := (&errs.Error{Kind: errs.TooNew, Err: errors.New("format 9")}).WithHint("upgrade %s", "pando")
	got := errs.Wrap("read identity", "abc", fmt.Errorf("line 3: %w", nameless))
	var e *errs.Error
	if !errors.As(got, &e) || e.Op != "read identity" || e.Ref != "abc" || e.Kind != errs.TooNew ||
		e.Hint.String() != "upgrade pando" {
		t.Errorf("%#v", got)
	}
	if want := "read identity abc: line 3: format 9"; got.Error() != want {
		t.Errorf("%q, want %q", got, want)
	}
	if !errors.Is(got, nameless) {
		t.Error("the cause is lost")
	}
	withRef := &errs.Error{Kind: errs.NotFound, Ref: "web@3", Err: errors.New("no such generation")}
	got = errs.Wrap("clone", "", withRef)
	if !errors.As(got, &e) || e.Ref != "web@3" || !strings.HasPrefix(got.Error(), "clone web@3: ") {
		t.Errorf("%#v: %v", got, got)
	}
}

func TestErrorText(t *testing.T) {
	cause := errors.New("cause")
	for _, c := range []struct {
		err  errs.Error
		want string
	}{
		{errs.Error{Kind: errs.IO, Op: "clone", Ref: "web", Hint: errs.Messagef("not part of it"), Err: cause},
			"clone web: cause"},
		{errs.Error{Kind: errs.IO, Op: "clone", Err: cause}, "clone: cause"},
		{errs.Error{Kind: errs.IO, Ref: "web", Err: cause}, "web: cause"},
		{errs.Error{Kind: errs.IO, Err: cause}, "cause"},
		{errs.Error{Kind: errs.IO, Op: "clone", Ref: "web"}, "clone web"},
		{errs.Error{Kind: errs.IO}, "io"},
	} {
		if got := c.err.Error(); got != c.want {
			t.Errorf("%+v: %q, want %q", c.err, got, c.want)
		}
	}
	err := errs.New(errs.Invalid, "clone", "web", "%d of %w", 3, cause)
	if err.Error() != "clone web: 3 of cause" || !errors.Is(err, cause) {
		t.Errorf("%v", err)
	}
}

func TestHints(t *testing.T) {
	inner := errs.New(errs.InUse, "umount", "web", "busy").WithHint("end pid %d", 7)
	for _, c := range []struct {
		err  error
		want string
	}{
		{nil, ""},
		{errors.New("x"), ""},
		{inner, "end pid 7"},
		{fmt.Errorf("x: %w", inner), "end pid 7"},
		{&errs.Error{Kind: errs.IO, Op: "destroy", Err: inner}, "end pid 7"},
		{errs.New(errs.IO, "destroy", "web", "%w", inner).WithHint("outer"), "end pid 7"}, // who is nearest knows best
		{errs.New(errs.IO, "destroy", "web", "x").WithHint("outer"), "outer"},
		{errs.Wrap("clone", "",
			syscall.ENOSPC), `free space with operation "destroy" and operation "gc", or use a larger pool`},
		{errs.Wrap("clone", "", syscall.EFBIG), "the filesystem cannot hold a file of this size"},
		{errs.Wrap("clone", "", syscall.EDQUOT), "a disk quota is used up"},
		{errs.Wrap("clone", "", syscall.EROFS), "the filesystem is mounted read-only"},
		{errs.Wrap("clone", "", syscall.EINVAL), ""},
		{errs.Wrap("clone", "", &errs.Error{Kind: errs.NoSpace, Hint: errs.Messagef("its own"), Err: syscall.ENOSPC}),
			"its own"},
	} {
		if got := errs.HintOf(c.err); got != c.want {
			t.Errorf("hint of %v: %q, want %q", c.err, got, c.want)
		}
	}
	want := "run it as root"
	if os.Geteuid() == 0 {
		want = "" // that is not what is missing
	}
	for _, e := range []error{syscall.EPERM, syscall.EACCES, fs.ErrPermission} {
		if got := errs.HintOf(errs.Wrap("mount", "", e)); got != want {
			t.Errorf("hint of %v: %q, want %q", e, got, want)
		}
	}
}
