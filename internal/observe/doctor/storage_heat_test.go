package doctor

import (
	"os"
	"path/filepath"
	"testing"
)

// sensors makes a directory like /sys/class/hwmon: links to directories of devices, as the kernel makes them.
func sensors(t *testing.T, files map[string]string, links map[string]string) string {
	t.Helper()
	top := t.TempDir()
	for path, text := range files {
		path = filepath.Join(top, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
	}

	for path, to := range links {
		path = filepath.Join(top, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(to, path); err != nil {
			t.Fatal(err)
		}
	}
	return filepath.Join(top, "class/hwmon")
}

// TestHeat reads sensors laid out as Linux 6.1 does for an NVMe disk, two SATA disks with drivetemp, and a processor.
func TestHeat(t *testing.T) {
	const nvme, hot = "devices/pci/nvme/nvme0/hwmon1/", "devices/ata1/1:0:0:0/hwmon/hwmon2/"
	const asleep = "devices/ata2/2:0:0:0/"
	root := sensors(t, map[string]string{
		nvme + "name": "nvme", nvme + "temp1_input": "84850", nvme + "temp1_max": "81850", nvme + "temp1_crit": "84850",
		nvme + "temp1_alarm": "0",
		hot + "name":         "drivetemp", hot + "temp1_input": "61000", hot + "temp1_max": "60000",
		hot + "temp1_crit": "70000", hot + "temp1_crit_alarm": "0", "devices/ata1/1:0:0:0/block/sda/size": "1",
		asleep + "hwmon/hwmon3/name": "drivetemp", asleep + "block/sdb/size": "1",
		"devices/cpu/hwmon4/name": "coretemp", "devices/cpu/hwmon4/temp1_input": "99000",
	}, map[string]string{
		nvme + "device": "../../nvme0", hot + "device": "../../../1:0:0:0",
		asleep + "hwmon/hwmon3/device": "../../../2:0:0:0",
		"class/hwmon/hwmon1":           "../../" + nvme, "class/hwmon/hwmon2": "../../" + hot,
		"class/hwmon/hwmon3": "../../" + asleep + "hwmon/hwmon3", "class/hwmon/hwmon4": "../../devices/cpu/hwmon4",
	})

	got := readHeat(root)
	if len(got) != 2 || got[0].disk != "/dev/nvme0" || got[1].disk != "/dev/sda" || got[1].now != 61000 {
		t.Fatalf("%+v", got)
	}

	var r Report
	for _, d := range got {
		r.findHeat(d)
	}
	if len(r.Findings) != 2 || r.Findings[0].Code != "heat-critical" || r.Findings[0].Subject != "/dev/nvme0" ||
		r.Findings[1].Code != "heat-high" || measured(t, r.Findings[1], "limit").Text != "60 °C" {
		t.Errorf("%s", asJSON(r.Findings))
	}
}

// TestHeatLimits: a disk without limits is hot only if it says so.
func TestHeatLimits(t *testing.T) {
	for _, c := range []struct {
		heat heat
		want string
	}{
		{heat{now: 99000}, ""},
		{heat{now: 59999, max: 60000, crit: 70000}, ""},
		{heat{now: 60000, max: 60000, crit: 70000}, "heat-high"},
		{heat{now: 70000, max: 60000, crit: 70000}, "heat-critical"},
		{heat{now: 50000, warned: true}, "heat-high"},
		{heat{now: 50000, critical: true}, "heat-critical"},
	} {
		var r Report
		r.findHeat(c.heat)
		got := ""
		if len(r.Findings) > 0 {
			got = r.Findings[0].Code
		}
		if got != c.want {
			t.Errorf("%+v: %q, want %q", c.heat, got, c.want)
		}
	}
}

// TestSingleLogs: each log device that no mirror protects is reported with its pool.
func TestSingleLogs(t *testing.T) {
	const head = "  pool: tank\n state: ONLINE\nconfig:\n\n\tNAME\tSTATE\n\ttank  ONLINE\n\t  /dev/sda  ONLINE\n"
	for what, c := range map[string]struct {
		table string
		want  int
	}{
		"none":      {"", 0},
		"single":    {"\tlogs\n\t  /dev/nvme0n1p1  ONLINE\n", 1},
		"two alone": {"\tlogs\n\t  /dev/nvme0n1p1  ONLINE\n\t  /dev/nvme1n1p1  ONLINE\n", 2},
		"mirror":    {"\tlogs\n\t  mirror-1  ONLINE\n\t    /dev/nvme0n1p1  ONLINE\n\t    /dev/nvme1n1p1  ONLINE\n", 0},
		"cache":     {"\tcache\n\t  /dev/nvme0n1p1  ONLINE\n", 0},
	} {
		var r Report
		r.findSingleLogs("tank", parsePoolStatus(head+c.table, "tank").vdevs)
		if len(r.Findings) > 1 || len(r.Findings) == 1 != (c.want > 0) {
			t.Errorf("%s: %s", what, asJSON(r.Findings))
			continue
		}
		if c.want > 0 && (r.Findings[0].Code != "write-cache-log-single" ||
			measured(t, r.Findings[0], "devices").Low != float64(c.want)) {
			t.Errorf("%s: %s", what, asJSON(r.Findings))
		}
	}
}
