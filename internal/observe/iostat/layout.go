package iostat

import (
	"context"
	"os"
	"slices"
	"strings"

	"pando/internal/base/errs"
	"pando/internal/linux/kernel"
	"pando/internal/linux/mount"
	"pando/internal/linux/zfs"
	"pando/internal/observe/blockdev"
	"pando/internal/observe/stack"

	"golang.org/x/sys/unix"
)

// group is a layer of devices: those below one filesystem or zpool, or the components of one device.
type group struct {
	name  string
	kind  string
	devs  []blockdev.Device
	on    string // the filesystem or zpool on it
	fsdev uint64 // the number of that filesystem in the mount table
	zpool string
	last  bool // no layer is known below
	feeds []feed
}

// feed is a device that writes to a group.
type feed struct {
	name string
	dev  *blockdev.Device
	file string
}

// watched is a target with the layers below it.
type watched struct {
	Target
	stack   *stack.Stack
	mountID uint64 // the mount of its path
	fs      *stack.Layer
	groups  []*group
	own     *group // groups[0], if it has no other writer
	shared  string // the reason if own is nil
	dataset string // of ZFS
	xfs     string // the file of its statistics
	chain   map[string]bool
	sync    syncKey
}

// layout is all targets and the layers below them.
type layout struct {
	targets []*watched
	groups  []*group // shared ones, each once, from the top down
	pools   []string // zpools whose datasets are counted
	devs    map[uint64]blockdev.Device
}

// newLayout finds the layers below targets. It reuses the entries of the old layout that still exist, because there may
// be thousands.
func newLayout(ctx context.Context, targets []Target, old *layout) (*layout, []error) {
	l := &layout{devs: map[uint64]blockdev.Device{}}
	known := map[Target]*watched{}
	if old != nil {
		for _, w := range old.targets {
			known[w.Target] = w
		}
	}

	table, err := mount.Table("self")
	if err != nil {
		return l, []error{errs.Wrap(op, "", err)}
	}

	var failures []error
	for _, t := range targets {
		if w := known[t]; w != nil && w.same() {
			l.targets = append(l.targets, w)
			continue
		}
		w, err := watch(ctx, table, t)
		if err != nil {
			failures = append(failures, err)
			continue
		}
		l.targets = append(l.targets, w)
	}

	feeds := findFeeds(table)
	byName := map[string]*group{}
	for _, w := range l.targets {
		for i, g := range w.groups {
			for _, d := range g.devs {
				l.devs[d.Number] = d
			}

			if g == w.own {
				continue
			}

			if known := byName[g.name]; known != nil {
				w.groups[i] = known
				continue
			}

			byName[g.name] = g
			g.feeds = feeds.of(g)
			for _, f := range g.feeds {
				l.devs[f.dev.Number] = *f.dev
			}

			l.groups = append(l.groups, g)
			if g.zpool != "" && !slices.Contains(l.pools, g.zpool) {
				l.pools = append(l.pools, g.zpool)
			}
		}
	}

	l.sort()
	return l, failures
}

// sort puts upper layers before lower ones.
func (l *layout) sort() {
	depth := map[*group]int{}
	for _, w := range l.targets {
		for i, g := range w.groups {
			depth[g] = max(depth[g], i)
		}
	}
	slices.SortStableFunc(l.groups, func(a, b *group) int { return depth[a] - depth[b] })
}

// watch finds the layers below a target.
func watch(ctx context.Context, table []mount.Entry, t Target) (*watched, error) {
	s, err := stack.In(ctx, table, t.Path)
	if err != nil {
		return nil, err
	}

	if t.Only {
		var st unix.Stat_t
		link := unix.Lstat(t.Path, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFLNK
		if top := s.Layers; !link && (len(top) == 0 || top[0].Device == nil && top[0].Mount.Point != s.Path) {
			return nil, errs.New(errs.NotFound, op, t.Name, "nothing is mounted at %s in this mount namespace", t.Path).
				WithHint("run this in the mount namespace where it is mounted")
		}
	}

	if len(s.Devices()) == 0 {
		return nil, unsupported(t.Path, s.Hidden)
	}

	w := &watched{Target: t, stack: s, chain: map[string]bool{}}
	if w.mountID, err = mountID(s.Path); err != nil {
		return nil, errs.Wrap(op, t.Path, err)
	}

	bottom := map[string]bool{}
	for _, d := range s.Bottom() {
		bottom[d.Name] = true
	}

	byParent := map[int]*group{}
	for i, d := range s.Layers {
		if d.Device == nil || d.Role == "cache" || d.Role == "spare" { // it only has copies of other data
			continue
		}

		above := s.Above(i)
		g := byParent[above]
		if g == nil {
			g = &group{kind: string(d.Kind)}
			byParent[above] = g
			w.groups = append(w.groups, g)
			if above >= 0 {
				switch p := s.Layers[above]; {
				case p.Kind == stack.Zpool:
					g.on, g.zpool = p.Name, zfs.PoolOf(p.Dataset)
				case p.Device == nil:
					g.on, g.fsdev = p.Name, p.Mount.Dev
				}
			}
		}

		g.devs = append(g.devs, *d.Device)
		g.last = g.last || bottom[d.Name]
		w.chain[d.Name] = true
	}

	for _, g := range w.groups {
		var names []string
		for _, d := range g.devs {
			names = append(names, d.Name)
		}
		g.name = strings.Join(names, "+")
	}

	for i := range s.Layers {
		if l := &s.Layers[i]; l.Dataset != "" && l.Kind != stack.Zpool {
			w.dataset = l.Dataset
			w.chain[l.Dataset] = true
		}
	}

	w.owner(s)
	w.sync = w.syncKey()
	return w, nil
}

// owner decides whether the first devices have no other writer.
func (w *watched) owner(s *stack.Stack) {
	top := &s.Layers[0]
	if top.Device != nil {
		w.own = w.groups[0]
		return
	}

	w.fs = top
	switch {
	case top.Kind == stack.Overlay:
		w.shared = "an overlay shares the filesystem of its upper directory"
	case top.FSType == "zfs":
		w.shared = "datasets share the devices of the zpool"
	case w.Only && top.Mount.Point != s.Path:
		w.shared = "the target is a directory of a filesystem: " + top.Name
	case top.Mount.Root != "/":
		w.shared = "the target is a part (" + top.Mount.Root + ") of a filesystem: " + top.FSType + " on " + w.groups[0].name
	default:
		w.own = w.groups[0]
		if top.FSType == "xfs" && len(w.own.devs) == 1 {
			file := "/sys/fs/xfs/" + w.own.devs[0].Name + "/stats/stats"
			if _, err := os.Stat(file); err == nil {
				w.xfs = file
			}
		}
	}
}

// same reports whether the path still leads to the same mount.
func (w *watched) same() bool {
	id, err := mountID(w.stack.Path)
	return err == nil && id == w.mountID
}

// mountID returns the ID of the mount of a path.
func mountID(path string) (uint64, error) {
	m, err := kernel.MountAt(unix.AT_FDCWD, path)
	return m.ID, err
}

// feeders are all devices, by the layer they write to.
type feeders struct {
	devices map[uint64][]feed // partitions and mappers, by the device below
	loops   map[uint64][]feed // by the device number of their file's filesystem
}

// findFeeds finds all devices that write to other layers. Writes of devices it cannot see count as the rest.
func findFeeds(table []mount.Entry) feeders {
	f := feeders{map[uint64][]feed{}, map[uint64][]feed{}}
	all, err := blockdev.List()
	if err != nil {
		return f
	}

	for _, d := range all {
		one := feed{name: d.Name, dev: &d}
		if d.Kind == blockdev.Loop {
			one.file = d.Backing
			if m, ok := mount.At(table, d.Backing); ok {
				f.loops[m.Dev] = append(f.loops[m.Dev], one)
			}
			continue
		}

		below, err := d.Below()
		if err != nil {
			continue
		}

		for _, b := range below {
			f.devices[b.Number] = append(f.devices[b.Number], one)
		}
	}

	return f
}

func (f feeders) of(g *group) []feed {
	var out []feed
	for _, d := range g.devs {
		out = append(out, f.devices[d.Number]...)
	}
	if g.fsdev != 0 {
		out = append(out, f.loops[g.fsdev]...)
	}
	return out
}
