package mount

import (
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestParseMountTable(t *testing.T) {
	long := strings.Repeat("/layer:", 20_000)
	table := strings.Join([]string{
		`36 35 98:3 / / rw,noatime - ext3 /dev/root rw`,
		`garbage`,
		``,
		`x 35 98:0 / /bad-id rw - ext3 /dev/root rw`,
		`37 36 0:2567 /a\040b /mnt/c\134d\011e rw shared:7 master:1 propagate_from:2 unbindable - fuse.sshfs me@host:/ rw`,
		`38 36 0:3 / /o rw - overlay overlay rw,lowerdir=` + long,
		`39 36 0:3 / /short rw`,
		`40 36 7:0 mnt:[4026531841] /pin rw - nsfs nsfs rw`,
	}, "\n")
	got, err := parseMountTable(strings.NewReader(table))
	if err != nil {
		t.Fatal(err)
	}
	if len(got) != 4 {
		t.Fatalf("%d entries, want 4: %+v", len(got), got)
	}
	if m := got[0]; m.id != 36 || m.parent != 35 || m.dev != unix.Mkdev(98, 3) || m.root != "/" || m.point != "/" ||
		m.fstype != "ext3" || m.groups != nil {
		t.Errorf("%+v", m)
	}
	m := got[1]
	if m.dev != unix.Mkdev(0, 2567) || m.root != "/a b" || m.point != "/mnt/c\\d\te" || m.fstype != "fuse.sshfs" ||
		m.super != "rw" {
		t.Errorf("%+v", m)
	}
	groups := []string{}
	for g := range m.groups {
		groups = append(groups, g)
	}
	slices.Sort(groups)
	if !slices.Equal(groups, []string{"1", "7"}) {
		t.Errorf("groups %q, want those of shared and master", groups)
	}
	if got[2].super != "rw,lowerdir="+long {
		t.Error("a long line was cut")
	}
	if got[3].root != "mnt:[4026531841]" || got[3].fstype != "nsfs" {
		t.Errorf("%+v", got[3])
	}
}

func TestUnescape(t *testing.T) {
	for in, want := range map[string]string{
		``: ``, `/a`: `/a`, `/a\040b`: `/a b`, `\134`: `\`, `\134040`: `\040`, `/a\`: `/a\`, `/a\04`: `/a\04`, `\999`: `\999`,
		`/\303\251`: `/é`,
	} {
		if got := Unescape(in); got != want {
			t.Errorf("Unescape(%q) = %q, want %q", in, got, want)
		}
	}
}

func TestParseKernelMessage(t *testing.T) {
	for _, c := range []struct {
		record, want string
		ok           bool
	}{
		{"3,437,2047102345,-;EXT4-fs (loop0): VFS: Can't find ext4 filesystem\n SUBSYSTEM=block\n",
			"VFS: Can't find ext4 filesystem", true},
		// facility 3, level 4
		{"28,1,2,-;XFS (loop0): Invalid superblock magic number\n", "Invalid superblock magic number", true},
		{"5,1,2,-;XFS (loop0): Mounting V5 Filesystem\n", "", false},
		{"30,1,2,-;XFS (loop0): Ending clean mount\n", "", false},
		{"3,1,2,-;EXT4-fs (loop01): other device\n", "", false},
		{"3,1,2,-;EXT4-fs (xloop0): other device\n", "", false},
		{"3,1,2,-;something else\n", "", false},
		{"no separator", "", false},
		{";(loop0): no priority", "", false},
		{"", "", false},
	} {
		got, ok := parseKernelMessage(c.record, "(loop0):")
		if got != c.want && c.ok || ok != c.ok {
			t.Errorf("%q: %q, %v, want %q, %v", c.record, got, ok, c.want, c.ok)
		}
	}
}

func TestLayerIn(t *testing.T) {
	for _, c := range []struct{ fstype, super, want string }{
		{"overlay", "rw,lowerdir=/x/1:/vol/2,upperdir=/y", "/vol/2"},
		{"overlay", "rw,lowerdir+=/vol", "/vol"},
		{"overlay", "rw,lowerdir=/volume/1,upperdir=/vo,workdir=/vol/w", ""},
		{"overlay", "rw", ""},
		{"ext4", "rw,lowerdir=/vol/2", ""},
	} {
		if got := layerIn(tableEntry{fstype: c.fstype, super: c.super}, []string{"/other", "/vol"}); got != c.want {
			t.Errorf("%+v: %q", c, got)
		}
	}
}

func TestFormatHolders(t *testing.T) {
	process := func(pid int, how ...string) Holder {
		return Holder{PID: pid, Command: "sh", How: how}
	}
	var many []Holder
	for i := range 9 {
		many = append(many, process(100+i, "cwd"))
	}
	for _, c := range []struct {
		holders []Holder
		want    string
	}{
		{nil, ""},
		{
			[]Holder{
				{PID: 4242, Command: "bash", UID: 1000, How: []string{"cwd"}, MountNS: 1},
				{PID: 4300, Command: "postgres", How: []string{"fd 3 /x/base/1", "fd 4 /x/base/2", "fd 9 /x/base/3"}},
				{PID: 77, Command: "containerd", Mountpoint: "/y", MountNS: 4026532617,
					How: []string{"mounted at /y in mount namespace 4026532617 (pid 77, containerd)"}},
			},
			"held by pid 4242 (bash, uid 1000): cwd; pid 4300 (postgres): 3 open files, e.g. /x/base/1; mounted at /y in " +
				"mount namespace 4026532617 (pid 77, containerd)",
		},
		{
			[]Holder{process(1, "cwd", "root", "exe", "fd 3 /x/a b", "mmap /x/lib.so")},
			"held by pid 1 (sh): cwd, root, exe, fd 3 /x/a b, mapped file /x/lib.so",
		},
		{
			[]Holder{process(1, "mmap /x/1", "mmap /x/2")},
			"held by pid 1 (sh): 2 mapped files, e.g. /x/1",
		},
		{
			// What other people named must not spoil the line.
			[]Holder{{PID: 1, Command: "a?b", How: []string{"fd 3 /x/new\nline\x1b[31m"}},
				{How: []string{"swap file /x/\u202eswap"}}},
			"held by pid 1 (a?b): fd 3 /x/new?line?[31m; swap file /x/?swap",
		},
		{
			append(slices.Clone(many), Holder{How: []string{"mount at /x/y below it"}, Mountpoint: "/x/y"}),
			"held by pid 100 (sh): cwd; pid 101 (sh): cwd; pid 102 (sh): cwd; pid 103 (sh): cwd; pid 104 (sh): cwd; 4 more " +
				"processes; mount at /x/y below it",
		},
		{many[:6], "held by pid 100 (sh): cwd; pid 101 (sh): cwd; pid 102 (sh): cwd; pid 103 (sh): cwd; pid 104 (sh): " +
			"cwd; pid 105 (sh): cwd"},
	} {
		if got := FormatHolders(c.holders); got != c.want {
			t.Errorf("got  %s\nwant %s", got, c.want)
		}
	}
}

func FuzzParseMountLine(f *testing.F) {
	f.Add(`36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue`)
	f.Add(`37 36 0:2567 /a\040b /c\134d rw shared:7 unbindable - fuse.sshfs x rw`)
	f.Add(`1 1 0:1 / / - `)
	f.Fuzz(func(t *testing.T, line string) {
		m, ok := parseMountLine(line)
		if !ok && (m.id != 0 || m.root != "") {
			t.Errorf("not understood, but %+v", m)
		}
	})
}

// BenchmarkKernelLog is what listening to the kernel adds to each mount.
func BenchmarkKernelLog(b *testing.B) {
	for b.Loop() {
		newKernelLog("/dev/loop0").close()
	}
}
