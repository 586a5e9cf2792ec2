package quantity

import (
	"testing"
	"time"

	"pando/internal/base/errs"
)

func TestParse(t *testing.T) {
	for text, want := range map[string]int64{"1": 1, "512M": 512 << 20, "1.5T": 3 << 39, "10GiB": 10 << 30, "2kb": 2048} {
		if got, err := ParseSize("test", text); err != nil || got != want {
			t.Errorf("%s: %d, %v", text, got, err)
		}
	}
	for text, want := range map[string]time.Duration{"30m": 30 * time.Minute, "7d": 168 * time.Hour,
		"0.5d": 12 * time.Hour} {
		if got, err := ParseDuration("test", text); err != nil || got != want {
			t.Errorf("%s: %s, %v", text, got, err)
		}
	}
	for text, want := range map[string]float64{"10%": 10, "5": 5, "0": 0, "99.9 %": -1} {
		got, err := ParsePercent("test", text)
		if want >= 0 && (err != nil || got != want) {
			t.Errorf("%s: %g, %v", text, got, err)
		}
	}

	for _, text := range []string{"", "x", "-1", "0", "1X", "9999999E", "NaN", "1 2"} {
		if got, err := ParseSize("test", text); !errs.Is(err, errs.Invalid) || errs.HintOf(err) == "" {
			t.Errorf("size %q: %d, %v", text, got, err)
		}
	}
	for _, text := range []string{"", "x", "-1h", "0s", "1", "1w"} {
		if got, err := ParseDuration("test", text); !errs.Is(err, errs.Invalid) || errs.HintOf(err) == "" {
			t.Errorf("duration %q: %s, %v", text, got, err)
		}
	}
	for _, text := range []string{"", "x", "-1", "100", "NaN", "1%%"} {
		if got, err := ParsePercent("test", text); !errs.Is(err, errs.Invalid) || errs.HintOf(err) == "" {
			t.Errorf("percentage %q: %g, %v", text, got, err)
		}
	}
}
