// Package sandbox runs a program in namespaces of its own: mounts, processes, IPC, host name and, unless the
// caller wants the host's, network; with a user namespace it works without root.
//
// Run starts this program again as the first process of the sandbox (its init), which makes the mounts, gives up
// privileges and starts the program. The init dies with the process that called Run, however that ends, and with the
// init the kernel kills every process of the sandbox. Mounts of the sandbox exist only in its own mount namespace, so
// nothing of them is left behind. The package needs Linux 5.12.
package sandbox

import (
	"os"
	"time"
)

// Spec says what to run, and what it sees. All paths are absolute and clean. The init gets a copy.
type Spec struct {
	// Command is the program and its arguments. A name without a slash is looked up in the PATH of Env, in the sandbox.
	Command []string
	Env     []string // the whole environment, but for HOME and USER, which the init adds if they are missing
	Dir     string   // working directory in the sandbox; "": its root
	Groups  []int    // supplementary groups, if User is not set

	// User is USER or USER:GROUP, each a name in the sandbox's /etc/passwd and /etc/group or a number. "": the user and
	// group of the init: that of the caller, or what UserNS maps it to.
	User string

	// Root is the host's directory that becomes the root, without the mounts below it, or Given. "": the host's tree,
	// changed by Mounts only; with EmptyRoot an empty filesystem in memory, which is read-only once Mounts are made.
	Root string

	// RootOverlay are the Options of an Overlay that becomes the root in place of Root.
	RootOverlay []string
	EmptyRoot   bool
	Mounts      []Mount // in this order
	Symlinks    []Link  // made in an empty root

	Hostname string // "": that of the host
	HostNet  bool   // share the host's network; else there is a loopback device only
	UserNS   *UserNS

	// Capabilities are those that user 0 keeps, and could ever gain. Other users have none.
	Capabilities []int
	Seccomp      bool // allow only the system calls that ordinary programs need
}

// UserNS describes a user namespace. Without maps, the caller's own user and group are mapped to 0.
type UserNS struct {
	UIDs, GIDs []IDMap

	// Helpers makes newuidmap and newgidmap write the maps, which may then use the ranges of /etc/subuid and /etc/subgid.
	// Otherwise an unprivileged caller can map its own user and group only.
	Helpers bool
}

// IDMap maps Size user or group IDs from Host to those from Inside.
type IDMap struct{ Inside, Host, Size int }

// Kinds of mounts.
const (
	Bind    = "bind"    // Source: a file or directory of the host
	Tmpfs   = "tmpfs"   // an empty filesystem in memory
	Proc    = "proc"    // the processes of the sandbox; what could harm the host is hidden or read-only
	Sys     = "sys"     // sysfs, read-only
	Dev     = "dev"     // null, zero, full, random, urandom, tty, and terminals of the sandbox
	Overlay = "overlay" // Options: lowerdir=, upperdir= and workdir=, one directory each, userxattr ...
)

// Given stands for a directory, as Spec.Root or the Source of a Bind: the mount Options.Given.
const Given = "given"

// Mount is a mount to make in the sandbox. It ignores setuid bits and device nodes.
type Mount struct {
	Kind      string
	Source    string // see Bind
	Target    string // created if missing; no component may be a symbolic link
	Options   []string
	ReadOnly  bool
	NoExec    bool
	Recursive bool // Bind: with the mounts below Source
	Optional  bool // Bind: skip it if Source does not exist, or if Target is a symbolic link
}

// Link is a symbolic link.
type Link struct{ Path, To string }

// Options are what a run has of the calling process.
type Options struct {
	// Stdin, Stdout and Stderr of the program. If one of them is a terminal, the program gets a terminal of its own in
	// its place, and Run relays. Regular files and devices are relayed too, since a program could open them again with
	// more rights. nil: /dev/null.
	Stdin, Stdout, Stderr *os.File

	// Signals are passed on to the program; see run.Signals. SIGTSTP stops the program, and then Suspend is called.
	Signals func() (arriving <-chan os.Signal, stop func())
	Suspend func() // stops this process, and returns when it continues; nil: SIGTSTP is passed on like others

	// Timeout ends the run with SIGTERM, and Grace later with SIGKILL. 0: none.
	Timeout, Grace time.Duration

	// Given is a detached mount, which the sandbox attaches where the spec says Given. Nothing else may attach it.
	Given *os.File

	// Enter is called with the ID of the init before that does anything, for example to move it to a control group.
	Enter func(pid int) error
}

// Result says how the program ended. Exit is as of a shell: 128 + signal if a signal ended it.
type Result struct {
	Exit     int
	TimedOut bool
}
