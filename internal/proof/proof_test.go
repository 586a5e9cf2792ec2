package proof_test

import (
	"fmt"
	"testing"
	"time"

	"pando/internal/proof"
	"pando/internal/testfs"
)

func TestHonest(t *testing.T) {
	for _, kind := range []string{"ext4", "xfs", "btrfs"} {
		for _, o := range []options{{}, {writers: 4}, {call: "fsync"}, {call: "dsync"}} {
			t.Run(fmt.Sprintf("%s %s %d", kind, o.call, o.writers), func(t *testing.T) {
				o.sample = 200 * time.Millisecond
				p := watch(t, testfs.New(t, kind, 128<<20).Dir(), o)
				if p.Result != proof.OK {
					t.Errorf("%s %q", p.Layer, p.Reasons)
				}
				if p.Method == proof.Tracepoints && (p.Sample == nil || p.Sample.Syncs < 10) {
					t.Errorf("sample %+v", p.Sample)
				}
			})
		}
	}
}
