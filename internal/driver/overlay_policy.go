package driver

import "pando/internal/base/errs"

// OverlayPolicy says whether the clones of a golden are overlays.
type OverlayPolicy string

const (
	OverlayAllowed OverlayPolicy = ""        // those for which the user asks
	OverlayNever   OverlayPolicy = "never"   // none
	OverlayDefault OverlayPolicy = "default" // all for which the user does not refuse it, where overlays are possible
)

// String returns the word for a policy that users read and write.
func (p OverlayPolicy) String() string {
	if p == OverlayAllowed {
		return "allowed"
	}
	return string(p)
}

// ParseOverlayPolicy is the reverse of String. op is the operation in errors. Invalid.
func ParseOverlayPolicy(op, s string) (OverlayPolicy, error) {
	for _, p := range []OverlayPolicy{OverlayAllowed, OverlayNever, OverlayDefault} {
		if s == p.String() {
			return p, nil
		}
	}
	return "", errs.New(errs.Invalid, op, s, "not a policy for overlays").
		WithHint("use %s, %s or %s", OverlayNever, OverlayDefault, OverlayAllowed)
}
