package units_test

import (
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/units"
)

func TestParseDuration(t *testing.T) {
	const day = 24 * time.Hour
	for s, want := range map[string]time.Duration{
		"30m": 30 * time.Minute, "7d": 7 * day, "0.5d": day / 2, "36500d": 36500 * day, "876000h": 36500 * day,
		"": 0, "7": 0, "soon": 0, "0d": 0, "-1d": 0, "-2h": 0, "nand": 0, "1e-20d": 0,
		"36501d": -1, "100000d": -1, "1e300d": -1, "infd": -1, "900000h": -1,
	} {
		d, err := units.ParseDuration("test", s)
		hint := map[time.Duration]string{0: "use for example 30m, 2h or 7d", -1: "use at most 36500d"}[want]
		if want > 0 && (d != want || err != nil) || want <= 0 && (!errs.Is(err, errs.Invalid) || errs.HintOf(err) != hint) {
			t.Errorf("%q: %v, %v (hint %q)", s, d, err, errs.HintOf(err))
		}
	}
}
