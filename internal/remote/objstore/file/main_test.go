package file_test

import (
	"bytes"
	"context"
	cryptorand "crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/remote/objstore"
	"pando/internal/remote/objstore/file"
	"pando/internal/testing/storetest"
)

// childVariable makes this program one of the children below: its value is what
// to do, the directory of a store and a number, with colons between them.
const childVariable = "PANDO_TEST_STORE_CHILD"

func TestMain(m *testing.M) {
	if what := os.Getenv(childVariable); what != "" {
		if err := child(what); err != nil {
			fmt.Fprintf(os.Stderr, "%s: %v\n", errs.KindOf(err), err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

var children = map[string]func(ctx context.Context, s objstore.Store, n int) error{
	"count":  func(ctx context.Context, s objstore.Store, n int) error { return storetest.Count(ctx, s, "heads/c", n) },
	"create": createAll,
	"write":  writeForever,
	"story":  func(ctx context.Context, s objstore.Store, _ int) error { return tell(ctx, s) },
	"puts":   putMany,
}

func child(what string) error {
	f := strings.Split(what, ":")
	if len(f) != 3 {
		return fmt.Errorf("%s=%q", childVariable, what)
	}
	n, err := strconv.Atoi(f[2])
	if err != nil {
		return err
	}
	s, err := file.Open(context.Background(), &url.URL{Scheme: "file", Path: f[1]})
	if err != nil {
		return err
	}
	return children[f[0]](context.Background(), s, n)
}

// childEnv is the environment for a child.
func childEnv(what, dir string, n int) []string {
	return append(os.Environ(), fmt.Sprintf("%s=%s:%s:%d", childVariable, what, dir, n))
}

func childCommand(t *testing.T, what, dir string, n int) *exec.Cmd {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	c := exec.Command(exe)
	c.Env = childEnv(what, dir, n)
	return c
}

// openStore makes or opens a store, and closes it when the test ends.
func openStore(t *testing.T, dir string) *file.Store {
	t.Helper()
	s, err := file.Create(t.Context(), &url.URL{Scheme: "file", Path: dir})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeStore(t, s) })
	return s.(*file.Store)
}

func closeStore(t *testing.T, s objstore.Store) {
	t.Helper()
	if err := s.(io.Closer).Close(); err != nil && !errors.Is(err, os.ErrClosed) {
		t.Error(err)
	}
}

// sealed is n bytes of which can be seen whether they are whole.
func sealed(n int) []byte {
	body := make([]byte, n)
	_, _ = cryptorand.Read(body) // never fails
	sum := sha256.Sum256(body)
	return append(sum[:], body...)
}

func whole(data []byte) bool {
	if len(data) < sha256.Size {
		return false
	}
	sum := sha256.Sum256(data[sha256.Size:])
	return bytes.Equal(sum[:], data[:sha256.Size])
}

// createAll creates n objects that others create, too, and prints which are its own.
func createAll(ctx context.Context, s objstore.Store, n int) error {
	for i := range n {
		key := fmt.Sprintf("race/%d", i)
		_, err := s.Put(ctx, key, []byte(strconv.Itoa(os.Getpid())), objstore.IfAbsent)
		if err == nil {
			fmt.Println(key)
		} else if !errs.Is(err, errs.Conflict) {
			return err
		}
	}
	return nil
}

// writeForever makes, replaces and deletes objects until it is killed.
func writeForever(ctx context.Context, s objstore.Store, n int) error {
	rnd := rand.New(rand.NewPCG(uint64(n), 0))
	for i := 0; ; i++ {
		if _, err := s.Put(ctx, fmt.Sprintf("segments/%d/%d", n, i), sealed(rnd.IntN(3<<20)),
			objstore.IfAbsent); err != nil {
			return err
		}
		if _, err := s.Put(ctx, "heads/h", sealed(rnd.IntN(100_000)), objstore.Always); err != nil {
			return err
		}
		if i > 2 {
			if err := s.Delete(ctx, fmt.Sprintf("segments/%d/%d", n, i-2)); err != nil {
				return err
			}
		}
	}
}

// putMany puts n small objects into one directory.
func putMany(ctx context.Context, s objstore.Store, n int) error {
	for i := range n {
		if _, err := s.Put(ctx, fmt.Sprintf("sessions/%d", i), sealed(1000), objstore.IfAbsent); err != nil {
			return err
		}
	}
	return nil
}

// leftovers are the files in the own directory of a store but for the lock.
func leftovers(t *testing.T, dir string) (out []string) {
	t.Helper()
	err := filepath.WalkDir(filepath.Join(dir, ".pando"), func(p string, d os.DirEntry, err error) error {
		if err == nil && !d.IsDir() && d.Name() != "lock" {
			out = append(out, p)
		}
		return err
	})
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	return out
}

// contents reads a whole store.
func contents(t *testing.T, s objstore.Store) map[string]string {
	t.Helper()
	out := map[string]string{}
	for info, err := range s.List(t.Context(), "") {
		if err != nil {
			t.Fatal(err)
		}
		data, got, err := s.Get(t.Context(), info.Key, 0, -1)
		if err != nil {
			t.Fatal(err)
		}
		if got != info {
			t.Errorf("%+v is listed as %+v", got, info)
		}
		out[info.Key] = string(data)
	}
	return out
}
