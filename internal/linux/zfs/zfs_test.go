package zfs_test

import (
	"context"
	"errors"
	"reflect"
	"strings"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/linux/run"
	"pando/internal/linux/zfs"
)

func TestRows(t *testing.T) {
	for _, c := range []struct {
		text string
		want [][]string // nil: damaged
	}{
		{"", nil},
		{"a\tb\n", [][]string{{"a", "b"}}},
		{"with space\t-\nx\t\n", [][]string{{"with space", "-"}, {"x", ""}}},
		{"a\n", nil},
		{"a\tb\tc\n", nil},
		{"a\tb\n\n", nil},
	} {
		got, err := zfs.ParseRows("zfs list", c.text, 2)
		if bad := c.want == nil && c.text != ""; errs.Is(err, errs.Damaged) != bad || !reflect.DeepEqual(got, c.want) {
			t.Errorf("%q: %q, %v", c.text, got, err)
		}
	}
	for text, want := range map[string][][]string{
		"a\tb\n":             {{"a", "b"}},
		"a\tb\tc\n":          {{"a", "b\tc"}},
		"a\tb\nmore\nd\te\n": {{"a", "b\nmore"}, {"d", "e"}},
		"a\n":                nil,
	} {
		got, err := zfs.ParseTextRows("zfs list", text, 2)
		if errs.Is(err, errs.Damaged) != (want == nil) || !reflect.DeepEqual(got, want) {
			t.Errorf("%q: %q, %v", text, got, err)
		}
	}
}

func TestNumber(t *testing.T) {
	for s, want := range map[string]int64{"0": 0, "-": 0, "none": 0, "": 0, "123456789012": 123456789012} {
		if n, err := zfs.Number(s); n != want || err != nil {
			t.Errorf("%q: %d, %v", s, n, err)
		}
	}
	for _, s := range []string{"1.5K", "-1", "x", "99999999999999999999"} {
		if n, err := zfs.Number(s); !errs.Is(err, errs.Damaged) {
			t.Errorf("%q: %d, %v", s, n, err)
		}
	}
}

func TestCheckDataset(t *testing.T) {
	for _, s := range []string{"tank", "tank/pando", "tank/a b/c.d-e_f:g", "T1/0"} {
		if err := zfs.CheckDataset(s); err != nil {
			t.Errorf("%q: %v", s, err)
		}
	}
	for _, s := range []string{"", "/", "tank/", "/tank", "tank//x", "-r", "tank/-r", "1tank", "tank/..", "tank/.",
		"tank@s", "tank/x@s", "tank#b",
		"tank/%", "tank/x\ty", "tank/x\n", "tank/ x", "tank/x ", "tank/ü", "tank/" + strings.Repeat("x",
			260), "tank/\x00", "tank/a,b"} {
		if err := zfs.CheckDataset(s); !errs.Is(err, errs.Invalid) {
			t.Errorf("%q: %v", s, err)
		}
	}
	if zfs.PoolOf("tank/a/b") != "tank" || zfs.ParentOf("tank/a/b") != "tank/a" || zfs.ParentOf("tank") != "" {
		t.Error("PoolOf, ParentOf")
	}
}

// A program that does not end, and one that cannot even be killed.
func TestTimeout(t *testing.T) {
	err := zfs.RunTool(t.Context(), 50*time.Millisecond, "sleep", "1000")
	if !errs.Is(err, errs.IO) || !strings.Contains(errs.HintOf(err), "zpool status") {
		t.Errorf("%v (hint %q)", err, errs.HintOf(err))
	}
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(50*time.Millisecond, cancel)
	if err := zfs.RunTool(ctx, time.Minute, "sleep", "1000"); !errs.Is(err, errs.Canceled) {
		t.Errorf("%v", err)
	}
	before := zfs.Runs()
	if err := zfs.RunTool(ctx, time.Minute, "sleep", "1000"); !errs.Is(err, errs.Canceled) || zfs.Runs() != before {
		t.Errorf("with a context that has ended: %v, and %d programs", err, zfs.Runs()-before)
	}
	forever := make(chan struct{})
	defer close(forever)
	err = zfs.Bounded(t.Context(), 50*time.Millisecond, 50*time.Millisecond, func(context.Context) ([]byte, error) {
		<-forever
		return nil, nil
	})
	if !errs.Is(err, errs.IO) || !strings.Contains(errs.HintOf(err), "zpool status") {
		t.Errorf("%v (hint %q)", err, errs.HintOf(err))
	}
}

func TestPatiently(t *testing.T) {
	calls := 0
	said := func(stderr string) error {
		return zfs.Classify("destroy", &run.Failure{Err: errors.New("exit status 1"), Stderr: stderr})
	}
	busy := said("cannot destroy 'tank/a': dataset is busy")
	err := zfs.Patiently(t.Context(), 10*time.Second, func() error {
		if calls++; calls < 3 {
			return busy
		}
		return nil
	})
	if err != nil || calls != 3 {
		t.Errorf("%v after %d calls", err, calls)
	}
	if err := zfs.Patiently(t.Context(), time.Millisecond, func() error { return busy }); !errs.Is(err, errs.InUse) {
		t.Errorf("%v", err)
	}
	for kind, lasting := range map[errs.Kind]error{
		errs.NotFound: said("cannot open 'tank/a': dataset does not exist"),
		errs.InUse:    said("cannot destroy 'tank/a': filesystem has children"),
	} {
		calls = 0
		if err := zfs.Patiently(t.Context(), time.Hour, func() error {
			calls++
			return lasting
		}); !errs.Is(err, kind) || calls != 1 {
			t.Errorf("%v after %d calls", err, calls)
		}
	}
}

func TestAvailable(t *testing.T) {
	needZFS(t)
	p := newPool(t, 128<<20)
	if err := zfs.Available(); err != nil {
		t.Error(err)
	}
	if s, err := zfs.PoolState(p); s != "ONLINE" || err != nil {
		t.Errorf("%q, %v", s, err)
	}
	if s, err := zfs.PoolState("nosuchpool"); !errs.Is(err, errs.NotFound) ||
		!strings.Contains(errs.HintOf(err), "zpool import nosuchpool") {
		t.Errorf("%q, %v (hint %q)", s, err, errs.HintOf(err))
	}
	f, err := zfs.Features(t.Context(), p)
	if err != nil || f["lz4_compress"] != "active" || f["nosuch"] != "" {
		t.Errorf("%v, %v", f, err)
	}
	if zfs.Version() == "" {
		t.Error("no version")
	}
}
