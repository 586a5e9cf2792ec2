package syncbench

import (
	"context"
	"fmt"
	"os"
	"runtime"
	"strings"

	"pando/internal/base/errs"
	"pando/internal/linux/zfs"
	"pando/internal/observe/blockdev"
	"pando/internal/observe/stack"

	"golang.org/x/sys/unix"
)

// host describes this machine. What cannot be known stays empty.
func host(fio string) Host {
	h := Host{CPUs: runtime.NumCPU(), Fio: fio}
	h.Name, _ = os.Hostname()
	var info unix.Sysinfo_t
	if unix.Sysinfo(&info) == nil {
		h.MemoryBytes = int64(info.Totalram) * int64(info.Unit)
	}
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		h.Kernel = unix.ByteSliceToString(u.Release[:])
	}
	return h
}

// layers describes a stack for people.
func layers(ctx context.Context, s *stack.Stack) []Layer {
	out := []Layer{}
	for _, l := range s.Layers {
		out = append(out, Layer{Name: l.Name, Kind: string(l.Kind), Depth: l.Depth, Role: l.Role,
			Details: errs.JoinSet(", ", details(l), properties(ctx, l))})
	}
	if s.Hidden != "" && len(out) > 0 {
		last := &out[len(out)-1]
		last.Details = errs.JoinSet(", ", last.Details, "below: "+s.Hidden)
	}
	return out
}

// properties are those of ZFS that change what a sync costs: of a filesystem, a volume or
// a pool, with "(inherited)" where the dataset has it from its parent. What cannot be read is said.
func properties(ctx context.Context, l stack.Layer) string {
	if l.Dataset == "" {
		return ""
	}

	tool, what, columns := zfs.ZFS, "sync,logbias,recordsize,volblocksize,compression,primarycache,atime,dedup",
		"property,value,source"
	if l.Kind == stack.Zpool {
		tool, what = zfs.Zpool, "ashift,capacity,fragmentation"
	}

	rows, err := tool.Rows(ctx, 3, "get", "-H", "-o", columns, what, l.Dataset)
	if err != nil {
		return "cannot read properties: " + err.Error()
	}

	var out []string
	for _, r := range rows {
		if r[1] == "-" { // not for this kind of dataset
			continue
		}
		text := r[0] + "=" + r[1]
		if strings.HasPrefix(r[2], "inherited") {
			text += " (inherited)"
		}
		out = append(out, text)
	}

	return strings.Join(out, ", ")
}

func details(l stack.Layer) string {
	if l.Device == nil {
		return errs.JoinSet(", ", l.Dataset, l.Mount.Options, super(l))
	}

	d := l.Device
	cache := "no volatile write cache"
	if d.VolatileCache {
		cache = "volatile write cache"
	}

	var more []string
	if d.FUA {
		more = append(more, "FUA")
	}
	if d.Transport != "" {
		more = append(more, d.Transport)
	}
	if d.Scheduler != "" {
		more = append(more, "scheduler "+d.Scheduler)
	}
	if d.Rotational {
		more = append(more, "reported as rotating")
	}

	if d.Kind == blockdev.Loop {
		if d.DirectIO {
			more = append(more, "direct I/O")
		} else {
			more = append(more, "no direct I/O")
		}
	}

	return errs.JoinSet(", ", l.Dataset, cache, strings.Join(more, ", "),
		fmt.Sprintf("%.1f GiB", float64(d.SizeBytes)/float64(gib)))
}

// super is the options of a filesystem, without those that the mount's own repeat.
func super(l stack.Layer) string {
	var out []string
	for o := range strings.SplitSeq(l.Mount.Super, ",") {
		if o != "rw" && o != "" && !strings.HasPrefix(o, "lowerdir=") && !strings.HasPrefix(o, "workdir=") {
			out = append(out, o)
		}
	}
	return strings.Join(out, ",")
}
