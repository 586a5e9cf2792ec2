package stack

import (
	"slices"
	"testing"
)

const status = `  pool: tank
 state: ONLINE
  scan: scrub repaired 0B in 00:00:01 with 0 errors on Sun Nov 22 00:24:02 2026
config:

	NAME                                   STATE     READ WRITE CKSUM
	tank                                   ONLINE       0     0     0
	  mirror-0                             ONLINE       0     0     0
	    /dev/sda1                          ONLINE       0     0     0
	    replacing-1                        ONLINE       0     0     0
	      /dev/sdb1                        ONLINE       0     0     0
	      /dev/sdc1                        ONLINE       0     0     0
	  mirror-1                             ONLINE       0     0     0
	    /dev/sdd1                          ONLINE       0     0     0
	    /srv/a file                        ONLINE       0     0     0
	  /dev/sde1                            ONLINE       0     0     0
	special	
	  /dev/nvme1n1p1                       ONLINE       0     0     0
	logs	
	  mirror-3                             ONLINE       0     0     0
	    /dev/nvme2n1p1                     ONLINE       0     0     0
	    /dev/nvme3n1p1                     ONLINE       0     0     0
	cache
	  /dev/nvme4n1p1                       ONLINE       0     0     0
	spares
	  /dev/sdf1                            AVAIL   

errors: No known data errors
`

func TestParseStatus(t *testing.T) {
	want := []vdev{
		{node: "/dev/sda1", group: "mirror-0"}, {node: "/dev/sdb1", group: "mirror-0"}, {node: "/dev/sdc1",
			group: "mirror-0"},
		{node: "/dev/sdd1", group: "mirror-1"}, {file: "/srv/a", group: "mirror-1"},
		{node: "/dev/sde1", group: "/dev/sde1"},
		{node: "/dev/nvme1n1p1", role: "special", group: "/dev/nvme1n1p1"},
		{node: "/dev/nvme2n1p1", role: "log", group: "mirror-3"}, {node: "/dev/nvme3n1p1", role: "log", group: "mirror-3"},
		{node: "/dev/nvme4n1p1", role: "cache", group: "/dev/nvme4n1p1"},
		{node: "/dev/sdf1", role: "spare", group: "/dev/sdf1"},
	}
	if got := parseStatus(status, "tank"); !slices.Equal(got, want) {
		t.Errorf("%+v", got)
	}
	if got := parseStatus("no pools available\n", "tank"); got != nil {
		t.Errorf("%+v", got)
	}
}

func FuzzParseStatus(f *testing.F) {
	f.Add(status, "tank")
	f.Fuzz(func(t *testing.T, text, pool string) {
		for _, v := range parseStatus(text, pool) {
			if (v.node == "") == (v.file == "") {
				t.Errorf("%+v", v)
			}
		}
	})
}
