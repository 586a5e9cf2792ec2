package doctor

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"pando/internal/base/errs"
)

// heat is what a disk's sensor reports, in thousandths of a degree Celsius, as hwmon does:
// https://docs.kernel.org/hwmon/sysfs-interface.html. A limit that the disk does not report is 0.
type heat struct {
	disk             string // "/dev/nvme0", "/dev/sda"
	now, max, crit   int64
	critical, warned bool // the disk itself says that it has passed a limit
}

// checkHeat finds disks that are so hot that they slow down.
func checkHeat(_ context.Context, _ *host, c *Report) error {
	disks := readHeat("/sys/class/hwmon")
	if len(disks) == 0 {
		return skip("no disk reports its temperature here (in a virtual machine none does; for SATA disks load the module " +
			"drivetemp)")
	}

	hottest := disks[0]
	for _, d := range disks {
		c.findHeat(d)
		if d.now > hottest.now {
			hottest = d
		}
	}

	c.measure(count("sensors", "disks with a sensor", len(disks)))
	c.Summary = fmt.Sprintf("%s with a sensor; the hottest, %s, has %s", errs.Plural(len(disks), "disk"), hottest.disk,
		degrees(hottest.now))
	return nil
}

// readHeat reads the sensors of NVMe disks, and those that the module drivetemp has. root is /sys/class/hwmon.
func readHeat(root string) (out []heat) {
	dirs, _ := filepath.Glob(filepath.Join(root, "hwmon*"))
	for _, dir := range dirs {
		driver := readText(dir, "name")
		if driver != "nvme" && driver != "drivetemp" {
			continue
		}

		d := heat{disk: diskOfSensor(dir, driver)}
		var ok bool
		if d.now, ok = readNumber(dir, "temp1_input"); !ok || d.disk == "" {
			continue // a disk that sleeps has no temperature
		}

		d.max, _ = readNumber(dir, "temp1_max")
		d.crit, _ = readNumber(dir, "temp1_crit")
		d.critical = readText(dir, "temp1_crit_alarm") == "1"
		d.warned = readText(dir, "temp1_max_alarm") == "1" || readText(dir, "temp1_alarm") == "1"
		out = append(out, d)
	}
	return out
}

// diskOfSensor returns the device of the disk that a sensor belongs to, "" if it cannot be told.
func diskOfSensor(dir, driver string) string {
	to, err := filepath.EvalSymlinks(filepath.Join(dir, "device"))
	if err != nil {
		return ""
	}

	if driver == "nvme" {
		return "/dev/" + filepath.Base(to)
	}
	blocks, err := os.ReadDir(filepath.Join(to, "block"))
	if err != nil || len(blocks) == 0 {
		return ""
	}
	return "/dev/" + blocks[0].Name()
}

// findHeat reports a disk that has reached one of its limits.
func (c *Report) findHeat(d heat) {
	f := Finding{
		Code: "heat-critical", Severity: Critical, Subject: d.disk,
		Title:    fmt.Sprintf("%s has %s, its critical temperature", d.disk, degrees(d.now)),
		Measured: []Figure{words("now", "temperature", degrees(d.now))},
		Why: "The disk slows down to cool, or turns itself off. Syncs and reads take several times longer for as long as " +
			"that lasts, and measurements show the cooling, not the disk.",
		Do: []Step{
			step("see how often and for how long it was too hot", "smartctl -a "+d.disk),
			step("improve its cooling: air flow, a heat sink, or fewer writes at once"),
		},
	}

	switch {
	case d.critical, d.crit > 0 && d.now >= d.crit:
		f.measure(words("limit", "critical from", limitText(d.crit)))
	case d.warned, d.max > 0 && d.now >= d.max:
		f.Code, f.Severity = "heat-high", Warning
		f.Title = fmt.Sprintf("%s has %s: disks slow down at such a temperature", d.disk, degrees(d.now))
		f.measure(words("limit", "too hot from", limitText(d.max)))
	default:
		return
	}

	c.find(f)
}

func degrees(thousandths int64) string { return fmt.Sprintf("%d °C", (thousandths+500)/1000) }

// limitText formats a limit, which not every disk reports.
func limitText(thousandths int64) string {
	if thousandths == 0 {
		return "the disk says so"
	}
	return strings.TrimSpace(degrees(thousandths))
}
