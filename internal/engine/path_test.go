package engine_test

import (
	"encoding/json"
	"testing"

	"pando/internal/engine"
)

// TestPathInJSON: any bytes survive JSON, and malformed escapes are errors.
func TestPathInJSON(t *testing.T) {
	for _, p := range []engine.Path{"", "a/b c", "ünïcode", "back\\slash", "\\x41",
		"bad \xff\xfe utf8", "\\\xff\\", "x\\"} {
		b, err := json.Marshal(p)
		must(t, err)
		var got engine.Path
		must(t, json.Unmarshal(b, &got))
		if got != p {
			t.Errorf("%q becomes %s and then %q", p, b, got)
		}
	}
	for _, bad := range []string{`"\\"`, `"\\x"`, `"\\x4"`, `"\\xzz"`, `"\\y00"`, `"\\x-1"`, `7`} {
		var got engine.Path
		if err := json.Unmarshal([]byte(bad), &got); err == nil {
			t.Errorf("%s is read as %q", bad, got)
		}
	}
}
