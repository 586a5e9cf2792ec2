// Package cgroup limits the memory, processor time and number of processes of a group of processes, through cgroup v2
// or, where that lacks a controller, v1. It expects the hierarchies at /sys/fs/cgroup, where every distribution mounts
// them.
//
// A group is made below the group of this process, or below the nearest ancestor that may have groups, so limits of a
// container or a service apply to it too.
package cgroup

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"pando/internal/base/errs"

	"golang.org/x/sys/unix"
)

const opLimit = "limit"

// root is where hierarchies are mounted.
const root = "/sys/fs/cgroup"

// period is the interval in which a group may use its processor time.
const period = 100 * time.Millisecond

// Limits of a group. 0: none.
type Limits struct {
	MemoryBytes int64   // of memory; the group cannot swap
	CPUs        float64 // processors, such as 1.5
	PIDs        int     // processes and threads
}

// Any reports whether there is a limit.
func (l Limits) Any() bool { return l != Limits{} }

// controllers returns the controllers that the limits need.
func (l Limits) controllers() (names []string) {
	if l.MemoryBytes > 0 {
		names = append(names, "memory")
	}
	if l.CPUs > 0 {
		names = append(names, "cpu")
	}
	if l.PIDs > 0 {
		names = append(names, "pids")
	}
	return names
}

// Group is a group of processes: one directory, or with v1 one for each controller. It can be stored as JSON.
type Group struct {
	Dirs   []string
	Limits Limits
	V2     bool
}

// Plan finds where a group with this name and limits can be made, and makes nothing; so the caller can note it first.
// Unsupported: this host cannot set one of the limits. Permission.
func Plan(name string, l Limits) (*Group, error) {
	paths, err := ownPaths()
	if err != nil {
		return nil, errs.Wrap(opLimit, "", err)
	}

	g, refused := planV2(name, l, paths)
	if refused == nil {
		return g, nil
	}

	g = &Group{Limits: l}
	for _, c := range l.controllers() {
		dir := filepath.Join(root, c)
		if !isMounted(dir, unix.CGROUP_SUPER_MAGIC) {
			return nil, errs.New(errs.Unsupported, opLimit, c, "no cgroup of this host can limit it: %w", refused).
				WithHint("on the kernel's command line, enable the controller; in a container, give it its own cgroup " +
					"namespace with write access")
		}

		own := filepath.Join(dir, paths[c])
		if _, err := os.Stat(own); err != nil { // a container that sees only its own part of the hierarchy
			own = dir
		}
		g.Dirs = append(g.Dirs, filepath.Join(own, name))
	}

	return g, nil
}

// planV2 is Plan for v2 only.
func planV2(name string, l Limits, paths map[string]string) (*Group, error) {
	base := root
	if !isMounted(base, unix.CGROUP2_SUPER_MAGIC) {
		base = filepath.Join(root, "unified")
		if !isMounted(base, unix.CGROUP2_SUPER_MAGIC) {
			return nil, errors.New("cgroup v2 is not mounted")
		}
	}

	// Only a group without processes of its own can give controllers to groups below it.
	var refused error
	for dir := filepath.Join(base, paths[""]); ; dir = filepath.Dir(dir) {
		err := delegate(dir, l.controllers())
		if err == nil {
			return &Group{Dirs: []string{filepath.Join(dir, name)}, Limits: l, V2: true}, nil
		}
		refused = err
		if dir == base || !strings.HasPrefix(dir, base) {
			return nil, refused
		}
	}
}

// delegate makes a v2 group give controllers to the groups below it.
func delegate(dir string, controllers []string) error {
	available, err := os.ReadFile(filepath.Join(dir, "cgroup.controllers"))
	if err != nil {
		return err
	}

	file := filepath.Join(dir, "cgroup.subtree_control")
	given, err := os.ReadFile(file)
	if err != nil {
		return err
	}

	for _, c := range controllers {
		switch {
		case !slices.Contains(strings.Fields(string(available)), c):
			return fmt.Errorf("%s has no controller %q", dir, c)
		case slices.Contains(strings.Fields(string(given)), c):
			continue
		}
		if err := os.WriteFile(file, []byte("+"+c), 0); err != nil {
			return err
		}
	}

	return nil
}

// ownPaths returns the groups of this process: by controller, and by "" that of v2.
func ownPaths() (map[string]string, error) {
	b, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return nil, err
	}

	paths := map[string]string{}
	for line := range strings.Lines(string(b)) {
		fields := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3)
		if len(fields) != 3 {
			continue
		}
		for c := range strings.SplitSeq(fields[1], ",") {
			paths[c] = filepath.Clean("/" + fields[2])
		}
	}

	return paths, nil
}

func isMounted(dir string, magic int64) bool {
	var st unix.Statfs_t
	return unix.Statfs(dir, &st) == nil && int64(st.Type) == magic
}

// Make makes the group and sets every limit. On error nothing is left.
func (g *Group) Make() error {
	for _, dir := range g.Dirs {
		if err := os.Mkdir(dir, 0o755); err != nil {
			_ = g.Remove(context.Background())
			return errs.Wrap(opLimit, dir, err)
		}
	}

	for _, s := range g.settings() {
		err := g.set(s)
		if err != nil && !s.optional {
			_ = g.Remove(context.Background())
			return errs.Wrap(opLimit, s.file, err)
		}
	}

	return nil
}

// setting is a file to write.
type setting struct {
	file, value string
	optional    bool // it exists only where the kernel accounts for swap
}

func (g *Group) settings() (all []setting) {
	l := g.Limits
	number := func(n int64) string { return strconv.FormatInt(n, 10) }
	quota := number(int64(math.Ceil(l.CPUs * float64(period/time.Microsecond))))
	microseconds := number(int64(period / time.Microsecond))
	if l.MemoryBytes > 0 && g.V2 {
		all = append(all, setting{"memory.max", number(l.MemoryBytes), false}, setting{"memory.swap.max", "0", true})
	}
	if l.MemoryBytes > 0 && !g.V2 {
		all = append(all, setting{"memory.limit_in_bytes", number(l.MemoryBytes), false},
			setting{"memory.memsw.limit_in_bytes", number(l.MemoryBytes), true})
	}
	if l.CPUs > 0 && g.V2 {
		all = append(all, setting{"cpu.max", quota + " " + microseconds, false})
	}
	if l.CPUs > 0 && !g.V2 {
		all = append(all, setting{"cpu.cfs_period_us", microseconds, false}, setting{"cpu.cfs_quota_us", quota, false})
	}
	if l.PIDs > 0 {
		all = append(all, setting{"pids.max", strconv.Itoa(l.PIDs), false})
	}
	return all
}

// set writes a setting where its file is.
func (g *Group) set(s setting) error {
	for _, dir := range g.Dirs {
		f, err := os.OpenFile(filepath.Join(dir, s.file), os.O_WRONLY, 0)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		_, err = f.WriteString(s.value)
		return errors.Join(err, f.Close())
	}
	return errs.New(errs.Unsupported, opLimit, s.file, "this kernel cannot set it")
}

// Enter moves a process into the group. What it starts later is in the group too.
func (g *Group) Enter(pid int) error {
	for _, dir := range g.Dirs {
		if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(pid)), 0); err != nil {
			return errs.Wrap(opLimit, dir, err)
		}
	}
	return nil
}

// KilledForMemory reports whether the kernel has killed processes of the group because of its limit of memory (since
// Linux 4.13).
func (g *Group) KilledForMemory() bool {
	for _, dir := range g.Dirs {
		for _, name := range []string{"memory.events", "memory.oom_control"} { // of version 2, and of version 1
			text, err := os.ReadFile(filepath.Join(dir, name))
			if err != nil {
				continue
			}
			for line := range strings.Lines(string(text)) {
				count, found := strings.CutPrefix(strings.TrimSpace(line), "oom_kill ")
				if found && count != "0" {
					return true
				}
			}
		}
	}
	return false
}

// removeWait is how long Remove waits for processes to end that it has killed.
const removeWait = 5 * time.Second

// Remove kills what is left in the group, and removes it. A group that does not exist is removed. InUse: a process
// does not end.
func (g *Group) Remove(ctx context.Context) error {
	deadline := time.Now().Add(removeWait)
	var failed error
	for _, dir := range g.Dirs {
		failed = errors.Join(failed, errs.Wrap("remove", dir, removeDir(ctx, dir, deadline)))
	}
	return failed
}

func removeDir(ctx context.Context, dir string, deadline time.Time) error {
	for pause := time.Millisecond; ; pause = min(2*pause, 50*time.Millisecond) {
		err := os.Remove(dir) // of a directory whose files the kernel keeps: rmdir
		if err == nil || errors.Is(err, os.ErrNotExist) {
			return nil
		}
		if !errors.Is(err, unix.EBUSY) || time.Now().After(deadline) || ctx.Err() != nil {
			return errors.Join(err, ctx.Err())
		}
		killAll(dir)
		time.Sleep(pause)
	}
}

// killAll kills the processes of a group.
func killAll(dir string) {
	b, err := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
	if err != nil {
		return
	}
	for _, field := range bytes.Fields(b) {
		if pid, err := strconv.Atoi(string(field)); err == nil && pid > 1 {
			_ = unix.Kill(pid, unix.SIGKILL)
		}
	}
}
