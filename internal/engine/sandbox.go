package engine

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/warnings"
	"pando/internal/driver"
	"pando/internal/linux/cgroup"
	"pando/internal/linux/sandbox"

	"golang.org/x/sys/unix"
)

// Networks of a sandbox.
const (
	NetNone = "none" // a loopback device only
	NetHost = "host" // that of the host
)

// Sandbox says how the program of a run is kept apart from the host: see docs/sandbox.md. The zero value is none.
type Sandbox struct {
	Root bool   // the clone is the root filesystem
	Bind string // the clone is at this path, among the programs and libraries of the host, which are read-only

	Show    []string // files and directories of the host that are there too, read-only
	Net     string   // "": NetNone
	User    string   // USER or USER:GROUP, names of the sandbox or numbers; "": that of this process
	Workdir string   // "": the clone
	Limits  Limits
}

// Limits of a sandbox.
type Limits = cgroup.Limits

// On reports whether the program runs in a sandbox.
func (s Sandbox) On() bool { return s.Root || s.Bind != "" }

// minMemory is the smallest limit of memory with which a sandbox starts.
const minMemory = 16 << 20

// notBelow are directories that --bind cannot cover: the sandbox has its own there.
var notBelow = []string{"/", "/proc", "/sys", "/dev", "/etc", "/usr", "/bin", "/sbin", "/lib", "/lib64", "/run", "/tmp"}

// Check returns an error if the options do not go together. Invalid.
func (s *Sandbox) Check(from string) error {
	invalid := func(format string, args ...any) *errs.Error {
		return errs.New(errs.Invalid, opRun, from, format, args...)
	}

	if !s.On() {
		if s.Net != "" || s.User != "" || s.Limits.Any() || len(s.Show) > 0 || s.Workdir != "" {
			return invalid("the network, user, limits and view of a command can only be set in a sandbox").
				WithHint("add %s or %s", errs.Param("root"), errs.Param("bind", "PATH"))
		}
		return nil
	}

	for _, path := range append(slices.Clone(s.Show), s.Bind, s.Workdir) {
		if path != "" && (!filepath.IsAbs(path) || strings.Contains(path, "\x00")) {
			return invalid("%q is not an absolute path", path).WithHint("begin it with /")
		}
	}

	for _, path := range s.Show {
		path = filepath.Clean(path)
		if real := realPath(path); real == "/" || isBelowAny(real, []string{"/proc", "/sys", "/dev"}) {
			return invalid("the sandbox has its own %s", path).WithHint("show it single directories of the host")
		}
	}

	switch {
	case s.Root && s.Bind != "":
		return invalid("the clone cannot be both the root and at %s", s.Bind).
			WithHint("use either %s or %s", errs.Param("root"), errs.Param("bind"))
	case s.Bind != "" && slices.Contains(notBelow, filepath.Clean(s.Bind)):
		return invalid("the sandbox has its own %s", filepath.Clean(s.Bind)).
			WithHint("choose another directory, such as %s", errs.Param("bind", "/work"))
	case s.Net != "" && s.Net != NetNone && s.Net != NetHost:
		return invalid("unknown network %q", s.Net).
			WithHint("use %s or %s", errs.Param("net", NetNone), errs.Param("net", NetHost))
	case s.Limits.MemoryBytes < 0 || s.Limits.MemoryBytes > 0 && s.Limits.MemoryBytes < minMemory:
		return invalid("the memory limit must be at least %s (got %s)", errs.FormatBytes(minMemory),
			errs.FormatBytes(s.Limits.MemoryBytes))
	case s.Limits.CPUs < 0 || s.Limits.CPUs > 0 && s.Limits.CPUs < 0.01:
		return invalid("the number of processors must be at least 0.01 (got %v)", s.Limits.CPUs)
	case s.Limits.PIDs < 0 || s.Limits.PIDs > 0 && s.Limits.PIDs < minPIDs:
		return invalid("the number of processes must be at least %d (got %d)", minPIDs, s.Limits.PIDs)
	}

	return nil
}

// minPIDs is the smallest limit of processes: the threads of the sandbox's first process count too.
const minPIDs = 16

// capabilities are what user 0 of a sandbox can do with files and processes that are its own anyway. With the others,
// such as those of mounting, device nodes, raw sockets and tracing, it could reach the host.
var capabilities = []int{unix.CAP_CHOWN, unix.CAP_DAC_OVERRIDE, unix.CAP_FOWNER, unix.CAP_FSETID, unix.CAP_KILL,
	unix.CAP_SETGID, unix.CAP_SETUID, unix.CAP_NET_BIND_SERVICE}

// hostPrograms are the directories of the host that a sandbox with Bind has.
var hostPrograms = []string{"/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/opt", "/nix/store",
	"/gnu/store"}

// hostSettings are the files of /etc that programs and libraries of the host need. None of them is secret.
var hostSettings = []string{
	"alternatives", "bash.bashrc", "bash_completion.d", "ca-certificates", "ca-certificates.conf",
	"crypto-policies", "debian_version", "fonts", "gai.conf", "group", "host.conf", "hosts", "inputrc",
	"java", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "locale.alias", "locale.conf", "localtime", "magic",
	"mime.types", "nsswitch.conf", "os-release", "passwd", "perl", "pki/ca-trust", "pki/tls/certs",
	"pki/tls/cert.pem", "profile", "profile.d", "protocols", "python3", "redhat-release", "resolv.conf",
	"rpc", "services", "shells", "ssl/cert.pem", "ssl/certs", "ssl/openssl.cnf", "terminfo", "timezone",
	"xattr.conf",
}

// spec describes the sandbox of a run for the launcher, in which the clone is source. pool is the directory of the
// pool, which no sandbox sees; "": the caller cannot read it.
func (s Sandbox) spec(q RunRequest, vol Info, source, pool string) sandbox.Spec {
	out := sandbox.Spec{
		Command: q.Command, Dir: s.Workdir, User: s.User, Hostname: "pando", HostNet: s.Net == NetHost,
		Capabilities: capabilities, Seccomp: true,
	}

	system := []sandbox.Mount{
		{Kind: sandbox.Proc, Target: "/proc"},
		{Kind: sandbox.Sys, Target: "/sys"},
		{Kind: sandbox.Dev, Target: "/dev"},
	}
	if s.Root {
		out.Root, out.Mounts = source, system
		if out.HostNet {
			out.Mounts = append(out.Mounts, fromHost("/etc/resolv.conf"))
		}
	} else {
		out.EmptyRoot, out.Mounts, out.Symlinks = true, nil, nil
		s.addHost(&out)
		out.Mounts = append(out.Mounts, system...)
		out.Env = []string{"HOME=/tmp"} // that of the user's account is not there
		for _, dir := range []string{"/tmp", "/var/tmp", "/run"} {
			out.Mounts = append(out.Mounts, sandbox.Mount{Kind: sandbox.Tmpfs, Target: dir, Options: []string{"mode=1777"}})
		}
		bind := filepath.Clean(s.Bind)
		out.Mounts = append(out.Mounts, sandbox.Mount{Kind: sandbox.Bind, Source: source, Target: bind})
	}

	for _, path := range s.Show {
		m := fromHost(filepath.Clean(path))
		m.Optional = false
		out.Mounts = append(out.Mounts, m)
	}

	visible := s.Show
	if !s.Root {
		visible = append(slices.Clone(hostPrograms), s.Show...)
	}
	for _, at := range seenAt(pool, visible) {
		out.Mounts = append(out.Mounts, sandbox.Mount{Kind: sandbox.Tmpfs, Target: at, ReadOnly: true})
	}

	inside := s.Inside()
	if out.Dir == "" {
		out.Dir = inside
	}
	out.Env = append(append(out.Env, q.Env...), "PANDO_VOLUME="+vol.Name, "PANDO_MOUNT="+inside, "PWD="+out.Dir)
	return out
}

// realPath is a path without symbolic links, or the same path if that cannot be determined.
func realPath(path string) string {
	if real, err := filepath.EvalSymlinks(path); err == nil {
		return real
	}
	return filepath.Clean(path)
}

// seenAt lists the paths at which a directory of the host is in a sandbox that is shown some of the host's paths. These
// may lead to a directory above it by symbolic links.
func seenAt(path string, shown []string) (at []string) {
	if path == "" {
		return nil
	}
	real := realPath(path)
	for _, dir := range shown {
		if !isBelowAny(real, []string{realPath(dir)}) {
			continue
		}
		rest, err := filepath.Rel(realPath(dir), real)
		if seen := filepath.Join(dir, rest); err == nil && !slices.Contains(at, seen) {
			at = append(at, seen)
		}
	}
	return at
}

// isBelowAny reports whether a path is in one of the directories.
func isBelowAny(path string, dirs []string) bool {
	return slices.ContainsFunc(dirs, func(dir string) bool {
		dir = filepath.Clean(dir)
		return path == dir || dir == "/" || strings.HasPrefix(path, dir+"/")
	})
}

// Inside is where the clone is in the sandbox.
func (s Sandbox) Inside() string {
	if s.Root {
		return "/"
	}
	return filepath.Clean(s.Bind)
}

// fromHost is a read-only mount of a path of the host, if it exists.
func fromHost(path string) sandbox.Mount {
	return sandbox.Mount{Kind: sandbox.Bind, Source: path, Target: path, ReadOnly: true, Recursive: true, Optional: true}
}

// addHost adds the programs and libraries of the host.
func (s Sandbox) addHost(out *sandbox.Spec) {
	for _, dir := range hostPrograms {
		if to, err := os.Readlink(dir); err == nil { // /bin is a link to usr/bin
			out.Symlinks = append(out.Symlinks, sandbox.Link{Path: dir, To: to})
			continue
		}
		out.Mounts = append(out.Mounts, fromHost(dir))
	}
	for _, name := range hostSettings {
		out.Mounts = append(out.Mounts, fromHost("/etc/"+name))
	}
}

// runSandboxed runs the program in a sandbox, and returns its exit status as a shell would. When it returns, every
// process of the sandbox has ended, and its control groups are gone.
func (e *Engine) runSandboxed(ctx context.Context, q RunRequest, vol Info) (exit int, err error) {
	if vol.FS == string(driver.None) {
		return 126, errs.New(errs.Invalid, opRun, vol.Name, "a raw volume has no files to run in").
			WithHint("import a directory or a tar archive as a golden")
	}

	o := sandbox.Options{
		Stdin: q.Stdin, Stdout: q.Stdout, Stderr: q.Stderr, Signals: q.Signals, Suspend: q.Suspend,
		Timeout: q.Timeout, Grace: timeoutGrace,
	}

	var group *cgroup.Group
	if q.Sandbox.Limits.Any() {
		g, note, err := e.makeGroup(vol.ID, q.Sandbox.Limits)
		if err != nil {
			return 126, err
		}

		defer func() {
			err = errors.Join(err, e.removeGroup(context.WithoutCancel(ctx), vol.ID))
			note.Close()
		}()

		o.Enter, group = g.Enter, g
	}

	source := vol.Mountpoint
	if q.hide.Mounted() {
		m, err := q.hide.Copy()
		if err != nil {
			return 126, errs.Wrap(opRun, vol.Name, err)
		}
		defer m.Close()
		source, o.Given = sandbox.Given, m.File()
	}

	spec := q.Sandbox.spec(q, vol, source, e.pool.Dir)
	if err := e.withoutRoot(ctx, q.Sandbox, vol, &spec); err != nil {
		return 126, err
	}

	during := ctx
	if q.Signals != nil { // the program decides what to do about the signals that end ctx
		during = context.WithoutCancel(ctx)
	}

	r, err := sandbox.Run(during, spec, o)
	if group != nil && group.KilledForMemory() {
		return explainMemory(ctx, q, r, err)
	}
	return r.Exit, err
}

// exitKilled is the exit status of a program that SIGKILL ended, as of a shell.
const exitKilled = 128 + int(unix.SIGKILL)

// explainMemory says that the kernel has killed processes of a sandbox because of its limit of memory. It may have been
// the first one, which ends all others.
func explainMemory(ctx context.Context, q RunRequest, r sandbox.Result, err error) (int, error) {
	warnings.Add(ctx, "the kernel killed processes of the sandbox, which may use %s of memory; raise the limit with %s",
		errs.FormatBytes(q.Sandbox.Limits.MemoryBytes), errs.Param("memory"))
	if errs.Is(err, errs.Internal) { // it ended without a word
		return exitKilled, nil
	}
	return r.Exit, err
}

// timeoutGrace is how long a program may take to end after a timeout has asked it to.
const timeoutGrace = 10 * time.Second

// groupNote begins the names of the files in which runs note their control groups, so that another command can remove
// them if this process is killed, or cannot. A run holds a lock on its note.
const groupNote = "cgroup-"

func (e *Engine) groupFile(id string) string { return filepath.Join(e.pool.Dir, "locks", groupNote+id) }

// makeGroup makes the control groups of a run, which it notes first. The caller closes the note.
func (e *Engine) makeGroup(id string, l cgroup.Limits) (_ *cgroup.Group, note *os.File, err error) {
	g, err := cgroup.Plan("pando-"+id, l)
	if err != nil {
		return nil, nil, err
	}

	if note, err = lockedFile(e.groupFile(id)); err != nil {
		return nil, nil, errs.Wrap(opRun, id, err)
	}

	b, err := json.Marshal(g)
	if err == nil {
		_, err = note.Write(b)
	}
	if err == nil {
		err = g.Make()
	}
	if err != nil {
		err = errors.Join(err, e.removeGroup(context.Background(), id))
		note.Close()
		return nil, nil, errs.Wrap(opRun, id, err)
	}

	return g, note, nil
}

// lockedFile creates a file with a lock, which ends when the file is closed.
func lockedFile(path string) (*os.File, error) {
	for {
		f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
		if err != nil {
			return nil, err
		}
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX)
		mine, statErr := f.Stat()
		if err = errors.Join(err, statErr); err != nil {
			f.Close()
			return nil, err
		}

		// Another command may have removed it before it was locked.
		if there, err := os.Stat(path); err == nil && os.SameFile(mine, there) {
			return f, nil
		}
		f.Close()
	}
}

// removeLeftGroups removes the control groups of runs that could not remove them.
func (e *Engine) removeLeftGroups(ctx context.Context) {
	entries, err := os.ReadDir(filepath.Join(e.pool.Dir, "locks"))
	if err != nil {
		return
	}

	for _, entry := range entries {
		id, is := strings.CutPrefix(entry.Name(), groupNote)
		if !is {
			continue
		}
		f, err := os.Open(e.groupFile(id))
		if err != nil {
			continue
		}
		if unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil { // else its run goes on
			if err := e.removeGroup(ctx, id); err != nil {
				warnings.Add(ctx, "could not remove a control group: %v", err)
			}
		}
		f.Close()
	}
}

// removeGroup removes the control groups of a run, if it has any, with all processes in them.
func (e *Engine) removeGroup(ctx context.Context, id string) error {
	b, err := os.ReadFile(e.groupFile(id))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return errs.Wrap(opRun, id, err)
	}

	// A note that was not written to its end is older than the groups.
	var g cgroup.Group
	if json.Unmarshal(b, &g) == nil {
		if err := g.Remove(ctx); err != nil {
			return err
		}
	}

	return errs.Wrap(opRun, id, os.Remove(e.groupFile(id)))
}
