package proof

import (
	"fmt"
	"strings"
	"time"

	"pando/internal/observe/blockdev"
)

// class is a kind of disk, and its limits for the duration of a sync: a write and, with a volatile cache, a flush, one
// after the other.
type class struct {
	name string
	// impossible is the time below which two commands cannot even reach the disk and return.
	impossible time.Duration
	// doubtful is the time below which the disk has a cache that survives a power failure (capacitors, a battery), or the
	// disk or a layer below it lies.
	doubtful time.Duration
}

// The figures are physical bounds, not measurements of typical disks; docs/proof.md has the sources.
var (
	spinning = class{"a spinning disk", 100 * time.Microsecond, 2 * time.Millisecond} // 15,000 rpm: a turn takes 4 ms
	ssd      = class{"a SATA or SAS SSD", 20 * time.Microsecond, 60 * time.Microsecond}
	nvme     = class{"an NVMe disk", 3 * time.Microsecond, 15 * time.Microsecond}
	slow     = class{"a card or USB disk", 50 * time.Microsecond, 200 * time.Microsecond}
	virtual  = class{"a virtual disk", 3 * time.Microsecond, 40 * time.Microsecond}
)

// classOf returns the class of a disk; false if it is not a disk.
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

// identity returns the vendor and the model of a disk.
func identity(name string) string {
	dir := "/sys/block/" + name + "/device/"
	return text(dir+"vendor") + " " + text(dir+"model")
}

// isVirtual recognises disks of hypervisors and clouds by their names.
func isVirtual(identity string) bool {
	for _, n := range []string{"QEMU", "VMware", "VBOX", "VirtualBox", "Msft", "Virtual Disk", "Google", "PersistentDisk",
		"nvme_card", "Amazon", "Elastic Block", "Xen", "Nutanix", "IBM 2145", "iSCSI", "LIO-ORG", "BlockVolume"} {
		if strings.Contains(identity, n) {
			return true
		}
	}
	return false
}

// speed checks whether syncs were faster than the disks can be.
func (j *judge) speed() {
	if j.load.Syncs == 0 {
		return
	}

	for i := range j.proof.Layers {
		p := &j.proof.Layers[i]
		x, ok := j.evidenceAt(i)
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

// tooFast compares the median of the syncs, and the mean duration of a flush, with the limits of the disk's class.
func (j *judge) tooFast(p *LayerProof, i int, c class) {
	took := time.Duration(j.load.P50 * float64(time.Second))
	flush := time.Duration(p.FlushSeconds * float64(time.Second))
	seen := ""
	if flush > 0 {
		seen = fmt.Sprintf("; its flushes took %v on average", flush.Round(time.Microsecond))
	}

	switch {
	case took > 0 && took < c.impossible && p.Result == OK:
		p.Result = Fail
		p.Words += fmt.Sprintf("; but half of the syncs took less than %v, and %s needs at least %v%s",
			max(took.Round(100*time.Nanosecond), 100*time.Nanosecond), c.name, c.impossible, seen)
		j.remedies[i] = "a layer above the disk acknowledges syncs: check its controller or its hypervisor (QEMU: " +
			"cache=unsafe)"
	case took > 0 && took < c.doubtful, flush > 0 && flush < c.doubtful/4:
		which := fmt.Sprintf("half of the syncs took less than %v", took.Round(100*time.Nanosecond))
		if took <= 0 || took >= c.doubtful {
			which = "its flushes are very quick"
		}
		word := fmt.Sprintf("%s: %s%s, which is plausible for %s only if its cache survives a power failure (capacitors, "+
			"a battery)",
			p.Name, which, seen, c.name)
		if c == virtual {
			word = fmt.Sprintf("%s: %s%s: make sure that the hypervisor passes flushes on (QEMU: not cache=unsafe), which is "+
				"not visible from inside", p.Name, which, seen)
		}
		j.words = append(j.words, word)
	}
}
