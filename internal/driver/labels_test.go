package driver_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"strings"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/driver"
)

func labels(t *testing.T, words ...string) driver.Labels {
	t.Helper()
	l, err := driver.ParseLabels("test", words)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func TestLabelLimits(t *testing.T) {
	long := strings.Repeat("é", driver.MaxLabelValueChars)
	for _, word := range []string{"a=", "A=b=c", "0a.b_c/d-e=x", strings.Repeat("k", driver.MaxLabelKeyBytes) + "=v",
		"k=" + long, "k= a \"b\" <c> \\ '"} {
		l := labels(t, word)
		key, value, _ := strings.Cut(word, "=")
		if got := l.Map(); len(got) != 1 || got[key] != value {
			t.Errorf("%q became %v", word, got)
		}
	}

	for _, word := range []string{"", "a", "=b", ".a=b", "-a=b", "a b=c", "é=b", strings.Repeat("k",
		driver.MaxLabelKeyBytes+1) + "=v", "k=" + long + "x", "k=a\nb", "k=\x1f", "k=\x7f", "k=\u2028", "k=\xff"} {
		if _, err := driver.ParseLabels("test", []string{word}); !errs.Is(err, errs.Invalid) {
			t.Errorf("%q: %v", word, err)
		}
	}
	if _, err := driver.ParseLabels("test", []string{"a=1", "a=2"}); !errs.Is(err, errs.Invalid) {
		t.Errorf("two values of a key: %v", err)
	}
}

// TestLabelsFit: whatever labels are accepted, their JSON has the size that an identity has room for.
func TestLabelsFit(t *testing.T) {
	for _, value := range []string{"v", "<", "é", strings.Repeat("<", driver.MaxLabelValueChars)} {
		all := map[string]string{}
		for i := 0; ; i++ {
			all[fmt.Sprint("k", i)] = value
			l, err := driver.NewLabels("test", all)
			if err != nil {
				if !errs.Is(err, errs.Invalid) || i == 0 {
					t.Errorf("%d labels: %v", i+1, err)
				}
				break
			}
			if b, err := json.Marshal(l); err != nil || len(b) > driver.MaxLabelsBytes || i >= driver.MaxLabels {
				t.Fatalf("%d labels have %d bytes: %v", i+1, len(b), err)
			}
		}
	}
}

func TestLabelsChange(t *testing.T) {
	l := labels(t, "b=2", "a=1")
	if l != labels(t, "a=1", "b=2") || l.String() != "a=1, b=2" {
		t.Errorf("%s", l)
	}

	next, err := l.With("test", map[string]string{"a": "3", "c": ""}, "b", "nothing")
	if err != nil || next.String() != "a=3, c=" || l.String() != "a=1, b=2" {
		t.Errorf("%s became %s, %v", l, next, err)
	}

	none, err := next.With("test", nil, "a", "c")
	if err != nil || none != (driver.Labels{}) || none.Text() != "" || none.String() != "" {
		t.Errorf("%q, %v", none.Text(), err)
	}
}

func TestLabelsAsJSON(t *testing.T) {
	for _, words := range [][]string{nil, {"a=1"}, {"b=\"é\" <&>", "a/b=\\"}} {
		l := labels(t, words...)
		b, err := json.Marshal(l)
		if err != nil {
			t.Fatal(err)
		}
		var back driver.Labels
		if err := json.Unmarshal(b, &back); err != nil || back != l || driver.StoredLabels(l.Text()) != l {
			t.Errorf("%s became %s, %v", l.Text(), back.Text(), err)
		}
		var plain map[string]string
		if err := json.Unmarshal(b, &plain); err != nil || !maps.Equal(plain, l.Map()) {
			t.Errorf("%s: %v, %v", b, plain, err)
		}
	}

	var l driver.Labels
	for _, bad := range []string{`{"a":1}`, `[]`, `"a"`} {
		if json.Unmarshal([]byte(bad), &l) == nil {
			t.Errorf("%s was read as %s", bad, l.Text())
		}
	}
}

func TestLabelSelector(t *testing.T) {
	have := labels(t, "team=search", "env=a*", "empty=", "path=x/y")
	for text, want := range map[string]bool{
		"": true, "team": true, "team=search": true, "team=s*": true, "team=s?arch": true, "team=": false,
		"team=ads": false, "stage": false, "stage=": false, "empty": true, "empty=": true, "env=a*": true, "path=*": false,
		"path=x/*": true, "team=search env": true, "team=search stage": false, "team=ads team=search": true,
		"team=ads team=search stage": false, "team=ads env": false,
	} {
		s, err := driver.ParseLabelSelector("test", strings.Fields(text)...)
		if err != nil || s.Matches(have) != want || s.Matches(driver.Labels{}) != (text == "") {
			t.Errorf("%q: %v, %v", text, s.Matches(have), err)
		}
		if s.String() != strings.Join(strings.Fields(text), ", ") || s.IsZero() != (text == "") {
			t.Errorf("%q is shown as %q", text, s)
		}
	}
	for _, bad := range []string{"", "=x", "a b", "a=["} {
		if _, err := driver.ParseLabelSelector("test", bad); !errs.Is(err, errs.Invalid) {
			t.Errorf("%q: %v", bad, err)
		}
	}
}
