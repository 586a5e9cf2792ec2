package proof_test

import (
	"fmt"
	"testing"
	"time"

	"pando/internal/observe/proof"
	"pando/internal/testing/testfs"
)

func TestHonest(t *testing.T) {
	onDisk(t)
	for _, kind := range []string{"ext4", "xfs", "btrfs"} {
		t.Run(kind, func(t *testing.T) {
			dir := testfs.New(t, kind, 128<<20).Dir()
			runs := []options{{writers: 4}, {call: "dsync"}, {call: "grow"}}
			if kind == "ext4" || testfs.Full() {
				runs = append(runs, options{}, options{call: "fsync"}, options{call: "dsync", writers: 4})
			}
			for _, o := range runs {
				t.Run(fmt.Sprintf("%s %d", o.call, o.writers), func(t *testing.T) {
					o.sample = 100 * time.Millisecond
					p := watch(t, dir, o)
					wantOK(t, p)
					if p.Method == proof.Tracepoints && (p.Sample == nil || p.Sample.Syncs < 2) {
						t.Errorf("sample %+v", p.Sample)
					}
					if p.Method == proof.Tracepoints && p.Calls.Counted < p.Calls.Reported {
						t.Errorf("%+v", p.Calls)
					}
				})
			}
		})
	}
}
