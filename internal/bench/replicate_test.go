package bench

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"testing"
)

func TestRecords(t *testing.T) {
	var once, again bytes.Buffer
	a, b := newRecords(7), newRecords(7)
	if err := a.writeTo(&once, 3<<20); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if err := b.writeTo(&again, 1<<20); err != nil {
			t.Fatal(err)
		}
	}
	if n := min(once.Len(), again.Len()); !bytes.Equal(once.Bytes()[:n], again.Bytes()[:n]) {
		t.Error("the same seed gives other records")
	}
	if a.digest() != sha256.Sum256(once.Bytes()) || a.size != int64(once.Len()) {
		t.Error("the digest is not of what was written")
	}
	last := int64(0)
	for line := range bytes.Lines(once.Bytes()) {
		var r struct {
			ID  int64
			UID string
			Tg  []string
		}
		if err := json.Unmarshal(line, &r); err != nil {
			t.Fatalf("%s: %v", line, err)
		}
		if r.ID <= last || r.UID == "" || len(r.Tg) == 0 {
			t.Fatalf("a record of no use: %s", line)
		}
		last = r.ID
	}
}

func TestPipeline(t *testing.T) {
	dir := t.TempDir()
	p := &pipeline{}
	if err := p.open(t.Context(), dir, 0); err != nil {
		t.Fatal(err)
	}
	r := newRecords(1)
	for _, n := range []int64{3 << 20, 100, 1 << 20} {
		if err := p.grow(t.Context(), r, n); err != nil {
			t.Fatal(err)
		}
		for range 2 { // the second has nothing to do
			if err := p.push(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
	}
	if len(p.pieces) != 3 {
		t.Errorf("%d pieces of 3", len(p.pieces))
	}
	if err := p.restore(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got, err := p.digest(t.Context()); err != nil || got != r.digest() {
		t.Errorf("it restores something else: %v", err)
	}
	// A changed byte is found.
	b, err := os.ReadFile(p.pieces[1])
	if err != nil {
		t.Fatal(err)
	}
	b[len(b)-1] ^= 1
	if err := os.WriteFile(p.pieces[1], b, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := p.forget(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := p.restore(t.Context()); err == nil {
		t.Error("a changed byte goes unnoticed")
	}
}

func TestReplicateTargets(t *testing.T) {
	of := func(name string, appends, all float64) Transfer {
		return Transfer{Name: name, Appends: []float64{appends, 9, appends}, RestoreAll: all}
	}
	r := ReplicateReport{Scenarios: []ReplicateScenario{
		{Scenario: Scenario{1 << 30, 1 << 20}, Transfers: []Transfer{of("pando", 0.05, 1)}},
		{Scenario: Scenario{10 << 30, 1 << 20}, Transfers: []Transfer{of("pando", 0.055, 2), of("litestream", 1, 30),
			of("restic", 1, 1), of("pipeline", 1, 1)}, Decode: 1, Disk: 1.9},
		{Scenario: Scenario{50 << 30, 1 << 20}, Skipped: "no room"},
	}}
	r.judge()
	var got []string
	for _, x := range r.Targets {
		got = append(got, x.Verdict)
	}
	if want := []string{Pass, Pass, Pass, Fail, Pass}; !slices.Equal(got, want) {
		t.Errorf("%q instead of %q: %+v", got, want, r.Targets)
	}
	none := ReplicateReport{Scenarios: []ReplicateScenario{{Scenario: Scenario{10 << 30, 50 << 20},
		Transfers: []Transfer{of("pando", 1, 1)}}}}
	none.judge()
	for _, x := range none.Targets {
		if x.Verdict != NotMeasured || x.Reason == "" {
			t.Errorf("a verdict without a figure: %+v", x)
		}
	}
}

func TestTreeBytes(t *testing.T) {
	dir := t.TempDir()
	if err := os.MkdirAll(filepath.Join(dir, "a", "b"), 0o700); err != nil {
		t.Fatal(err)
	}
	for name, n := range map[string]int{"x": 10, "a/y": 200, "a/b/z": 3000} {
		if err := os.WriteFile(filepath.Join(dir, name), make([]byte, n), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if n, err := treeBytes(dir); err != nil || n != 3210 {
		t.Errorf("%d bytes of 3210: %v", n, err)
	}
}
