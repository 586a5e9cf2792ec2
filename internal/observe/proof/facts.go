package proof

import (
	"context"
	"fmt"
	"os"
	"strings"

	"pando/internal/linux/zfs"
	"pando/internal/observe/blockdev"
	"pando/internal/observe/stack"
)

// fact is a property of a layer that is known without a run.
type fact struct {
	layer  int    // in the stack
	result Result // Fail, Unknown; "": only a remark
	label  string // the name of the layer in Proof.Layer; "": its own name
	words  string
	remedy string
}

// stackFacts collects the facts of all layers of a stack.
func stackFacts(ctx context.Context, s *stack.Stack) (out []fact) {
	for i, l := range s.Layers {
		for _, f := range layerFacts(ctx, s, i, l) {
			f.layer = i
			out = append(out, f)
		}
	}
	return out
}

func layerFacts(ctx context.Context, s *stack.Stack, i int, l stack.Layer) []fact {
	switch l.Kind {
	case stack.InMemory: // a filesystem or a device
		if l.Device != nil {
			return []fact{{result: Fail, label: "memory (" + l.Name + ")",
				words: l.Name + " is memory: a power failure loses its content", remedy: "measure a path on a disk"}}
		}
		return []fact{{result: Fail, label: "memory (" + l.Name + ")",
			words: l.FSType + " keeps its files in memory: a power failure loses them", remedy: "measure a path on a disk"}}
	case stack.FUSE:
		return []fact{{result: Unknown, words: fmt.Sprintf("%s is a FUSE program (%s): cannot prove what it does with a sync",
			l.FSType, l.Mount.Source), remedy: "measure the path below it"}}
	case stack.Network:
		return []fact{{result: Unknown,
			words: fmt.Sprintf("%s handles syncs on another machine: cannot prove from here what it does",
				l.Mount.Source), remedy: "measure there"}}
	case stack.Unknown:
		return []fact{{result: Unknown,
			words: "no block device below it is visible, so nothing can be counted there"}}
	case stack.Kind(blockdev.Other):
		return []fact{{result: Unknown, words: "the layers below it are not visible from here",
			remedy: "measure on the host that has its data"}}
	case stack.Zpool:
		return zpoolFacts(s, i)
	case stack.Filesystem, stack.Overlay:
		if l.FSType == "zfs" {
			return datasetFacts(ctx, l, "zfs")
		}
		return mountFacts(l)
	case stack.Kind(blockdev.Zvol):
		return append(datasetFacts(ctx, l, "zvol"), deviceFacts(l)...)
	}

	if l.Device != nil {
		return deviceFacts(l)
	}

	return nil
}

func mountFacts(l stack.Layer) []fact {
	o := l.Mount.DropsSyncs()
	if o == "" {
		return nil
	}
	remedy := "mount it without that option"
	if strings.HasSuffix(o, "nobarrier") || strings.HasPrefix(o, "barrier") {
		remedy = "`mount -o remount,barrier " + l.Mount.Point + "`, and fix /etc/fstab"
	}
	return []fact{{result: Fail,
		words: fmt.Sprintf("%s at %s is mounted with %s: syncs return without flushing the disk", l.FSType, l.Mount.Point,
			o), remedy: remedy}}
}

// datasetFacts reads the properties of a dataset.
func datasetFacts(ctx context.Context, l stack.Layer, what string) []fact {
	if l.Dataset == "" {
		return []fact{{result: Unknown, words: "its dataset is unknown, so its property sync cannot be read"}}
	}
	rows, err := zfs.ZFS.Rows(ctx, 3, "get", "-Hp", "-o", "property,value,source", "sync,logbias", l.Dataset)
	if err != nil {
		return []fact{{result: Unknown, words: fmt.Sprintf("the property sync of %s cannot be read: %v", l.Dataset, err)}}
	}
	return propertyFacts(what, l.Dataset, rows)
}

func propertyFacts(what, dataset string, rows [][]string) (out []fact) {
	for _, r := range rows {
		property, value, source := r[0], r[1], r[2]
		at, from := dataset, ""
		if parent, ok := strings.CutPrefix(source, "inherited from "); ok {
			at, from = parent, " (inherited from "+parent+")"
		}

		switch {
		case property == "sync" && value == "disabled":
			out = append(out, fact{result: Fail, label: fmt.Sprintf("%s %s (sync=disabled)", what, dataset),
				words:  fmt.Sprintf("sync=disabled on %s%s: ZFS acknowledges syncs before it writes anything", dataset, from),
				remedy: "`zfs set sync=standard " + at + "`"})
		case property == "sync" && value == "always":
			out = append(out, fact{words: "sync=always on " + dataset + from + ": every write is a sync, even those that a " +
				"database does not wait for"})
		case property == "logbias" && value == "throughput":
			out = append(out, fact{words: "logbias=throughput on " + dataset + from + ": syncs do not use the log device"})
		}
	}

	return out
}

// zpoolFacts returns the tunables that keep ZFS from flushing.
func zpoolFacts(s *stack.Stack, i int) (out []fact) {
	volatile := false
	for _, j := range below(s.Layers, i) {
		d := s.Layers[j].Device
		volatile = volatile || d != nil && d.VolatileCache
	}

	for _, name := range []string{"zfs_nocacheflush", "zil_nocacheflush"} {
		if text("/sys/module/zfs/parameters/"+name) != "1" {
			continue
		}
		f := fact{words: name + "=1: ZFS does not flush its disks after writing its log; their caches are not volatile, " +
			"so nothing is lost"}
		if volatile {
			f = fact{result: Fail, label: fmt.Sprintf("%s (%s=1)", s.Layers[i].Name, name),
				words:  name + "=1: ZFS does not flush its disks after writing its log, but they have volatile caches",
				remedy: "`echo 0 > /sys/module/zfs/parameters/" + name + "`, and fix /etc/modprobe.d"}
		}
		out = append(out, f)
	}

	return out
}

// deviceFacts finds devices configured as having no volatile cache although they have one: the kernel then drops
// flushes.
func deviceFacts(l stack.Layer) []fact {
	d := l.Device
	why := d.HiddenCache()
	if why == "" {
		return nil
	}
	return []fact{{result: Fail, label: l.Name + " (write through)",
		words: fmt.Sprintf("queue/write_cache of %s is set to `write through`, but %s: the kernel drops its "+
			"flushes", d.Name, why),
		remedy: "`echo 'write back' > /sys/block/" + d.Name + "/queue/write_cache`"}}
}

func text(file string) string {
	b, err := os.ReadFile(file)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// below returns the layers under one, at any depth.
func below(layers []stack.Layer, i int) (out []int) {
	for j := i + 1; j < len(layers) && layers[j].Depth > layers[i].Depth; j++ {
		out = append(out, j)
	}
	return out
}

// children returns the layers directly under one.
func children(layers []stack.Layer, i int) (out []int) {
	for _, j := range below(layers, i) {
		if layers[j].Depth == layers[i].Depth+1 {
			out = append(out, j)
		}
	}
	return out
}
