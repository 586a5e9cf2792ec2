package proof

import (
	"fmt"
	"strings"
	"time"

	"pando/internal/observe/blockdev"
)

// class is a kind of disk, and how fast a sync on it can be: a write and, with a
// volatile cache, a flush, one after the other.
type class struct {
	name string
	// impossible: below it not even two commands get to the disk and back, whatever it
	// does with them.
	impossible time.Duration
	// doubtful: below it the disk has a cache that outlives the power (capacitors, a
	// battery), or it does not tell the truth, or what is below it does not.
	doubtful time.Duration
}

// The figures are bounds from what the parts can do, not measurements of what they
// usually do; docs/proof.md has the sources.
var (
	spinning = class{"a spinning disk", 100 * time.Microsecond, 2 * time.Millisecond} // 15,000 rpm: a turn takes 4 ms
	ssd      = class{"a SATA or SAS SSD", 20 * time.Microsecond, 60 * time.Microsecond}
	nvme     = class{"an NVMe disk", 3 * time.Microsecond, 15 * time.Microsecond}
	slow     = class{"a card or USB disk", 50 * time.Microsecond, 200 * time.Microsecond}
	virtual  = class{"a virtual disk", 3 * time.Microsecond, 40 * time.Microsecond}
)

// classOf tells a disk's class; false if it is none.
func classOf(d blockdev.Device) (class, bool) {
	if d.Kind != blockdev.Disk {
		return class{}, false
	}

	switch {
	case d.Transport == "virtio", d.Transport == "xen", isVirtual(identity(d.Name)):
		return virtual, true
	case d.Transport == "nvme":
		return nvme, true
	case d.Transport == "mmc", d.Transport == "usb":
		return slow, true
	case d.Transport != "ata" && d.Transport != "scsi":
		return class{}, false
	case d.Rotational:
		return spinning, true
	}

	return ssd, true
}

// identity is who made a disk, and what he calls it.
func identity(name string) string {
	dir := "/sys/block/" + name + "/device/"
	return text(dir+"vendor") + " " + text(dir+"model")
}

// isVirtual tells disks of hypervisors and clouds by their names.
func isVirtual(identity string) bool {
	for _, n := range []string{"QEMU", "VMware", "VBOX", "VirtualBox", "Msft", "Virtual Disk", "Google", "PersistentDisk",
		"nvme_card", "Amazon", "Elastic Block", "Xen", "Nutanix", "IBM 2145", "iSCSI", "LIO-ORG", "BlockVolume"} {
		if strings.Contains(identity, n) {
			return true
		}
	}
	return false
}

// speed looks whether syncs were faster than the disks can be.
func (j *judge) speed() {
	if j.load.Syncs == 0 {
		return
	}

	for i := range j.proof.Layers {
		p := &j.proof.Layers[i]
		x, ok := j.at(i)
		if !ok || !p.VolatileCache || p.Role == "cache" || p.Role == "spare" {
			continue
		}
		c, known := classOf(x.dev.dev)
		if !known {
			continue
		}
		j.tooFast(p, i, c)
	}
}

// tooFast compares the median of the syncs, and what the device took for a flush, with
// what its class can do.
func (j *judge) tooFast(p *LayerProof, i int, c class) {
	took := time.Duration(j.load.P50 * float64(time.Second))
	flush := time.Duration(p.FlushSeconds * float64(time.Second))
	seen := ""
	if flush > 0 {
		seen = fmt.Sprintf("; it took %v for a flush on average", flush.Round(time.Microsecond))
	}

	switch {
	case took > 0 && took < c.impossible && p.Result == OK:
		p.Result = Fail
		p.Words += fmt.Sprintf("; but half of the syncs took less than %v, and %s cannot do one in less than %v%s",
			max(took.Round(100*time.Nanosecond), 100*time.Nanosecond), c.name, c.impossible, seen)
		j.remedies[i] = "something above the disk answers: look at its controller or its hypervisor (QEMU: cache=unsafe)"
	case took > 0 && took < c.doubtful, flush > 0 && flush < c.doubtful/4:
		which := fmt.Sprintf("half of the syncs took less than %v", took.Round(100*time.Nanosecond))
		if took <= 0 || took >= c.doubtful {
			which = "its flushes are very quick"
		}
		word := fmt.Sprintf("%s: %s%s, which for %s is only honest if its cache outlives the power (capacitors, a battery)",
			p.Name, which, seen, c.name)
		if c == virtual {
			word = fmt.Sprintf("%s: %s%s: make sure that the hypervisor passes flushes on (QEMU: not cache=unsafe): it "+
				"cannot be seen from inside", p.Name, which, seen)
		}
		j.words = append(j.words, word)
	}
}
