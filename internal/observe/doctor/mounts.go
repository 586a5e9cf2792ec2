package doctor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"pando/internal/base/errs"
	"pando/internal/linux/mount"

	"golang.org/x/sys/unix"
)

// maxNamed is how many things of a kind are findings of their own.
const maxNamed = 20

// mountLeaks finds mounts that are left over.
func mountLeaks(ctx context.Context, q *HostRequest, c *Report) error {
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

	byNumber := map[uint64]loopDevice{}
	for _, l := range loops {
		for _, n := range l.numbers {
			byNumber[n] = l
		}
	}

	trees := poolTrees(q.Pool, spaces)
	total, kept, named := 0, 0, 0
	find := func(f Finding) {
		if named++; named <= maxNamed {
			c.find(f)
		}
	}

	for _, n := range spaces {
		total += len(n.Table)
		if n.Living == 0 && len(n.Kept) > 0 {
			kept++
			find(keptNamespace(n))
		}

		for _, m := range n.Table {
			l, isLoop := byNumber[m.Dev]
			inside, volume := false, ""
			if isLoop {
				inside, volume = l.inPool(q.Pool)
			} else if t := trees.objectOf(m); t != "" {
				inside, volume = true, trees.volumeOf(t, q.Pool)
			}

			lost, gone := inside && volume == "", isLoop && l.deleted
			if !lost && !gone {
				continue
			}

			if named >= maxNamed {
				named++
				continue
			}

			measured := []Figure{words("mount", "mounted at", printable(m.Point)+inNamespace(n)),
				words("fs", "filesystem", m.FSType+" of "+printable(m.Source))}
			for _, p := range n.Processes[:min(len(n.Processes), 5)] {
				if !n.Own {
					measured = append(measured, words("process", "process there", fmt.Sprintf("pid %d (%s)", p.PID, p.Command)))
				}
			}

			if t := trees.objectOf(m); t != "" {
				measured = append(measured, words("tree", "of the pool", t))
			}

			steps := unmountSteps(ctx, n, m)
			if lost {
				f := Finding{
					Code: "mount-lost", Severity: Warning, Subject: m.Point, Measured: measured,
					Title: fmt.Sprintf("an object of the pool is mounted at %s%s, but no volume is attached there",
						printable(m.Point), inNamespace(n)),
					Why: "The object cannot be attached elsewhere or destroyed, and its space cannot be freed, while it is mounted.",
					Do:  steps,
				}
				if q.Pool.Working > 0 {
					f.Severity = Note
					f.Why += fmt.Sprintf(" But commands are working on %s, which it may belong to.", plural(q.Pool.Working, "object"))
				}
				find(f)
			} else {
				find(Finding{
					Code: "mount-deleted-image", Severity: Warning, Subject: m.Point,
					Measured: append(measured, words("file", "image", printable(l.file)+" (deleted)"),
						figure("size", "size", Bytes, l.SizeBytes)),
					Title: fmt.Sprintf("the image mounted at %s%s has been deleted", printable(m.Point), inNamespace(n)),
					Why:   "It takes space until it is unmounted, no list of files shows it, and its content is lost with the mount.",
					Do:    append([]Step{{Text: "copy the files you still need"}}, steps...),
				})
			}
		}
	}

	if named > maxNamed {
		c.find(Finding{Code: "mount-more", Severity: Warning,
			Title: fmt.Sprintf("%d more mounts or namespaces are left over", named-maxNamed), Why: "Only the first are listed."})
	}

	c.Measured = append(c.Measured, figure("namespaces", "mount namespaces", Count, int64(len(spaces))),
		figure("kept", "of them without processes", Count, int64(kept)), figure("mounts", "mounts in all", Count,
			int64(total)))
	c.Summary = fmt.Sprintf("checked %s in %s", plural(total, "mount"), plural(len(spaces), "mount namespace"))
	if q.Pool != nil && q.Pool.Trouble != nil {
		c.Summary += "; the pool's own mounts could not be identified"
	}

	c.Summary += missed + hiddenByContainer()
	return nil
}

// keptNamespace is the finding about a namespace in which no process lives.
func keptNamespace(n mount.Namespace) Finding {
	f := Finding{
		Code: "namespace-kept", Severity: Note, Subject: fmt.Sprintf("mnt:[%d]", n.ID),
		Title:    fmt.Sprintf("a mount namespace without processes is kept, with %s", plural(len(n.Table), "mount")),
		Measured: []Figure{figure("mounts", "mounts", Count, int64(len(n.Table)))},
		Why:      "Filesystems mounted there, and their devices, stay in use, although `mount` and `fuser` show nothing.",
	}

	var unmount []string
	for _, k := range n.Kept {
		f.Measured = append(f.Measured, words("kept_by", "kept by", printable(k)))
		if strings.HasPrefix(k, "/") && !strings.Contains(k, " (in ") {
			unmount = append(unmount, "umount "+word(k))
		}
	}

	if len(unmount) > 0 {
		f.Do = []Step{{"if it is not needed, unmount the files that keep it", unmount}}
	} else {
		f.Do = []Step{{Text: "if it is not needed, end the process that has it open"}}
	}

	return f
}

// unmountSteps says who uses a mount and how it goes.
func unmountSteps(ctx context.Context, n mount.Namespace, m mount.Entry) []Step {
	var steps []Step

	// Of a mount that is in another namespace only, that namespace's processes tell.
	// with an error there may be more
	if holders, _ := mount.Holders(ctx, mount.Query{Dev: m.Dev, At: m.Point}); m.FSType != "btrfs" && len(holders) > 0 {
		steps = append(steps, Step{Text: printable(mount.FormatHolders(holders[:min(len(holders), 8)]))})
	}

	if cmd := commandInside(n, "umount "+word(m.Point)); cmd != "" {
		steps = append(steps, Step{"unmount it", []string{cmd}})
	}

	if !n.Own && len(n.Processes) > 0 {
		p := n.Processes[0]
		steps = append(steps,
			Step{fmt.Sprintf("or end the processes there, if they are no longer needed (%s in "+
				"all)", plural(n.Living, "process")),
				[]string{fmt.Sprintf("ps -f -p %d", p.PID)}})
	}

	return steps
}

// poolPart tells which mounts are of trees in a pool.
type poolPart struct {
	dev  uint64
	root string // of the directory of objects, in its filesystem
}

// poolTrees locates the directory of a pool's objects in mount tables. Pools whose
// objects are images or datasets have no trees.
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

// objectOf is the path in the pool's directory objectOf objects that m is a mount objectOf, "" if it
// is objectOf something else.
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

// volumeOf is the volumeOf whose mount shows the same object, "" if none is known.
func (t poolPart) volumeOf(object string, p *PoolFacts) string {
	first, _, _ := strings.Cut(object, "/")
	table, err := mount.Table("self")
	if err != nil {
		return "?" // then nothing can be called lost
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

// mountThresholds say when there are many mounts.
type mountThresholds struct {
	note, warn int           // mounts in a namespace
	read, copy time.Duration // what the table may cost
}

var mountDefaults = mountThresholds{note: 1000, warn: 5000, read: 20 * time.Millisecond, copy: 50 * time.Millisecond}

// mountCost is what the mounts of this namespace cost now.
type mountCost struct {
	read     time.Duration // reading the table once: mount(8), systemd at each change
	bytes    int64         // of it
	copy     time.Duration // a namespace of one's own: each container and sandbox
	mount    time.Duration // making and attaching a tmpfs
	unmount  time.Duration // of it
	copyErr  error
	mountErr error
}

// measureMounts tries it, and takes the best of some tries: others' work only adds.
// All that it mounts is in a mount namespace of its own, which ends with it.
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

			// From here on nothing that is mounted goes over into other namespaces.
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

// mountTmpfs mounts an empty tmpfs with the calls that take no mount table.
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

// mountCount counts the mounts of all namespaces and measures what they cost.
func mountCount(t mountThresholds) func(context.Context, *HostRequest, *Report) error {
	return func(ctx context.Context, _ *HostRequest, c *Report) error {
		spaces, missed, err := namespaces(ctx)
		if ctx.Err() != nil {
			return errs.Wrap("count mounts", "", ctx.Err())
		}

		if err != nil {
			// Without root our own is still known.
			table, terr := mount.Table("self")
			if terr != nil {
				return errors.Join(err, terr)
			}
			spaces, missed = []mount.Namespace{{Own: true,
				Table: table}}, "; only the mounts of this process are visible without root"
		}

		cost := measureMounts()
		measured := cost.figures()
		total, most := 0, 0
		slices.SortStableFunc(spaces, func(a, b mount.Namespace) int { return len(b.Table) - len(a.Table) })

		for i, n := range spaces {
			total += len(n.Table)
			most = max(most, len(n.Table))
			if len(n.Table) < t.note || i >= maxNamed {
				continue
			}

			f := Finding{
				Code: "mounts-many", Severity: Note, Subject: fmt.Sprintf("mnt:[%d]", n.ID), Why: whyMounts,
				Title:    fmt.Sprintf("%d mounts%s", len(n.Table), inNamespace(n)),
				Measured: []Figure{figure("mounts", "mounts", Count, int64(len(n.Table)))},
			}

			if len(n.Shared) > 0 {
				f.Measured = append(f.Measured, figure("shared", "of them shared", Count,
					int64(len(n.Shared))).noted("a mount there appears in each namespace that shares it"))
			}

			f.Measured = append(f.Measured, mountKinds(n.Table)...)
			if n.Own {
				f.Measured = append(f.Measured, measured...)
			}
			if len(n.Table) >= t.warn || n.Own && (cost.read > t.read || cost.copy > t.copy) {
				f.Severity = Warning
			}

			f.Do = []Step{
				{"list them by type and source",
					[]string{strings.TrimSpace(commandInside(n,
						"findmnt -rn -o FSTYPE,SOURCE")) + " | cut -d/ -f1-4 | sort | uniq -c | sort -rn | head"}},
				{Text: "unmount idle filesystems: datasets, subvolumes and volumes exist without being mounted (`pando umount " +
					"VOLUME`; on ZFS `zfs set canmount=noauto DATASET`)"},
			}

			c.find(f)
		}

		if len(c.Findings) == 0 && (cost.read > t.read || cost.copy > t.copy) {
			c.find(Finding{
				Code: "mounts-slow", Severity: Warning, Measured: measured, Why: whyMounts,
				Title: fmt.Sprintf("the %d mounts of this namespace are slow to read or to copy", most),
				Do: []Step{{"check whether a process holds the mount lock",
					[]string{"cat /proc/pressure/cpu", "ps -eo pid,stat,wchan:32,comm | grep -w D"}}},
			})
		}

		c.Measured = append(c.Measured, figure("namespaces", "mount namespaces", Count, int64(len(spaces))),
			figure("mounts", "mounts in all", Count, int64(total)), figure("most", "in one", Count, int64(most)))
		c.Measured = append(c.Measured, measured...)
		c.Summary = fmt.Sprintf("%s in %s, at most %d in one; reading the mount table takes %s, copying it for a "+
			"container %s",
			plural(total, "mount"), plural(len(spaces), "namespace"), most,
			cost.read.Round(time.Microsecond), durationOr(cost.copy, cost.copyErr)) + missed
		return nil
	}
}

func durationOr(d time.Duration, err error) string {
	if err != nil {
		return fmt.Sprintf("is unknown (%v)", err)
	}
	return d.Round(time.Microsecond).String()
}

func (m mountCost) figures() []Figure {
	micro := func(name, label string, d time.Duration, err error) Figure {
		if err != nil {
			return unknown(name, label+", microseconds", Count, err.Error())
		}
		return known(name, label+", microseconds", Count, float64(d.Microseconds()), float64(d.Microseconds()))
	}

	return []Figure{
		micro("read_us", "reading the mount table", m.read, nil),
		figure("table", "size of the mount table", Bytes, m.bytes),
		micro("copy_us", "copying it for a namespace", m.copy, m.copyErr),
		micro("mount_us", "mounting a tmpfs", m.mount, errors.Join(m.copyErr, m.mountErr)),
		micro("unmount_us", "unmounting it", m.unmount, errors.Join(m.copyErr, m.mountErr)),
	}
}

// mountKinds are the filesystem types with most mounts.
func mountKinds(table []mount.Entry) []Figure {
	n := map[string]int{}
	for _, m := range table {
		n[m.FSType]++
	}

	var kinds []string
	for k := range n {
		kinds = append(kinds, k)
	}

	slices.SortFunc(kinds, func(a, b string) int {
		if n[a] != n[b] {
			return n[b] - n[a]
		}
		return strings.Compare(a, b)
	})

	var out []Figure
	for _, k := range kinds[:min(len(kinds), 4)] {
		out = append(out, figure("type_"+k, "of type "+k, Count, int64(n[k])))
	}

	return out
}
