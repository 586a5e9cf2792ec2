package proof

import (
	"strings"
	"testing"
	"time"

	"pando/internal/observe/blockdev"
	"pando/internal/observe/stack"

	"golang.org/x/sys/unix"
)

func TestParse(t *testing.T) {
	for stat, want := range map[string]int{
		"4711 (fio) S 4710 4711 4700 0": 4710, "1 (a ) b (c) R 77 1": 77, "": 0, "12 (x": 0, "12 (x) S": 0, "12 (x) S " +
			"y": 0, "12 (x) S -3": 0,
	} {
		if got := parseParent(stat); got != want {
			t.Errorf("%q: %d", stat, got)
		}
	}
	for info, want := range map[string]int64{
		"pos:\t0\nflags:\t0110001\nmnt_id:\t29\n": unix.O_WRONLY | unix.O_DSYNC | 0o100000, "flags:\t02\n": 2, "": 0,
		"flags: 9": 0,
	} {
		if got := parseFlags(info); got != want {
			t.Errorf("%q: %o", info, got)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add("4711 (fio) S 4710 4711", "flags:\t0110001\n", "fio")
	f.Fuzz(func(t *testing.T, stat, info, name string) {
		if n := parseParent(stat); n < 0 {
			t.Errorf("%d", n)
		}
		parseFlags(info)
		if s := byName([]string{name}); strings.Count(s, `"`) != 0 && strings.Count(s, `"`) != 2 {
			t.Errorf("%q goes into %q", name, s)
		}
	})
}

func TestPropertyFacts(t *testing.T) {
	rows := [][]string{{"sync", "disabled", "inherited from tank/a b"}, {"logbias", "throughput", "local"}}
	got := propertyFacts("zfs", "tank/a b/db", rows)
	if len(got) != 2 || got[0].result != Fail || got[0].label != "zfs tank/a b/db (sync=disabled)" ||
		got[0].remedy != "`zfs set sync=standard tank/a b`" || got[1].result != "" {
		t.Errorf("%+v", got)
	}
	if got := propertyFacts("zfs", "tank", [][]string{{"sync", "standard", "default"},
		{"logbias", "latency", "default"}}); got != nil {
		t.Errorf("%+v", got)
	}
}

// TestClasses: which disk is what.
func TestClasses(t *testing.T) {
	for _, c := range []struct {
		d    blockdev.Device
		want string
	}{
		{blockdev.Device{Kind: blockdev.Disk, Transport: "virtio", Rotational: true}, "a virtual disk"},
		{blockdev.Device{Kind: blockdev.Disk, Transport: "ata", Rotational: true}, "a spinning disk"},
		{blockdev.Device{Kind: blockdev.Disk, Transport: "scsi"}, "a SATA or SAS SSD"},
		{blockdev.Device{Kind: blockdev.Disk, Transport: "nvme"}, "an NVMe disk"},
		{blockdev.Device{Kind: blockdev.Disk, Transport: "mmc"}, "a card or USB disk"},
		{blockdev.Device{Kind: blockdev.Disk}, ""},
		{blockdev.Device{Kind: blockdev.Loop, Transport: "virtio"}, ""},
	} {
		c.d.Name = "no such disk"
		got, ok := classOf(c.d)
		if got.name != c.want || ok != (c.want != "") {
			t.Errorf("%+v: %+v", c.d, got)
		}
		if ok && (got.impossible <= 0 || got.doubtful < 3*got.impossible) {
			t.Errorf("%+v", got)
		}
	}
	if !isVirtual("QEMU QEMU HARDDISK") || isVirtual("ATA Samsung SSD 870") {
		t.Error("names of virtual disks")
	}
}

// TestTooFast: what no disk of the class can do fails, and what hardly one can is said.
func TestTooFast(t *testing.T) {
	disk := blockdev.Device{Name: "nosuch", Kind: blockdev.Disk, Transport: "ata", Rotational: true, VolatileCache: true}
	s := &stack.Stack{Path: "/x", Layers: []stack.Layer{{Kind: stack.Kind(disk.Kind), Name: disk.Name, Device: &disk}}}
	e := &Evidence{stack: s, method: Tracepoints, seconds: 1, calls: map[string]int64{"fdatasync": 1000},
		devices: map[string]evidence{
			disk.Name: {counts: counts{flush: 1000, own: 1000}, dev: newDevice(s, 0)},
		}}
	at := func(p50 time.Duration) Proof {
		return e.Judge(Load{Call: "fdatasync", Syncs: 1000, Writers: 1, P50: p50.Seconds()})
	}
	if p := at(8 * time.Millisecond); p.Result != OK || len(p.Reasons) != 1 {
		t.Errorf("%+v", p)
	}
	if p := at(time.Millisecond); p.Result != OK || len(p.Reasons) != 2 ||
		!strings.Contains(p.Reasons[1], "only if its cache survives a power failure") {
		t.Errorf("%+v", p)
	}
	if p := at(20 * time.Microsecond); p.Result != Fail || p.Layer != "nosuch" ||
		!strings.Contains(p.Reasons[0], "a spinning disk needs at least 100µs") {
		t.Errorf("%+v", p)
	}
}

func TestCount(t *testing.T) {
	for n, want := range map[int64]string{0: "0", 999: "999", 1000: "1,000", 27059: "27,059", 1234567: "1,234,567",
		-1000: "-1,000", -100: "-100"} {
		if got := count(n); got != want {
			t.Errorf("%d: %s", n, got)
		}
	}
}
