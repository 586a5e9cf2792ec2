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

// fact is what a layer says of itself without a run.
type fact struct {
	layer  int    // in the stack
	result Result // Fail, Unknown; "": only a word
	label  string // how Proof.Layer names the layer; "": by its name
	words  string
	remedy string
}

// lookAt collects the facts of a stack.
func lookAt(ctx context.Context, s *stack.Stack) (out []fact) {
	for i, l := range s.Layers {
		for _, f := range look(ctx, s, i, l) {
			f.layer = i
			out = append(out, f)
		}
	}
	return out
}

func look(ctx context.Context, s *stack.Stack, i int, l stack.Layer) []fact {
	switch l.Kind {
	case stack.InMemory: // a filesystem or a device
		if l.Device != nil {
			return []fact{{result: Fail, label: "memory (" + l.Name + ")",
				words: l.Name + " is memory: what it holds is gone with the power", remedy: "measure a path on a disk"}}
		}
		return []fact{{result: Fail, label: "memory (" + l.Name + ")",
			words: l.FSType + " keeps its files in memory: with the power they are gone", remedy: "measure a path on a disk"}}
	case stack.FUSE:
		return []fact{{result: Unknown, words: fmt.Sprintf("%s is a program (%s): what it does with a sync cannot be shown",
			l.FSType, l.Mount.Source), remedy: "measure the path below it"}}
	case stack.Network:
		return []fact{{result: Unknown,
			words: fmt.Sprintf("what %s does with a sync is decided on another machine: it cannot be shown from here",
				l.Mount.Source), remedy: "measure there"}}
	case stack.Unknown:
		return []fact{{result: Unknown,
			words: "it is on no block device that can be seen, so that nothing can be counted below it"}}
	case stack.Kind(blockdev.Other):
		return []fact{{result: Unknown, words: "what is below it cannot be seen from here",
			remedy: "measure where its data is"}}
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
		remedy = "`mount -o remount,barrier " + l.Mount.Point + "`, and mend /etc/fstab"
	}
	return []fact{{result: Fail,
		words: fmt.Sprintf("%s at %s is mounted with %s: it answers syncs without flushing the disk", l.FSType, l.Mount.Point,
			o), remedy: remedy}}
}

// datasetFacts asks for the properties of a dataset.
func datasetFacts(ctx context.Context, l stack.Layer, what string) []fact {
	if l.Dataset == "" {
		return []fact{{result: Unknown, words: "its dataset is not known, so that its property sync cannot be read"}}
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
				words:  fmt.Sprintf("sync=disabled on %s%s: ZFS answers syncs before anything is written", dataset, from),
				remedy: "`zfs set sync=standard " + at + "`"})
		case property == "sync" && value == "always":
			out = append(out, fact{words: "sync=always on " + dataset + from + ": every write is a sync, also those that a " +
				"database does not wait for"})
		case property == "logbias" && value == "throughput":
			out = append(out, fact{words: "logbias=throughput on " + dataset + from + ": syncs do not use the log device"})
		}
	}

	return out
}

// zpoolFacts are the tunables by which ZFS does not flush.
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
		f := fact{words: name + "=1: ZFS does not flush its disks after it has written its log; their caches are not " +
			"volatile, so that nothing is lost"}
		if volatile {
			f = fact{result: Fail, label: fmt.Sprintf("%s (%s=1)", s.Layers[i].Name, name),
				words:  name + "=1: ZFS does not flush its disks after it has written its log, but they have volatile caches",
				remedy: "`echo 0 > /sys/module/zfs/parameters/" + name + "`, and mend /etc/modprobe.d"}
		}
		out = append(out, f)
	}

	return out
}

// deviceFacts are about devices that are told to have no volatile cache, though they
// have one: the kernel drops flushes then.
func deviceFacts(l stack.Layer) []fact {
	d := l.Device
	why := d.HiddenCache()
	if why == "" {
		return nil
	}
	return []fact{{result: Fail, label: l.Name + " (write through)",
		words: fmt.Sprintf("queue/write_cache of %s is set to `write through`, but %s: the kernel drops the flushes that "+
			"it gets", d.Name, why),
		remedy: "`echo 'write back' > /sys/block/" + d.Name + "/queue/write_cache`"}}
}

func text(file string) string {
	b, err := os.ReadFile(file)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// below are the layers under one, at any depth.
func below(layers []stack.Layer, i int) (out []int) {
	for j := i + 1; j < len(layers) && layers[j].Depth > layers[i].Depth; j++ {
		out = append(out, j)
	}
	return out
}

// children are the layers right under one.
func children(layers []stack.Layer, i int) (out []int) {
	for _, j := range below(layers, i) {
		if layers[j].Depth == layers[i].Depth+1 {
			out = append(out, j)
		}
	}
	return out
}
