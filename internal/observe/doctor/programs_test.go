package doctor

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"pando/internal/testing/testfs"

	"golang.org/x/sys/unix"
)

// TestProgramsMissing: a child for which there are no programs at all, with a pool that
// needs some and without; and this process, which has those that its tests run.
func TestProgramsMissing(t *testing.T) {
	rootOnly(t)
	fam, _ := distribution(osRelease())
	if installers[fam] == "" {
		t.Skip("SKIPPED: the distribution of this host is not known")
	}
	for _, c := range []struct {
		driver, needed string
	}{{"", ""}, {"reflink", "mkfs.ext4 e2fsck resize2fs mkfs.xfs"}, {"zfs", "zfs zpool"}, {"btrfs", ""}} {
		child := startRole(t, "programs", inOwnMounts, c.driver)
		r := decode(t, []byte(child.said))
		child.end()
		s, text := r.about("programs-missing", "")
		if s != Note || !strings.Contains(text, "fio") || !strings.Contains(text, installers[fam]+" ") {
			t.Errorf("%s: %q %s", c.driver, s, text)
		}
		s, text = r.about("programs-needed", "")
		if (s == Warning) != (c.needed != "") {
			t.Errorf("%s: %q %s", c.driver, s, text)
		}
		for _, name := range strings.Fields(c.needed) {
			if !strings.Contains(text, "{"+name+" ") {
				t.Errorf("%s needs %s: %s", c.driver, name, text)
			}
		}
	}
	r := checkNow(t, programsCheck,
		&host{Pool: &PoolFacts{Dir: "/pool", Driver: "reflink", Data: testfs.XFS(t, 1)}})
	if s, text := r.about("programs-needed", ""); s != "" {
		t.Errorf("here: %s", text)
	}
	if s, text := r.about("features-needed", ""); s != "" {
		t.Errorf("here: %s", text)
	}
	if value(r.Measured, "programs") < 5 || value(r.Measured, "features") < 4 {
		t.Errorf("%+v", r.Measured)
	}
}

// TestFeaturesMissing: filesystems that cannot share blocks, that the kernel does not
// have, and features that it has.
func TestFeaturesMissing(t *testing.T) {
	rootOnly(t)
	for _, c := range []struct {
		dir  string
		want bool
	}{{testfs.Ext4(t, 16<<20), false}, {testfs.Tmpfs(t, 1<<20), false}, {testfs.XFS(t, 1), true}, {testfs.Btrfs(t, 1),
		true}} {
		q := &host{Pool: &PoolFacts{Dir: c.dir, Driver: "reflink", Data: c.dir}}
		s, text := checkNow(t, programsCheck, q).about("features-needed", c.dir)
		if (s == "") != c.want {
			t.Errorf("%s: %q %s", c.dir, s, text)
		}
	}
	if why := lacksFilesystem("no-such-filesystem"); why == "" {
		t.Error("the kernel has a filesystem that there is not")
	}
	for name, why := range map[string]string{"ext4": lacksFilesystem("ext4"), "xfs": lacksFilesystem("xfs"),
		"loop": lacksLoop(), "fsopen": lacksFsopen()} {
		if why != "" {
			t.Errorf("%s: %s, but the tests use it", name, why)
		}
	}
	// Where the unified hierarchy says that it has the controller, it is found.
	b, err := os.ReadFile("/sys/fs/cgroup/cgroup.controllers")
	if err == nil && strings.Contains(" "+strings.TrimSpace(string(b))+" ", " io ") && lacksCgroupIO() != "" {
		t.Errorf("controllers %s: %s", b, lacksCgroupIO())
	}
}

// TestDistributions: each gets the command that it has, with its names of packages.
func TestDistributions(t *testing.T) {
	for _, c := range []struct{ release, want string }{
		{"ID=debian\nPRETTY_NAME=\"Debian GNU/Linux 12\"\n", "apt-get install e2fsprogs btrfs-progs fio"},
		{"ID=ubuntu\nID_LIKE=debian\n", "apt-get install e2fsprogs btrfs-progs fio"},
		{"ID=linuxmint\nID_LIKE=\"ubuntu debian\"\n", "apt-get install e2fsprogs btrfs-progs fio"},
		{"ID=\"rocky\"\nID_LIKE=\"rhel centos fedora\"\n", "dnf install e2fsprogs btrfs-progs fio"},
		{"ID=arch\n", "pacman -S e2fsprogs btrfs-progs fio"},
		{"ID=alpine\n", "apk add e2fsprogs e2fsprogs-extra btrfs-progs fio"},
		{"ID=\"opensuse-leap\"\nID_LIKE=\"suse opensuse\"\n", "zypper install e2fsprogs btrfsprogs fio"},
		{"ID=nixos\n", ""},
		{"", ""},
	} {
		fam, _ := distribution(c.release)
		steps := install(fam, []string{"e2fsprogs", "btrfs-progs", "fio"})
		if got := strings.Join(steps[0].Commands, ";"); got != c.want {
			t.Errorf("%q: %q, not %q", c.release, got, c.want)
		}
		if c.want == "" && !strings.Contains(steps[0].Text, "fio") {
			t.Errorf("%q: %+v", c.release, steps)
		}
	}
}

func init() {
	// Mounts of its own hide all programs.
	roles["programs"] = func(args []string, ready func(string)) error {
		empty, err := os.MkdirTemp("", "pando-empty-")
		if err != nil {
			return err
		}
		defer os.Remove(empty)
		for _, dir := range []string{"/usr/sbin", "/sbin"} {
			if err := unix.Mount(empty, dir, "", unix.MS_BIND, ""); err != nil {
				return err
			}
		}
		os.Setenv("PATH", filepath.Join(empty, "none"))
		q := &host{}
		if args[0] != "" {
			q.Pool = &PoolFacts{Dir: empty, Driver: args[0], Loop: args[0] == "reflink", Data: empty}
		}
		c := Report{Measured: []Figure{}, Findings: []Finding{}}
		ctx, stop := testContext()
		defer stop()
		if err := programsCheck(ctx, q, &c); err != nil {
			return err
		}
		b, err := json.Marshal(c)
		if err != nil {
			return err
		}
		ready(string(b))
		for _, dir := range []string{"/usr/sbin", "/sbin"} {
			_ = unix.Unmount(dir, unix.MNT_DETACH)
		}
		return nil
	}
}
