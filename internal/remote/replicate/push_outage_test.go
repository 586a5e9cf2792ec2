package replicate

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"pando/internal/testing/storetest"
)

// TestPushInOutage: when the remote stops answering, the first volume that finds out is the last that is tried. What
// fails of one volume only does not keep the others from being pushed.
func TestPushInOutage(t *testing.T) {
	for _, c := range []struct {
		what   string
		fault  storetest.Fault
		pushed int
		said   string
	}{
		{"all is down", storetest.Fault{At: 8, Times: -1}, 0, "skipped 3 others"},
		{"one head is", storetest.Fault{Times: -1}, 3, ""},
	} {
		t.Run(c.what, func(t *testing.T) {
			w := newWorld(t)
			w.importImage("g", 64*mib, func(f *os.File) { noise(t, f, 1, 0, mib) })
			w.push("g")
			bad, err := w.open().HeadID("v1")
			if err != nil {
				t.Fatal(err)
			}
			if c.said == "" {
				c.fault.Match = func(x storetest.Call) bool { return x.Key == "heads/"+bad.String() }
			}
			for i := range 4 {
				w.clone("g", fmt.Sprintf("v%d", i+1))
				w.edit(fmt.Sprintf("v%d", i+1), func(f *os.File) { noise(t, f, uint64(i), 2*mib, 4096) })
			}
			w.store.Add(c.fault)
			w.load()
			before := len(w.store.Calls())
			out, err := w.tryPush("v1", "v2", "v3", "v4")
			if !Outage(err) || !strings.Contains(err.Error(), c.said) ||
				strings.Count(err.Error(), "not tried") != strings.Count(c.said, "not tried") {
				t.Errorf("%v", err)
			}
			if len(out) != c.pushed {
				t.Errorf("%d were pushed, not %d: %+v", len(out), c.pushed, out)
			}

			heads := map[string]bool{}
			for _, x := range w.store.Calls()[before:] {
				if strings.HasPrefix(x.Key, "heads/") {
					heads[x.Key] = true
				}
			}
			if c.said != "" && len(heads) > 2 { // that of the golden, and of the first volume
				t.Errorf("others were tried: %v", heads)
			}
		})
	}
}
