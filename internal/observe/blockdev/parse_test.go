package blockdev

import (
	"testing"
	"time"
)

func TestParseStat(t *testing.T) {
	s, err := parseStat("   10  1 80  2  20 3 160 4 5 6 7 8 9 240 11 12 13\n")
	if err != nil {
		t.Fatal(err)
	}
	want := Stat{
		Reads: 10, ReadBytes: 80 * 512, ReadTime: 2 * time.Millisecond, Writes: 20, WrittenBytes: 160 * 512,
		WriteTime: 4 * time.Millisecond,
		InFlight:  5, BusyTime: 6 * time.Millisecond, QueueTime: 7 * time.Millisecond,
		Discards: 8, DiscardedBytes: 240 * 512, DiscardTime: 11 * time.Millisecond, Flushes: 12,
		FlushTime: 13 * time.Millisecond,
	}
	if s != want {
		t.Errorf("%+v", s)
	}
	// Before Linux 4.18 and 5.5.
	for _, old := range []string{"1 2 3 4 5 6 7 8 9 10 11", "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15"} {
		if s, err := parseStat(old); err != nil || s.Flushes != -1 || s.Writes != 5 {
			t.Errorf("%+v %v", s, err)
		}
	}
	for _, bad := range []string{"", "1 2 3", "1 2 3 4 5 6 7 8 9 10 x"} {
		if s, err := parseStat(bad); err == nil {
			t.Errorf("%q: %+v", bad, s)
		}
	}
}

func FuzzParseStat(f *testing.F) {
	f.Add("10 1 80 2 20 3 160 4 5 6 7 8 9 240 11 12 13")
	f.Fuzz(func(t *testing.T, text string) {
		if s, err := parseStat(text); err != nil && s != (Stat{}) {
			t.Errorf("%+v with %v", s, err)
		}
	})
}

func TestChosen(t *testing.T) {
	for text, want := range map[string]string{"[none] mq-deadline": "none", "none [mq-deadline] kyber": "mq-deadline",
		"none": "none", "": ""} {
		if got := chosen(text); got != want {
			t.Errorf("%q: %q", text, got)
		}
	}
}
