package doctor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"pando/internal/base/errs"
	"pando/internal/linux/kernel"
	"pando/internal/linux/mount"
	"pando/internal/linux/run"
	"pando/internal/linux/zfs"
	"pando/internal/observe/tracepoint"

	"golang.org/x/sys/unix"
)

// program is a program that Pando, its benchmarks or the commands of doctor run.
type program struct {
	name string
	use  string                // what needs it
	pkg  string                // Debian's package
	pool func(*PoolFacts) bool // reports whether a pool requires it; nil: no pool does
}

// family is a kind of Linux distribution.
type family string

const (
	debian family = "debian"
	fedora family = "fedora"
	arch   family = "arch"
	alpine family = "alpine"
	suse   family = "suse"
)

// installers are the commands that install packages.
var installers = map[family]string{debian: "apt-get install", fedora: "dnf install", arch: "pacman -S",
	alpine: "apk add", suse: "zypper install"}

// packageNames maps Debian's packages to names that differ elsewhere.
var packageNames = map[string]map[family]string{
	"btrfs-progs":    {suse: "btrfsprogs"},
	"zfsutils-linux": {fedora: "zfs", arch: "zfs-utils", alpine: "zfs", suse: "zfs"},
	"e2fsprogs":      {alpine: "e2fsprogs e2fsprogs-extra"},
	"nvme-cli":       {},
}

// packageNotes says where packages are that are not in a distribution's default repositories.
var packageNotes = map[string]map[family]string{
	"zfsutils-linux": {
		debian: "on Debian it is in the section contrib, with the module in zfs-dkms",
		fedora: "it is in OpenZFS's own repository: https://openzfs.github.io/openzfs-docs/Getting%20Started/",
		arch:   "it is in the AUR or in the archzfs repository",
		suse:   "it is in the repository filesystems",
	},
}

func onReflink(p *PoolFacts) bool { return p.Driver == "reflink" }
func onLoop(p *PoolFacts) bool    { return p.Loop }
func onZFS(p *PoolFacts) bool     { return p.Driver == "zfs" }
func onImages(p *PoolFacts) bool  { return p.Driver == "reflink" || p.Driver == "zfs" }

var programs = []program{
	{"mkfs.ext4", "making ext4 inside images", "e2fsprogs", onImages},
	{"e2fsck", "checking ext4 inside images: `pando fsck`", "e2fsprogs", onImages},
	{"resize2fs", "clones that are larger than their golden", "e2fsprogs", onImages},
	{"mkfs.xfs", "loop-backed pools, and XFS inside images", "xfsprogs", onLoop},
	{"xfs_repair", "checking XFS inside images: `pando fsck`", "xfsprogs", nil},
	{"mkfs.btrfs", "creating a btrfs for a pool", "btrfs-progs", nil},
	{"btrfs", "inspecting a btrfs and its qgroups", "btrfs-progs", nil},
	{"zfs", "pools on ZFS", "zfsutils-linux", onZFS},
	{"zpool", "pools on ZFS", "zfsutils-linux", onZFS},
	{"fio", "`pando bench sync`", "fio", nil},
	{"losetup", "commands that doctor recommends", "util-linux", nil},
	{"findmnt", "commands that doctor recommends", "util-linux", nil},
	{"nsenter", "commands that doctor recommends", "util-linux", nil},
	{"sysctl", "commands that doctor recommends", "procps", nil},
}

// distribution parses os-release(5). It returns the family, "" if it is unknown, and the name for people.
func distribution(text string) (family, string) {
	v := map[string]string{}
	for line := range strings.Lines(text) {
		k, val, ok := strings.Cut(strings.TrimSpace(line), "=")
		if ok {
			v[k] = strings.Trim(val, `"'`)
		}
	}

	for _, id := range append([]string{v["ID"]}, strings.Fields(v["ID_LIKE"])...) {
		switch id {
		case "debian", "ubuntu":
			return debian, v["PRETTY_NAME"]
		case "fedora", "rhel", "centos", "rocky", "almalinux", "amzn":
			return fedora, v["PRETTY_NAME"]
		case "arch", "manjaro":
			return arch, v["PRETTY_NAME"]
		case "alpine":
			return alpine, v["PRETTY_NAME"]
		case "suse", "opensuse", "opensuse-leap", "opensuse-tumbleweed", "sles":
			return suse, v["PRETTY_NAME"]
		}
	}

	return "", v["PRETTY_NAME"]
}

// install returns the step that installs packages, which are named as on Debian.
func install(f family, pkgs []string) []Step {
	if installers[f] == "" {
		return []Step{{Text: "install these packages, which may have other names on this system: " +
			strings.Join(pkgs, ", ")}}
	}

	var names, notes []string
	for _, p := range pkgs {
		name := p
		if n := packageNames[p][f]; n != "" {
			name = n
		}
		names = append(names, name)
		if n := packageNotes[p][f]; n != "" {
			notes = append(notes, name+": "+n)
		}
	}

	text := "install them"
	if len(notes) > 0 {
		text += " (" + strings.Join(notes, "; ") + ")"
	}

	return []Step{step(text, installers[f]+" "+strings.Join(names, " "))}
}

// osRelease returns this host's os-release file; "" if it has none.
func osRelease() string {
	if t := readText("/etc/os-release"); t != "" {
		return t
	}
	return readText("/usr/lib/os-release")
}

// missing collects programs or features that this host lacks.
type missing struct {
	figures []Figure
	pkgs    []string // of programs
	do      []Step   // for features
}

// programsCheck looks for programs and kernel features that the pool requires or that some commands use.
func programsCheck(_ context.Context, q *host, c *Report) error {
	fam, pretty := distribution(osRelease())
	found := c.findMissingPrograms(q.Pool, fam)
	have, all := c.findMissingFeatures(q.Pool)

	var u unix.Utsname
	_ = unix.Uname(&u)
	c.measure(words("system", "system", pretty),
		words("kernel", "kernel", unix.ByteSliceToString(u.Release[:])),
		count("programs", "programs found", found), count("features", "features found", have))
	c.Summary = fmt.Sprintf("found %d of %d programs and %d of %d kernel features", found, len(programs), have, all)
	return nil
}

// requires reports whether a pool needs a program or feature; p is nil if there is no pool.
func (p *PoolFacts) requires(needs func(*PoolFacts) bool) bool {
	return p != nil && needs != nil && needs(p)
}

// findMissingPrograms reports missing programs, and returns the number of those that it found.
func (c *Report) findMissingPrograms(pool *PoolFacts, f family) (found int) {
	var needed, other missing
	for _, p := range programs {
		if _, err := run.Look(p.name); err == nil {
			found++
			continue
		}
		m := &other
		if pool.requires(p.pool) {
			m = &needed
		}
		m.figures = append(m.figures, words(p.name, p.name, "for "+p.use))
		if !slices.Contains(m.pkgs, p.pkg) {
			m.pkgs = append(m.pkgs, p.pkg)
		}
	}

	if len(needed.pkgs) > 0 {
		c.find(Finding{Code: "programs-needed", Severity: Warning, Subject: pool.Dir,
			Title: "programs required by the pool are missing", Measured: needed.figures,
			Why: "Commands that need them fail.", Do: install(f, needed.pkgs)})
	}

	if len(other.pkgs) > 0 {
		c.find(Finding{Code: "programs-missing", Severity: Note,
			Title:    fmt.Sprintf("%s missing, used by some commands", errs.Plural(len(other.figures), "program")),
			Measured: other.figures,
			Why:      "Only the features that need them are unavailable.", Do: install(f, other.pkgs)})
	}

	return found
}

// findMissingFeatures reports missing kernel features, and returns how many of all it found.
func (c *Report) findMissingFeatures(pool *PoolFacts) (have, all int) {
	var needed, other missing
	list := features()
	for _, f := range list {
		why := f.lacks()
		if why == "" {
			have++
			continue
		}

		m := &other
		if pool.requires(f.pool) {
			m = &needed
		}

		step := Step{Text: f.name + ": " + f.remedy}
		if f.command != "" {
			step.Commands = []string{f.command}
		}

		m.figures = append(m.figures, words(f.name, f.name, fmt.Sprintf("%s: for %s", why, f.use)))
		m.do = append(m.do, step)
	}

	// A filesystem can lack reflinks even if the kernel has the feature.
	if pool != nil && pool.Driver == "reflink" && pool.Trouble == nil {
		if why := lacksReflink(pool.Data); why != "" {
			needed.figures = append(needed.figures, words("reflink", "FICLONE", why))
			needed.do = append(needed.do,
				Step{Text: "FICLONE: the pool's filesystem must be XFS made with reflink=1, btrfs or bcachefs; move the pool " +
					"(push it to a remote, and pull it into a new one)"})
		}
	}

	if len(needed.do) > 0 {
		c.find(Finding{Code: "features-needed", Severity: Warning, Subject: pool.Dir,
			Title: "kernel features required by the pool are missing", Measured: needed.figures,
			Why: "Commands that need them fail.", Do: needed.do})
	}

	if len(other.do) > 0 {
		c.find(Finding{Code: "features-missing", Severity: Note,
			Title:    fmt.Sprintf("%s missing, used by some commands", errs.Plural(len(other.do), "kernel feature")),
			Measured: other.figures,
			Why:      "Only the commands that use them are unavailable, or report less detail.", Do: other.do})
	}

	return have, len(list)
}

// feature is a feature of the kernel that Pando uses.
type feature struct {
	name    string
	use     string        // what needs it
	lacks   func() string // why it is missing; "" if it is not
	remedy  string
	command string                // that follows the remedy; "" if there is none
	pool    func(*PoolFacts) bool // reports whether a pool requires it; nil: no pool does
}

// features returns the features that programsCheck looks for.
func features() []feature {
	fsFeature := func(fs, use string, pool func(*PoolFacts) bool) feature {
		return feature{name: fs, use: use, lacks: func() string {
			return lacksFilesystem(fs)
		}, remedy: "load the module, or use a kernel that includes it", command: "modprobe " + fs, pool: pool}
	}

	return []feature{
		fsFeature("ext4", "volumes with ext4 inside", onImages),
		fsFeature("xfs", "loop-backed pools, volumes with XFS inside", onLoop),
		fsFeature("btrfs", "pools on btrfs", func(p *PoolFacts) bool { return p.Driver == "btrfs" }),
		{"zfs", "pools on ZFS", func() string {
			if zfs.Available() == nil || lacksFilesystem("zfs") == "" {
				return ""
			}
			return "the module is missing"
		}, "install the module for this kernel, and load it", "modprobe zfs", onZFS},
		{"loop", "volumes on image files", lacksLoop, "load the module", "modprobe loop", onReflink},
		{"fsopen", "mounting without reading the mount table", lacksFsopen,
			"use Linux 5.2 or newer; in a container, its seccomp profile may forbid the call", "", func(*PoolFacts) bool {
				return true
			}},
		{"tracepoints", "counting flushes at each layer: `pando bench sync`, `pando iostat`", func() string {
			if err := tracepoint.Available(); err != nil {
				return err.Error()
			}
			return ""
		}, "run as root, on a kernel with CONFIG_PERF_EVENTS and block tracepoints", "", nil},
		{"cgroup-io", "who writes, by cgroup: `pando diagnose`", lacksCgroupIO,
			"boot with systemd.unified_cgroup_hierarchy=1, and enable the io controller", "echo +io > " +
				"/sys/fs/cgroup/cgroup.subtree_control", nil},
		{"psi", "how long tasks wait for I/O and memory: `pando diagnose`", func() string {
			if _, err := os.ReadFile("/proc/pressure/io"); err != nil {
				return "/proc/pressure/io cannot be read"
			}
			return ""
		}, "boot with psi=1", "", nil},
	}
}

// lacksFilesystem returns why a filesystem type is missing; "" if it is in the kernel, or a module that can be loaded.
func lacksFilesystem(name string) string {
	for line := range strings.Lines(readText("/proc/filesystems")) {
		if f := strings.Fields(line); len(f) > 0 && f[len(f)-1] == name {
			return ""
		}
	}
	if hasModule(name) {
		return ""
	}
	return noModule
}

// hasModule reports whether the running kernel has a module: loaded, built in, or installed.
func hasModule(name string) bool {
	if _, err := os.Stat("/sys/module/" + name); err == nil {
		return true
	}

	var u unix.Utsname
	if unix.Uname(&u) != nil {
		return false
	}

	dir := filepath.Join("/lib/modules", unix.ByteSliceToString(u.Release[:]))
	for _, list := range []string{"modules.builtin", "modules.dep"} {
		for line := range strings.Lines(readText(filepath.Join(dir, list))) {
			path, _, _ := strings.Cut(strings.TrimSpace(line), ":")
			base, _, _ := strings.Cut(filepath.Base(path), ".ko")
			if base == name {
				return true
			}
		}
	}

	return false
}

// noModule is why a feature is missing that could be a module.
const noModule = "not in the kernel, and its module is missing"

func lacksLoop() string {
	if _, err := os.Stat("/dev/loop-control"); err == nil || hasModule("loop") {
		return ""
	}
	return noModule
}

func lacksFsopen() string {
	fd, err := unix.Fsopen("tmpfs", unix.FSOPEN_CLOEXEC)
	if err == nil {
		unix.Close(fd)
		return ""
	}

	if errors.Is(err, unix.ENOSYS) {
		return "the kernel lacks it"
	}
	if errors.Is(err, unix.EPERM) && !isRoot() {
		return "" // the kernel has it, and root may use it
	}

	return err.Error()
}

func lacksCgroupIO() string {
	table, err := mount.Table("self")
	if err != nil {
		return err.Error()
	}
	for _, m := range table {
		if m.FSType == "cgroup2" && slices.Contains(strings.Fields(readText(filepath.Join(m.Point, "cgroup.controllers"))),
			"io") {
			return ""
		}
	}
	return "no cgroup v2 with the controller io is mounted"
}

// lacksReflink returns why files in a directory cannot share blocks; "" if they can, or if an XFS does not say. It asks
// the filesystem, and writes nothing.
func lacksReflink(dir string) string {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return err.Error()
	}

	const bcachefs = 0xca451a4e
	switch uint32(st.Type) {
	case unix.BTRFS_SUPER_MAGIC, bcachefs, unix.OCFS2_SUPER_MAGIC:
		return ""
	case unix.XFS_SUPER_MAGIC:
		f, err := os.Open(dir)
		if err != nil {
			return err.Error()
		}
		defer f.Close()
		ok, err := kernel.XFSReflinks(f)
		if err != nil || ok {
			return ""
		}
		return "this XFS was made without reflink=1"
	}

	return fmt.Sprintf("the pool is on a filesystem (type %#x) whose files cannot share blocks", st.Type)
}
