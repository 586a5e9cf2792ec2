package cli

import (
	"strings"
	"testing"

	"pando/internal/observe/doctor"
)

func TestFiguresForPeople(t *testing.T) {
	for want, f := range map[string]doctor.Figure{
		"unknown":            {Unit: doctor.Bytes},
		"1.5 KiB":            {Unit: doctor.Bytes, Low: 1536, High: 1536, Known: true},
		"1.5 KiB to 2.0 KiB": {Unit: doctor.Bytes, Low: 1536, High: 2048, Known: true},
		"2.0 MiB":            {Unit: doctor.Bytes, Low: 2 << 20, High: 2<<20 + 1, Known: true}, // no difference that is seen
		"1,234,567":          {Unit: doctor.Count, Low: 1234567, High: 1234567, Known: true},
		"999":                {Unit: doctor.Count, Low: 999, High: 999, Known: true},
		"5.2 %":              {Unit: doctor.Percent, Low: 5.2, High: 5.2, Known: true},
		"0.0 % to 40.0 %":    {Unit: doctor.Percent, Low: 0, High: 40, Known: true},
		"at least 93.3 %":    {Unit: doctor.Percent, Low: 93.3, High: 100, Known: true},
		"3.92x":              {Unit: doctor.Ratio, Low: 3.92, High: 3.92, Known: true},
		"a word":             {Unit: doctor.Text, Text: "a word", Known: true},
	} {
		if got := figureText(f); got != want {
			t.Errorf("%q, not %q", got, want)
		}
	}
}

func TestWrap(t *testing.T) {
	got := wrapText("  one two\nthree  four averyveryverylongword x", "  ", 12)
	if want := "  one two\n  three four\n  averyveryverylongword\n  x\n"; got != want {
		t.Errorf("%q", got)
	}
	if got := wrapText("", "  ", 12); got != "\n" {
		t.Errorf("%q", got)
	}
	if strings.Contains(wrapText("a b", "", 80), "  ") {
		t.Error("spaces")
	}
}
