package cli

import (
	"errors"
	"strings"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/remote/replicate"

	"github.com/spf13/pflag"
)

func TestRetention(t *testing.T) {
	parse := func(args ...string) (replicate.Policy, error) {
		f := pflag.NewFlagSet("", pflag.ContinueOnError)
		r := retentionFlags(f)
		if err := f.Parse(args); err != nil {
			t.Fatal(err)
		}
		return r.parse("remote prune")
	}
	p, err := parse()
	if err != nil || !p.IsZero() {
		t.Errorf("nothing said: %+v, %v", p, err)
	}
	p, err = parse("--keep-last=1", "--keep-hourly=2", "--keep-daily=3", "--keep-weekly=4", "--keep-monthly=5",
		"--keep-yearly=6", "--keep-within=2d")
	if want := (replicate.Policy{Last: 1, Hourly: 2, Daily: 3, Weekly: 4, Monthly: 5, Yearly: 6,
		Within: 48 * time.Hour}); err != nil || p != want {
		t.Errorf("%+v, %v", p, err)
	}
	for _, bad := range []string{"--keep-last=0", "--keep-hourly=-1", "--keep-daily=0", "--keep-weekly=0",
		"--keep-monthly=0", "--keep-yearly=0", "--keep-within=0s", "--keep-within=x"} {
		if p, err := parse(bad); !errs.Is(err, errs.Invalid) || errs.HintOf(err) == "" {
			t.Errorf("%s: %+v, %v", bad, p, err)
		}
	}
}

func TestFileOfKey(t *testing.T) {
	k := replicate.Key{ID: "0123", Label: "rescue"}
	for _, c := range []struct {
		files string
		want  string
	}{
		{"", ""},
		{"/a", "/a"},
		{"/a rescue=/b", "/b"},
		{"rescue=/b /a", "/b"},
		{"0123=/c", "/c"},
		{"other=/d", ""},
		{"other=/d /a", "/a"},
		{"rescue=/x=y", "/x=y"},
	} {
		if got := fileOfKey(strings.Fields(c.files), k); got != c.want {
			t.Errorf("%q: %q, wanted %q", c.files, got, c.want)
		}
	}
}

func TestParseSample(t *testing.T) {
	for s, want := range map[string]float64{"100%": 100, "100": 100, "5%": 5, "0.1": 0.1, "99.9%": 99.9} {
		if got, err := parseSample(s); err != nil || got != want {
			t.Errorf("%s: %v, %v", s, got, err)
		}
	}
	for _, s := range []string{"", "0", "0%", "-1", "100.1", "101%", "x", "NaN"} {
		if got, err := parseSample(s); !errs.Is(err, errs.Invalid) {
			t.Errorf("%q: %v, %v", s, got, err)
		}
	}
}

func TestAllButLast(t *testing.T) {
	var out strings.Builder
	a := &App{Stderr: &out}
	one, two := errs.New(errs.NotFound, "push", "one", "gone"), errs.New(errs.Conflict, "push", "two",
		"taken").WithHint("wait")
	if err := a.allButLast(nil); err != nil || out.Len() > 0 {
		t.Errorf("%v, %q", err, out.String())
	}
	if err := a.allButLast(one); !errors.Is(err, one) || out.Len() > 0 {
		t.Errorf("%v, %q", err, out.String())
	}
	// Causes of one error are not errors of their own.
	inside := errs.New(errs.IO, "push", "x", "%w and %w", one, two)
	if err := a.allButLast(inside); !errors.Is(err, inside) || out.Len() > 0 {
		t.Errorf("%v, %q", err, out.String())
	}
	if err := a.allButLast(errors.Join(two, one)); err != one || out.String() != "pando: push two: taken\nhint: wait\n" {
		t.Errorf("%v, %q", err, out.String())
	}
}
