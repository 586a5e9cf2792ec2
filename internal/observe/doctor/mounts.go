package doctor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"pando/internal/base/errs"
	"pando/internal/linux/mount"

	"golang.org/x/sys/unix"
)

// maxNamed is how many findings of one kind a check lists. It only counts the others.
const maxNamed = 20

// mountLeaks finds mounts that keep stray objects of the pool or deleted images in use, and mount namespaces without
// processes.
func mountLeaks(ctx context.Context, q *host, c *Report) error {
	if !isRoot() {
		return notRoot("looking into mount namespaces")
	}

	loops, err := loopDevices()
	if err != nil {
		return err
	}

	spaces, missed, err := namespaces(ctx)
	if err != nil {
		return err
	}

	// Find the leaks of each namespace.
	s := leakSearch{pool: q.Pool, loops: loopsByNumber(loops), trees: poolTrees(q.Pool, spaces)}
	total, kept, named := 0, 0, 0
	for _, n := range spaces {
		total += len(n.Table)
		if n.Living == 0 && len(n.Kept) > 0 {
			kept++
			if named++; named <= maxNamed {
				c.find(keptNamespace(n))
			}
		}

		for _, m := range n.Table {
			lost, gone := s.judge(m)
			if !lost && !gone {
				continue
			}
			if named++; named <= maxNamed { // finding the holders of a mount takes time
				c.find(s.leak(ctx, n, m, lost))
			}
		}
	}

	if named > maxNamed {
		c.find(Finding{Code: "mount-more", Severity: Warning,
			Title: fmt.Sprintf("%d more mounts or namespaces are left over", named-maxNamed), Why: "Only the first are listed."})
	}

	// Summarise.
	c.measure(count("namespaces", "mount namespaces", len(spaces)),
		count("kept", "of them without processes", kept), count("mounts", "mounts in all", total))
	c.Summary = fmt.Sprintf("checked %s in %s", errs.Plural(total, "mount"), errs.Plural(len(spaces), "mount namespace"))
	if q.Pool != nil && q.Pool.Trouble != nil {
		c.Summary += "; the pool's own mounts could not be identified"
	}

	c.Summary += missed + hiddenByContainer()
	return nil
}

// leakSearch has what mountLeaks compares mounts with.
type leakSearch struct {
	pool  *PoolFacts
	loops map[uint64]loopDevice // by device number
	trees poolPart
}

// judge reports whether a mount shows an object of the pool although no volume is attached there (lost), and whether it
// shows an image that has been deleted (gone).
func (s leakSearch) judge(m mount.Entry) (lost, gone bool) {
	if l, ok := s.loops[m.Dev]; ok {
		inside, volume := l.inPool(s.pool)
		return inside && volume == "", l.deleted
	}
	object := s.trees.objectOf(m)
	return object != "" && s.trees.volumeOf(object, s.pool) == "", false
}

// leak returns the finding about a mount that judge called lost or gone.
func (s leakSearch) leak(ctx context.Context, n mount.Namespace, m mount.Entry, lost bool) Finding {
	f := Finding{
		Severity: Warning, Subject: m.Point,
		Measured: []Figure{words("mount", "mounted at", printable(m.Point)+inNamespace(n)),
			words("fs", "filesystem", m.FSType+" of "+printable(m.Source))},
	}

	if !n.Own {
		for _, p := range n.Processes[:min(len(n.Processes), 5)] {
			f.measure(words("process", "process there", fmt.Sprintf("pid %d (%s)", p.PID, p.Command)))
		}
	}

	if t := s.trees.objectOf(m); t != "" {
		f.measure(words("tree", "of the pool", t))
	}

	// Say why it should not be there.
	f.Do = unmountSteps(ctx, n, m)
	if lost {
		f.Code = "mount-lost"
		f.Title = fmt.Sprintf("an object of the pool is mounted at %s%s, but no volume is attached there",
			printable(m.Point), inNamespace(n))
		f.Why = "The object cannot be attached elsewhere or destroyed, and its space cannot be freed, while it is mounted."
		f.allowForWork(s.pool)
		return f
	}

	l := s.loops[m.Dev]
	f.Code = "mount-deleted-image"
	f.measure(words("file", "image", printable(l.file)+" (deleted)"),
		figure("size", "size", Bytes, l.SizeBytes))
	f.Title = fmt.Sprintf("the image mounted at %s%s has been deleted", printable(m.Point), inNamespace(n))
	f.Why = "It takes space until it is unmounted, no list of files shows it, and its content is lost with the mount."
	f.Do = append([]Step{{Text: "copy the files you still need"}}, f.Do...)
	return f
}

// allowForWork makes a note of a finding about something stray in the pool while commands are at work there, because
// they attach and mount objects before they record it.
func (f *Finding) allowForWork(p *PoolFacts) {
	if p.Working > 0 {
		f.Severity = Note
		f.Why += fmt.Sprintf(" But commands are working on %s, which it may belong to.", errs.Plural(p.Working, "object"))
	}
}

// keptNamespace returns the finding about a mount namespace without processes.
func keptNamespace(n mount.Namespace) Finding {
	f := Finding{
		Code: "namespace-kept", Severity: Note, Subject: fmt.Sprintf("mnt:[%d]", n.ID),
		Title:    fmt.Sprintf("a mount namespace without processes is kept, with %s", errs.Plural(len(n.Table), "mount")),
		Measured: []Figure{count("mounts", "mounts", len(n.Table))},
		Why:      "Filesystems mounted there, and their devices, stay in use, although `mount` and `fuser` show nothing.",
	}

	var unmount []string
	for _, k := range n.Kept {
		f.measure(words("kept_by", "kept by", printable(k)))
		if strings.HasPrefix(k, "/") && !strings.Contains(k, " (in ") {
			unmount = append(unmount, "umount "+word(k))
		}
	}

	if len(unmount) > 0 {
		f.Do = []Step{step("if it is not needed, unmount the files that keep it", unmount...)}
	} else {
		f.Do = []Step{{Text: "if it is not needed, end the process that has it open"}}
	}

	return f
}

// unmountSteps returns who uses a mount, as far as that is known, and how to unmount it.
func unmountSteps(ctx context.Context, n mount.Namespace, m mount.Entry) []Step {
	var steps []Step

	// If the mount exists only in another namespace, that namespace's processes hold it. With an error the list may be
	// incomplete. The subvolumes of a btrfs cannot be told apart by device.
	if m.FSType != "btrfs" {
		if holders, _ := mount.Holders(ctx, mount.Query{Dev: m.Dev, At: m.Point}); len(holders) > 0 {
			steps = append(steps, Step{Text: printable(mount.FormatHolders(holders[:min(len(holders), 8)]))})
		}
	}

	if cmd := commandInside(n, "umount "+word(m.Point)); cmd != "" {
		steps = append(steps, step("unmount it", cmd))
	}

	if !n.Own && len(n.Processes) > 0 {
		steps = append(steps,
			step(fmt.Sprintf("or end the processes there, if they are no longer needed (%s in all)",
				errs.Plural(n.Living, "process")), fmt.Sprintf("ps -f -p %d", n.Processes[0].PID)))
	}

	return steps
}

// poolPart recognises mounts of trees in a pool. The zero value recognises none.
type poolPart struct {
	dev  uint64
	root string // path of the directory of objects, from the root of its filesystem
}

// poolTrees locates the directory of a pool's objects in mount tables. Pools whose objects are images or datasets have
// no trees.
func poolTrees(p *PoolFacts, spaces []mount.Namespace) poolPart {
	if p == nil || p.Trouble != nil || len(spaces) == 0 {
		return poolPart{}
	}

	dir := filepath.Join(real(p.Data), "objects")
	e, ok := mount.At(spaces[0].Table, dir)
	if !ok {
		return poolPart{}
	}

	rel, err := filepath.Rel(e.Point, dir)
	if err != nil || strings.HasPrefix(rel, "..") {
		return poolPart{}
	}

	return poolPart{e.Dev, filepath.Join(e.Root, rel)}
}

// objectOf returns the path of the tree that m mounts, relative to the pool's directory of objects; "" if m mounts
// something else.
func (t poolPart) objectOf(m mount.Entry) string {
	if t.root == "" || m.Dev != t.dev {
		return ""
	}
	root := strings.TrimSuffix(m.Root, "//deleted")
	if rest, ok := strings.CutPrefix(root, strings.TrimSuffix(t.root, "/")+"/"); ok {
		return rest
	}
	return ""
}

// volumeOf returns the name of the volume whose recorded mount shows the same object, "" if there is none, and "?" if
// the mount table cannot be read.
func (t poolPart) volumeOf(object string, p *PoolFacts) string {
	first, _, _ := strings.Cut(object, "/")
	table, err := mount.Table("self")
	if err != nil {
		return "?" // no object can be called lost then
	}

	for _, e := range table {
		if name := p.Mounts[e.Point]; name != "" {
			if o, _, _ := strings.Cut(t.objectOf(e), "/"); o == first {
				return name
			}
		}
	}

	return ""
}

// mountThresholds are the limits above which mountCount reports mounts.
type mountThresholds struct {
	note, warn int           // mounts in a namespace
	read, copy time.Duration // cost of the mount table
}

var mountDefaults = mountThresholds{note: 1000, warn: 5000, read: 20 * time.Millisecond, copy: 50 * time.Millisecond}

// slow reports whether the mount table costs more than it may.
func (t mountThresholds) slow(c mountCost) bool { return c.read > t.read || c.copy > t.copy }

// mountCost is the current cost of the mounts of this namespace.
type mountCost struct {
	read     time.Duration // reading the table once, as mount(8) does, and systemd at each change
	bytes    int64         // size of the table
	copy     time.Duration // making a mount namespace, as each container and sandbox does
	mount    time.Duration // making and attaching a tmpfs
	unmount  time.Duration // unmounting that tmpfs
	copyErr  error
	mountErr error
}

// measureMounts measures each cost some times and returns the lowest, because other work on the host can only add to
// it. It mounts in a mount namespace of its own, which ends with the measurement.
func measureMounts() mountCost {
	const tries = 3
	best := func(to *time.Duration, d time.Duration) {
		if *to == 0 || d < *to {
			*to = d
		}
	}

	var c mountCost
	for range tries {
		start := time.Now()
		b, err := os.ReadFile("/proc/self/mountinfo")
		if err == nil {
			best(&c.read, time.Since(start))
			c.bytes = int64(len(b))
		}

		_ = onThread(func() error {
			start := time.Now()
			if c.copyErr = unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS); c.copyErr != nil {
				return nil
			}

			best(&c.copy, time.Since(start))

			// Keep mounts made from here on out of other namespaces.
			if c.mountErr = unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); c.mountErr != nil {
				return nil
			}

			start = time.Now()
			if c.mountErr = mountTmpfs("/proc"); c.mountErr != nil {
				return nil
			}

			best(&c.mount, time.Since(start))
			start = time.Now()
			if c.mountErr = unix.Unmount("/proc", 0); c.mountErr == nil {
				best(&c.unmount, time.Since(start))
			}

			return nil
		})
	}

	return c
}

// mountTmpfs mounts an empty tmpfs with system calls that do not read the mount table, unlike mount(8).
func mountTmpfs(at string) error {
	fsfd, err := unix.Fsopen("tmpfs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return fmt.Errorf("fsopen: %w", err)
	}

	defer unix.Close(fsfd)
	if err := unix.FsconfigCreate(fsfd); err != nil {
		return fmt.Errorf("fsconfig: %w", err)
	}

	m, err := unix.Fsmount(fsfd, unix.FSMOUNT_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("fsmount: %w", err)
	}

	defer unix.Close(m)
	if err := unix.MoveMount(m, "", unix.AT_FDCWD, at, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("move_mount: %w", err)
	}

	return nil
}

const whyMounts = "Each container, sandbox and `unshare -m` copies all mounts of its namespace, and removes them " +
	"again; each `mount` and `df` reads the whole table, and systemd reads it at every change. With tens of thousands " +
	"of mounts, jobs became ten times slower."

// mountCount returns a check that counts the mounts of all namespaces and measures what they cost.
func mountCount(t mountThresholds) func(context.Context, *host, *Report) error {
	return func(ctx context.Context, _ *host, c *Report) error {
		// Read the mount tables. Without root, that of this process is still readable.
		spaces, missed, err := namespaces(ctx)
		if ctx.Err() != nil {
			return errs.Wrap("count mounts", "", ctx.Err())
		}

		if err != nil {
			table, terr := mount.Table("self")
			if terr != nil {
				return errors.Join(err, terr)
			}
			spaces, missed = []mount.Namespace{{Own: true,
				Table: table}}, "; only the mounts of this process are visible without root"
		}

		// Report namespaces with many mounts, the largest first.
		cost := measureMounts()
		total, most := 0, 0
		slices.SortStableFunc(spaces, func(a, b mount.Namespace) int { return len(b.Table) - len(a.Table) })
		for i, n := range spaces {
			total += len(n.Table)
			most = max(most, len(n.Table))
			if len(n.Table) >= t.note && i < maxNamed {
				c.find(t.manyMounts(n, cost))
			}
		}

		// Report a slow mount table that their number does not explain.
		if len(c.Findings) == 0 && t.slow(cost) {
			c.find(Finding{
				Code: "mounts-slow", Severity: Warning, Measured: cost.figures(), Why: whyMounts,
				Title: fmt.Sprintf("the %d mounts of this namespace are slow to read or to copy", most),
				Do: []Step{step("check whether a process holds the mount lock",
					"cat /proc/pressure/cpu", "ps -eo pid,stat,wchan:32,comm | grep -w D")},
			})
		}

		// Summarise.
		c.measure(count("namespaces", "mount namespaces", len(spaces)),
			count("mounts", "mounts in all", total), count("most", "in one", most))
		c.measure(cost.figures()...)
		c.Summary = fmt.Sprintf("%s in %s, at most %d in one; reading the mount table takes %s, copying it for a "+
			"container %s",
			errs.Plural(total, "mount"), errs.Plural(len(spaces), "namespace"), most,
			cost.read.Round(time.Microsecond), durationOr(cost.copy, cost.copyErr)) + missed
		return nil
	}
}

// manyMounts returns the finding about a namespace with at least t.note mounts.
func (t mountThresholds) manyMounts(n mount.Namespace, cost mountCost) Finding {
	f := Finding{
		Code: "mounts-many", Severity: Note, Subject: fmt.Sprintf("mnt:[%d]", n.ID), Why: whyMounts,
		Title:    fmt.Sprintf("%d mounts%s", len(n.Table), inNamespace(n)),
		Measured: []Figure{count("mounts", "mounts", len(n.Table))},
		Do: []Step{
			step("list them by type and source",
				strings.TrimSpace(commandInside(n,
					"findmnt -rn -o FSTYPE,SOURCE"))+" | cut -d/ -f1-4 | sort | uniq -c | sort -rn | head"),
			{Text: "unmount idle filesystems: datasets, subvolumes and volumes exist without being mounted (`pando umount " +
				"VOLUME`; on ZFS `zfs set canmount=noauto DATASET`)"},
		},
	}

	if len(n.Shared) > 0 {
		f.measure(count("shared", "of them shared", len(n.Shared)).
			noted("a mount there appears in each namespace that shares it"))
	}

	f.measure(mountKinds(n.Table)...)
	if n.Own {
		f.measure(cost.figures()...)
	}
	if len(n.Table) >= t.warn || n.Own && t.slow(cost) {
		f.Severity = Warning
	}

	return f
}

// durationOr formats a duration, or says why it is unknown.
func durationOr(d time.Duration, err error) string {
	if err != nil {
		return fmt.Sprintf("is unknown (%v)", err)
	}
	return d.Round(time.Microsecond).String()
}

// figures returns the costs as figures of a report.
func (m mountCost) figures() []Figure {
	micro := func(name, label string, d time.Duration, err error) Figure {
		if err != nil {
			return microseconds(name, label, d, err.Error())
		}
		return microseconds(name, label, d, "")
	}

	return []Figure{
		micro("read_us", "reading the mount table", m.read, nil),
		figure("table", "size of the mount table", Bytes, m.bytes),
		micro("copy_us", "copying it for a namespace", m.copy, m.copyErr),
		micro("mount_us", "mounting a tmpfs", m.mount, errors.Join(m.copyErr, m.mountErr)),
		micro("unmount_us", "unmounting it", m.unmount, errors.Join(m.copyErr, m.mountErr)),
	}
}

// mountKinds returns the number of mounts of the four most frequent filesystem types.
func mountKinds(table []mount.Entry) []Figure {
	n := map[string]int{}
	for _, m := range table {
		n[m.FSType]++
	}

	kinds := slices.SortedFunc(maps.Keys(n), func(a, b string) int {
		return cmp.Or(cmp.Compare(n[b], n[a]), strings.Compare(a, b))
	})

	var out []Figure
	for _, k := range kinds[:min(len(kinds), 4)] {
		out = append(out, count("type_"+k, "of type "+k, n[k]))
	}

	return out
}
