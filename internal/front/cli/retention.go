package cli

import (
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/units"
	"pando/internal/remote/replicate"

	"github.com/spf13/pflag"
)

// retention are the flags that say which points of a volume stay.
type retention struct {
	policy replicate.Policy
	within string
	flags  *pflag.FlagSet
}

// retentionFlags adds the flags to f.
func retentionFlags(f *pflag.FlagSet) *retention {
	r := &retention{flags: f}
	p := &r.policy
	f.IntVar(&p.Last, "keep-last", 0, "keep the newest `N` points")
	f.IntVar(&p.Hourly, "keep-hourly", 0, "keep the newest point of each of the last `N` hours that have one")
	f.IntVar(&p.Daily, "keep-daily", 0, "keep the newest point of each of the last `N` days that have one")
	f.IntVar(&p.Weekly, "keep-weekly", 0, "keep the newest point of each of the last `N` weeks that have one")
	f.IntVar(&p.Monthly, "keep-monthly", 0, "keep the newest point of each of the last `N` months that have one")
	f.IntVar(&p.Yearly, "keep-yearly", 0, "keep the newest point of each of the last `N` years that have one")
	f.StringVar(&r.within, "keep-within", "",
		"keep all points at most this `DURATION` older than the newest, for example 48h or 7d")
	return r
}

// parse returns the policy, zero if no flag says what stays. Invalid.
func (r *retention) parse(op string) (p replicate.Policy, err error) {
	for name, n := range map[string]int{
		"keep-last": r.policy.Last, "keep-hourly": r.policy.Hourly, "keep-daily": r.policy.Daily,
		"keep-weekly": r.policy.Weekly, "keep-monthly": r.policy.Monthly, "keep-yearly": r.policy.Yearly,
	} {
		if r.flags.Changed(name) && n < 1 {
			return p, errs.New(errs.Invalid, op, "--"+name, "must be at least 1 (got %d)",
				n).WithHint("remove the flag, or use a number of at least 1")
		}
	}

	p = r.policy
	if r.flags.Changed("keep-within") {
		var d time.Duration
		if d, err = units.ParseDuration(op, r.within); err != nil {
			return p, err
		}
		p.Within = d
	}

	return p, nil
}
