package fsprobe

import "testing"

// TestJournalAborted: the mark in the journal is found, and nothing else is taken for it.
func TestJournalAborted(t *testing.T) {
	const size = 64 << 20
	f := image(t, size, "mkfs.ext4", "-q")
	b, err := readAt(f, extOffset, extBytes)
	if err != nil {
		t.Fatal(err)
	}
	log, err := extSuper(b).journal(f, size)
	if err != nil || len(log) == 0 {
		t.Fatal(log, err)
	}
	mark := log[0].From + 35 // the lowest byte of s_errno

	check := func(what string, bytes map[int64]byte, want bool) {
		t.Helper()
		if got, err := JournalAborted(patched{f, bytes}, size); got != want || err != nil {
			t.Errorf("%s: %v, %v", what, got, err)
		}
	}
	check("new", nil, false)
	check("aborted", map[int64]byte{mark: 5}, true)
	check("no journal there", map[int64]byte{mark: 5, log[0].From: 0}, false)
	check("not ext4", map[int64]byte{mark: 5, extOffset + 56: 0}, false)

	plain := image(t, size, "mkfs.ext4", "-q", "-O", "^has_journal")
	if got, err := JournalAborted(plain, size); got || err != nil {
		t.Errorf("without a journal: %v, %v", got, err)
	}
}
