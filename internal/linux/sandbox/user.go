package sandbox

import (
	"bufio"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"

	"pando/internal/base/errs"

	"golang.org/x/sys/unix"
)

// accountBytes is how much of /etc/passwd and /etc/group is read.
const accountBytes = 4 << 20

// user is who the program is.
type user struct {
	uid, gid int
	groups   []int
	keep     bool // groups: leave them as they are
	name     string
	home     string // ""
}

// findUser returns the user of a spec. It reads the accounts of the sandbox, whose root this process has entered.
func findUser(s Spec) (user, error) {
	if s.User == "" {
		u := user{uid: os.Geteuid(), gid: os.Getegid(), groups: s.Groups, keep: s.UserNS != nil && len(s.Groups) == 0}
		for _, f := range accounts("/etc/passwd", 6) {
			if f[2] == strconv.Itoa(u.uid) {
				u.name, u.home = f[0], f[5]
				break
			}
		}
		return u, nil
	}

	name, group, hasGroup := strings.Cut(s.User, ":")
	u := user{}
	uid, err := parseID(name)
	known := false
	for _, f := range accounts("/etc/passwd", 6) {
		if f[0] == name || err == nil && f[2] == name {
			var e1, e2 error
			u.uid, e1 = parseID(f[2])
			u.gid, e2 = parseID(f[3])
			if e1 == nil && e2 == nil {
				name, known = f[0], true
				u.name, u.home = f[0], f[5]
				break
			}
		}
	}

	switch {
	case known:
	case err == nil:
		u.uid, u.gid = uid, uid
	default:
		return u, errs.New(errs.NotFound, opSandbox, name, "no such user in the sandbox's /etc/passwd").
			WithHint("use a number, such as 1000:1000")
	}

	if hasGroup {
		u.gid, err = findGroup(group)
		return u, err
	}

	for _, f := range accounts("/etc/group", 4) {
		if gid, err := parseID(f[2]); err == nil && known && contains(f[3], name) {
			u.groups = append(u.groups, gid)
		}
	}

	return u, nil
}

// parseID reads the number of a user or group. The last one of 32 bits tells the kernel to change nothing, and of
// larger ones it sees 32 bits only: both would leave the program user 0.
func parseID(s string) (int, error) {
	id, err := strconv.ParseUint(s, 10, 32)
	if err == nil && id == math.MaxUint32 {
		err = strconv.ErrRange
	}
	return int(id), err
}

func findGroup(name string) (int, error) {
	if gid, err := parseID(name); err == nil {
		return gid, nil
	}
	for _, f := range accounts("/etc/group", 3) {
		if gid, err := parseID(f[2]); f[0] == name && err == nil {
			return gid, nil
		}
	}
	return 0, errs.New(errs.NotFound, opSandbox, name, "no such group in the sandbox's /etc/group").
		WithHint("use a number")
}

func contains(list, name string) bool {
	for entry := range strings.SplitSeq(list, ",") {
		if entry == name {
			return true
		}
	}
	return false
}

// accounts returns the lines of a file with accounts that have at least n fields. The file belongs to the sandbox, so
// it may be anything: what is not a regular file counts as empty.
func accounts(path string, n int) (lines [][]string) {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil
	}

	f := os.NewFile(uintptr(fd), path)
	defer f.Close()
	if st, err := f.Stat(); err != nil || !st.Mode().IsRegular() {
		return nil
	}

	r := bufio.NewScanner(io.LimitReader(f, accountBytes))
	for r.Scan() {
		if fields := strings.Split(r.Text(), ":"); len(fields) >= n {
			lines = append(lines, fields)
		}
	}
	return lines
}

// takePipes gives the pipes among the standard files to the user, who could not open /dev/stdout otherwise. A pipe with
// a name belongs to whoever made it.
func (u user) takePipes() {
	for fd := range 3 {
		if isAnonymousPipe(fd) {
			_ = unix.Fchown(fd, u.uid, -1) // impossible for a user who is not mapped
		}
	}
}

// become makes this thread, and the program that it starts, this user without privileges. Other threads keep theirs.
func (u user) become(s Spec) error {
	var kept capabilities
	if u.uid == 0 {
		kept = capabilitySet(s.Capabilities)
	}

	u.takePipes()

	// Show the program no control groups but its own.
	if err := unix.Unshare(unix.CLONE_NEWCGROUP); err != nil && err != unix.EINVAL { // a kernel without control groups
		return fmt.Errorf("unshare: %w", err)
	}

	if err := dropBounding(kept); err != nil {
		return err
	}

	// Raw system calls: those of package unix change all threads.
	if err := u.changeIDs(); err != nil {
		return err
	}
	if err := setCapabilities(kept); err != nil {
		return err
	}

	// A keyring of its own, not that of the caller's session; kernels without keyrings have none to share.
	_, _ = unix.KeyctlJoinSessionKeyring("")

	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("no_new_privs: %w", err)
	}

	if s.Seccomp {
		if s.HostNet {
			if err := scopeSockets(); err != nil {
				return err
			}
		}
		return loadFilter()
	}

	return nil
}

func (u user) changeIDs() error {
	if !u.keep {
		groups := make([]uint32, len(u.groups)+1)
		for i, g := range u.groups {
			groups[i] = uint32(g)
		}
		if e := setGroups(groups[:len(u.groups)]); e != 0 && e != unix.EPERM || e == unix.EPERM && len(u.groups) > 0 {
			return fmt.Errorf("setgroups: %w", e)
		}
	}

	for _, change := range []struct {
		call   string
		number uintptr
		id     int
	}{{"setresgid", unix.SYS_SETRESGID, u.gid}, {"setresuid", unix.SYS_SETRESUID, u.uid}} {
		id := uintptr(change.id)
		if _, _, e := unix.RawSyscall(change.number, id, id, id); e != 0 {
			return explainID(change.call, change.id, e)
		}
	}

	return nil
}

func explainID(call string, id int, err error) error {
	e := errs.Wrap(opSandbox, strconv.Itoa(id), fmt.Errorf("%s: %w", call, err)).(*errs.Error)
	if err == unix.EINVAL {
		return e.WithHint("the user namespace does not have this ID: add ranges to /etc/subuid and /etc/subgid")
	}
	return e
}

// environment adds what a login would set.
func (u user) environment(env []string) []string {
	has := func(name string) bool {
		for _, entry := range env {
			if strings.HasPrefix(entry, name+"=") {
				return true
			}
		}
		return false
	}

	// Of several values of a variable, the last one counts.
	out := make([]string, 0, len(env)+2)
	for i, entry := range env {
		name, _, _ := strings.Cut(entry, "=")
		again := func(later string) bool { return strings.HasPrefix(later, name+"=") }
		if !slices.ContainsFunc(env[i+1:], again) {
			out = append(out, entry)
		}
	}
	if !has("HOME") {
		home := u.home
		if home == "" {
			home = "/"
		}
		out = append(out, "HOME="+home)
	}
	if u.name != "" && !has("USER") {
		out = append(out, "USER="+u.name)
	}
	return out
}
