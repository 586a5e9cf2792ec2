package quantity

import (
	"testing"
	"time"
)

func TestFormatBytes(t *testing.T) {
	for n, want := range map[int64]string{0: "0 B", 1023: "1023 B", 1024: "1.0 KiB", 1536: "1.5 KiB",
		1<<20 - 1: "1.0 MiB", 5 << 30: "5.0 GiB", 1<<63 - 1: "8.0 EiB"} {
		if got := FormatBytes(n); got != want {
			t.Errorf("%d: %q, want %q", n, got, want)
		}
	}
}

func TestFormatSpan(t *testing.T) {
	for d, want := range map[time.Duration]string{0: "0 s", 59900 * time.Millisecond: "59 s", time.Minute: "1 min",
		59 * time.Minute: "59 min", 47 * time.Hour: "47 h", 48 * time.Hour: "2 d"} {
		if got := FormatSpan(d); got != want {
			t.Errorf("%v: %q, want %q", d, got, want)
		}
	}
}
