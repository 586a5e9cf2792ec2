package syncbench

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"pando/internal/base/errs"
)

func TestReadWritten(t *testing.T) {
	a := fixture(t)
	b, err := json.Marshal(a)
	if err != nil {
		t.Fatal(err)
	}
	again, err := Parse(b, "again")
	if err != nil || !reflect.DeepEqual(a, again) {
		t.Errorf("a report does not read back as it was: %v", err)
	}
	// A newer pando of the same format has more fields.
	b = bytes.Replace(b, []byte(`"quick":`), []byte(`"mood":"calm","quick":`), 1)
	if again, err = Parse(b, "more"); err != nil || !reflect.DeepEqual(a, again) {
		t.Errorf("a field more: %v", err)
	}
}

func TestReadRefuses(t *testing.T) {
	good, err := os.ReadFile("testdata/report.json")
	if err != nil {
		t.Fatal(err)
	}
	with := func(old, with string) string {
		s := strings.Replace(string(good), old, with, 1)
		if s == string(good) {
			t.Fatalf("the fixture has no %s", old)
		}
		return s
	}
	for _, c := range []struct {
		name, text string
		kind       errs.Kind
		want       string
	}{
		{"empty", " \n", errs.Invalid, "empty"},
		{"text", "hello", errs.Invalid, "not JSON"},
		{"list", "[1,2]", errs.Invalid, "must not be of type array"},
		{"null", "null", errs.Invalid, "not a report"},
		{"other JSON", `{"a":1}`, errs.Invalid, "not a report of `pando bench sync`"},
		{"fio", `{"fio version":"fio-3.33","jobs":[]}`, errs.Invalid, "fio itself"},
		{"fio each second", `{"fio version":"fio-3.33"}{"fio version":"fio-3.33"}`, errs.Invalid, "fio itself"},
		{"error", `{"error":{"kind":"invalid"}}`, errs.Invalid, "error message"},
		{"other kind", with(`"kind":"pando bench sync"`, `"kind":"pando bench compare"`), errs.Invalid,
			`"pando bench compare"`},
		{"kind of a number", with(`"kind":"pando bench sync"`, `"kind":7`), errs.Invalid,
			"its kind must not be of type number"},
		{"no format", with(`"format":1,`, ``), errs.Damaged, "the format is missing"},
		{"newer", with(`"format":1,`, `"format":2,`), errs.TooNew, "format 2; this pando reads formats up to 1"},
		{"newer, other fields", `{"kind":"pando bench sync","format":9,"runs":"elsewhere"}`, errs.TooNew, "format 9"},
		{"format 0", with(`"format":1,`, `"format":0,`), errs.Damaged, "unknown format"},
		{"format 1.5", with(`"format":1,`, `"format":1.5,`), errs.Damaged, "unknown format"},
		{"half", string(good[:len(good)/2]), errs.Damaged, "ends in the middle"},
		{"two", string(good) + string(good), errs.Invalid, "after top-level value"},
		{"notes in it", "pando: cleaned up\n" + string(good), errs.Invalid, "not JSON"},
		{"no runs", `{"kind":"pando bench sync","format":1,"verdict":{"result":"PASS"}}`, errs.Damaged, "no runs"},
		{"no verdict", with(`"result":"PASS"`, `"result":"MAYBE"`), errs.Damaged, `"MAYBE"`},
		{"a pass that is none", with(`"method":"tracepoints","result":"ok"`, `"method":"tracepoints","result":"fail"`),
			errs.Damaged, "the proof of run 1"},
		{"a strange proof", with(`"method":"tracepoints","result":"ok"`, `"method":"tracepoints","result":"hm"`),
			errs.Damaged, `"hm"`},
		{"negative", with(`"syncs_per_second":`, `"syncs_per_second":-`), errs.Damaged, "run 1"},
		{"too large", with(`"p50":`, `"p50":1e200,"x":`), errs.Damaged, "is out of range"},
		{"overflow", with(`"p50":`, `"p50":1e999,"x":`), errs.Invalid, "must not be of type number"},
		{"percentiles decrease", with(`"p95":`, `"p95":1e-9,"x":`), errs.Damaged, "percentiles decrease"},
		{"histogram falls", with(`"histogram":[`, `"histogram":[{"value":9,"count":1},`), errs.Damaged, "follows"},
		{"time goes back", with(`"timeline":[`, `"timeline":[{"at":99,"length":1},`), errs.Damaged, "follows"},
		{"a time line that stands", with(`"length":`, `"length":0,"x":`), errs.Damaged, "time line"},
		{"a stall that ends before", with(`"stalls":[`, `"stalls":[{"from":2,"to":1},`), errs.Damaged, "stall ends"},
		{"no time", with(`"writers":1,"seconds":30`, `"writers":1,"seconds":0,"x":30`), errs.Damaged, "took no time"},
		{"runs of text", with(`"runs":[`, `"runs":["x",`), errs.Invalid, "its runs must not be of type string"},
	} {
		_, err := Parse([]byte(c.text), "x.json")
		if errs.KindOf(err) != c.kind || !strings.Contains(err.Error(), c.want) || errs.HintOf(err) == "" {
			t.Errorf("%s: %v (%s; hint: %s), not %s, %q", c.name, err, errs.KindOf(err), errs.HintOf(err), c.kind, c.want)
		}
	}
	dir := t.TempDir()
	if _, err := Read(filepath.Join(dir, "none")); !errs.Is(err, errs.NotFound) {
		t.Errorf("no file: %v", err)
	}
	if _, err := Read(dir); !errs.Is(err, errs.Invalid) || !strings.Contains(err.Error(), "directory") {
		t.Errorf("a directory: %v", err)
	}
}

// FuzzParse: whatever is read as a report can be compared and shown.
func FuzzParse(f *testing.F) {
	// A small one, in which the fuzzer finds its way sooner.
	r := fixture(f)
	r.Runs = r.Runs[:1]
	x := &r.Runs[0]
	x.Timeline, x.Sync.Histogram, x.Write.Histogram, x.Stalls = x.Timeline[:3], x.Sync.Histogram[:3],
		x.Write.Histogram[:2], x.Stalls[:1]
	r.Target = &Target{P99: 0.001, Steps: []Step{{Writers: 1, SyncsPerSecond: 5, P99: 1, Keeps: true}}}
	small, err := json.Marshal(r)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(small)
	f.Add(small[:len(small)/2])
	f.Add([]byte(`{"kind":"pando bench sync","format":1,"runs":[{"seconds":1,"proof":{"result":"unknown"}}],` +
		`"verdict":{"result":"FAIL"}}`))
	other := fixture(f)
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := Parse(b, "x")
		if err != nil {
			if k := errs.KindOf(err); k != errs.Invalid && k != errs.Damaged && k != errs.TooNew {
				t.Fatalf("%s: %v", k, err)
			}
			return
		}
		c, err := Compare(r, other, "A", "B", true)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := json.Marshal(c); err != nil { // NaN and infinities cannot be
			t.Fatalf("%v: %+v", err, c)
		}
		page, err := HTML(r)
		if err != nil {
			t.Fatal(err)
		}
		if bytes.Contains(page, []byte("NaN")) && !bytes.Contains(b, []byte("NaN")) || bytes.Contains(page, []byte("Inf")) &&
			!bytes.Contains(b, []byte("Inf")) {
			t.Fatal("the page has a figure that is not a number")
		}
	})
}

// TestFrozen: a report of format 1, as `pando bench sync` has printed it, is read for ever,
// and whole: a field that goes or is renamed needs a new format.
func TestFrozen(t *testing.T) {
	b, err := os.ReadFile("testdata/format-1.json")
	if err != nil {
		t.Fatal(err)
	}
	r, err := Parse(b, "format-1.json")
	if err != nil {
		t.Fatal(err)
	}
	again, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	var was, is any
	if err := errors.Join(json.Unmarshal(b, &was), json.Unmarshal(again, &is)); err != nil {
		t.Fatal(err)
	}
	for _, s := range missing("", was, is) {
		t.Errorf("what it had is not there or another: %s", s)
	}
	if r.Target == nil || len(r.Runs) == 0 || len(r.Runs[0].Timeline) == 0 || len(r.Runs[0].Proof.Layers) == 0 {
		t.Errorf("it does not have what it takes: %+v", r)
	}
}

// missing lists what a has and b has not, or otherwise.
func missing(path string, a, b any) (out []string) {
	switch x := a.(type) {
	case map[string]any:
		y, ok := b.(map[string]any)
		if !ok {
			return []string{path}
		}
		for k, v := range x {
			out = append(out, missing(path+"."+k, v, y[k])...)
		}
	case []any:
		y, ok := b.([]any)
		if !ok || len(y) != len(x) {
			return []string{path}
		}
		for i, v := range x {
			out = append(out, missing(fmt.Sprintf("%s[%d]", path, i), v, y[i])...)
		}
	default:
		if !reflect.DeepEqual(a, b) {
			return []string{path}
		}
	}
	return out
}
