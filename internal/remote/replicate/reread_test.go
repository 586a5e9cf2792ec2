package replicate

import (
	"net/url"
	"path/filepath"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/remote/objstore/file"
	"pando/internal/remote/repo"
	"pando/internal/testing/storetest"
)

// TestTransientFlip: a bit that flips in one answer is no damage; one that flips in two is.
func TestTransientFlip(t *testing.T) {
	store, err := file.Create(t.Context(), &url.URL{Scheme: "file", Path: filepath.Join(t.TempDir(), "remote")})
	if err != nil {
		t.Fatal(err)
	}
	_, recipient, err := repo.NewIdentity()
	if err != nil {
		t.Fatal(err)
	}
	faulty := storetest.Faulty(store)
	r, err := repo.Create(t.Context(), faulty, repo.NewSlot{Label: "test", Recipient: recipient})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if _, err := r.PutHead(t.Context(), repo.Head{Name: "v", NextSeq: 1}, ""); err != nil {
		t.Fatal(err)
	}
	seg, err := r.NewSegment(repo.NewID(), 0)
	if err != nil {
		t.Fatal(err)
	}
	f, err := seg.Add([]byte("content"), repo.Raw, len("content"))
	if err == nil {
		err = r.PutSegment(t.Context(), seg.Segment(), seg.Finish())
	}
	if err != nil {
		t.Fatal(err)
	}
	for times, want := range map[int]errs.Kind{1: "", 2: errs.Damaged} {
		reads := map[string]func() error{
			"head":  func() error { _, _, err := r.Head(t.Context(), "v"); return err },
			"frame": func() error { _, err := r.ReadFrames(t.Context(), []repo.Frame{f}); return err },
		}
		for what, read := range reads {
			faulty.Heal()
			faulty.Add(storetest.Fault{
				Match:  func(c storetest.Call) bool { return c.Op == storetest.Get },
				Times:  times,
				Change: func(_ storetest.Call, data []byte) []byte { data[len(data)-1] ^= 4; return data },
			})
			if err := read(); (want == "") != (err == nil) || err != nil && !errs.Is(err, want) {
				t.Errorf("%s after %d flips: %v", what, times, err)
			}
		}
	}
}
