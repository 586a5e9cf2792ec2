// Package usermount mounts overlays for a process without privileges. Since Linux 5.11 a user may mount overlayfs in a
// user namespace, but a Go program, which has several threads, cannot enter one. So a helper enters it, mounts the
// overlay where nothing else sees it, passes back a descriptor of its root, and ends: the descriptor keeps the mount.
//
// The helper is the same program, started again under another name: its main function calls Helper first.
package usermount

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync/atomic"
	"syscall"

	"pando/internal/base/errs"
	"pando/internal/linux/mount"

	"golang.org/x/sys/unix"
)

// Layers describes an overlay of two directories.
type Layers struct {
	Lower    string   // absolute path of a directory that nothing changes
	Object   string   // absolute path of the directory that has mount.UpperDir and mount.WorkDir
	Name     string   // by which mount tables show it
	Options  []string // of overlayfs, each "key" or "key=value"
	ReadOnly bool     // nothing is written to Object, which may lack mount.WorkDir
}

// Options are the mount options of a user's overlays, besides those that all overlays have: overlayfs keeps its
// marks in attributes user.overlay.*. Directories of the lower layer cannot be renamed then: programs such as mv
// copy them.
func Options(ephemeral bool) []string {
	options := []string{"userxattr", "index=off", "metacopy=off", "xino=on"}
	if ephemeral {
		options = append(options, "volatile")
	}
	return options
}

// Mount makes the overlay mount, detached. Besides the kinds of mount.Overlay.Mount: Unsupported if the kernel or its
// settings keep users from it (with a hint that names the setting), Canceled.
func (l Layers) Mount(ctx context.Context) (*mount.Detached, error) {
	return l.ask(ctx, "mount")
}

// InUse reports whether an overlay with this upper directory is mounted, in any namespace, or was unmounted while its
// files are in use. It changes nothing.
func (l Layers) InUse(ctx context.Context) (bool, error) {
	_, err := l.ask(ctx, "test")
	if errors.Is(err, errUsed) {
		return true, nil
	}
	return false, err
}

// Try makes sure that a user can mount overlays whose upper layer is on the filesystem of Object, by mounting one and
// deleting the file name of the lower layer in it. It has the kinds of Mount.
func (l Layers) Try(ctx context.Context, name string) error {
	m, err := l.Mount(ctx)
	if err != nil {
		return err
	}

	defer m.Close()

	root, err := m.Open()
	if err != nil {
		return err
	}

	defer root.Close()

	return errs.Wrap("mount", l.Object, unix.Unlinkat(int(root.Fd()), name, 0))
}

var errUsed = errors.New("the upper layer is in use")

// helperName is the helper's argv[0].
const helperName = "pando-user-mount"

// helperSocket is the helper's descriptor of the socket for its answer.
const helperSocket = 3

// served is set when the main function of this program has called Helper.
var served atomic.Bool

// Helper runs the helper and never returns if this process was started as one; otherwise it only enables the other
// functions. The main function of each program that uses this package calls it with [os.Args] before anything else.
func Helper(args []string) {
	if len(args) == 3 && args[0] == helperName {
		helper(args[1], args[2])
	}
	served.Store(true)
}

// answer is what the helper sends, with a descriptor if it is empty.
type answer struct {
	Used bool
	Kind errs.Kind
	Text string
	Hint string
}

// ask starts the helper, and returns the mount that it makes.
func (l Layers) ask(ctx context.Context, what string) (*mount.Detached, error) {
	if !served.Load() {
		return nil, errs.New(errs.Internal, "mount", l.Object, "this program cannot start a helper, which mounts for it").
			WithHint("call engine.Helper(os.Args) first in the main function of this program")
	}

	request, err := json.Marshal(l)
	if err != nil {
		return nil, errs.Wrap("mount", l.Object, err)
	}

	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, errs.Wrap("mount", l.Object, err)
	}

	mine, its := pair[0], os.NewFile(uintptr(pair[1]), "socket")
	defer unix.Close(mine)

	cmd := exec.CommandContext(ctx, "/proc/self/exe")
	cmd.Args = []string{helperName, what, string(request)}
	cmd.Dir, cmd.Env, cmd.ExtraFiles = "/", []string{"GOMAXPROCS=1"}, []*os.File{its}
	cmd.SysProcAttr = OwnNamespaces()
	runtime.LockOSThread() // see OwnNamespaces
	defer runtime.UnlockOSThread()
	err = cmd.Start()
	its.Close()
	if err != nil {
		return nil, Explain("mount", l.Object, err)
	}

	fd, err := receive(mine, l.Object)
	werr := cmd.Wait()
	switch {
	case ctx.Err() != nil:
		if fd >= 0 {
			unix.Close(fd)
		}
		return nil, errs.Wrap("mount", l.Object, ctx.Err())
	case err == nil && werr != nil && fd < 0:
		return nil, errs.New(errs.Internal, "mount", l.Object, "the helper process failed: %w", werr)
	case err != nil || fd < 0:
		return nil, err
	}

	return mount.FromDescriptor(fd, l.Name), nil
}

// OwnNamespaces describes a process in a user and a mount namespace of its own, with all capabilities in it, and this
// process's user as root. It is killed when the thread ends that started it: the caller locks its goroutine to that
// thread until it has ended.
func OwnNamespaces() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Geteuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getegid(), Size: 1}},
		Pdeathsig:   syscall.SIGKILL,
	}
}

// receive reads the helper's answer. fd is -1 if it has none.
func receive(socket int, ref string) (fd int, err error) {
	text, oob := make([]byte, 64<<10), make([]byte, unix.CmsgSpace(4))
	var n, oobn int
	for {
		n, oobn, _, _, err = unix.Recvmsg(socket, text, oob, unix.MSG_CMSG_CLOEXEC)
		if !errors.Is(err, unix.EINTR) {
			break
		}
	}
	if err != nil || n == 0 {
		return -1, errs.Wrap("mount", ref, err) // it died: its exit status says more
	}

	if err := decodeError(text[:n], ref); err != nil || oobn == 0 {
		return -1, err
	}

	messages, err := unix.ParseSocketControlMessage(oob[:oobn])
	if err != nil || len(messages) != 1 {
		return -1, errs.Wrap("mount", ref, err)
	}

	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil || len(fds) != 1 {
		return -1, errs.Wrap("mount", ref, err)
	}

	return fds[0], nil
}

// helper is the main function of the helper. It never returns.
func helper(what, request string) {
	var l Layers
	err := json.Unmarshal([]byte(request), &l)
	var m *mount.Detached
	var used bool
	if err == nil {
		m, used, err = l.inThisNamespace(what == "test")
	}

	a := answerOf(l.Object, err)
	a.Used = used
	text, err := json.Marshal(a)
	if err != nil {
		os.Exit(2)
	}

	var rights []byte
	if m != nil {
		rights = unix.UnixRights(m.Descriptor())
	}
	if err := unix.Sendmsg(helperSocket, text, rights, nil, 0); err != nil {
		os.Exit(2)
	}

	os.Exit(0)
}

// inThisNamespace mounts the overlay in a process that may. test: it only finds out whether the upper layer is in use.
func (l Layers) inThisNamespace(test bool) (m *mount.Detached, used bool, err error) {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return nil, false, fmt.Errorf("make mounts private: %w", err)
	}

	lower, err := openDir(l.Lower)
	if err != nil {
		return nil, false, err
	}

	object, err := openDir(l.Object)
	if err != nil {
		return nil, false, err
	}

	o := l.overlay()
	if !test {
		m, err := l.mountDirs(lower, object)
		return m, false, err
	}

	// A second mount of the object makes the work directory unusable: see mount.Overlay.UpperInUse.
	if err := unix.Mount(l.Object, l.Object, "", unix.MS_BIND, ""); err != nil {
		return nil, false, fmt.Errorf("bind %s: %w", l.Object, err)
	}

	other, err := openDir(l.Object)
	if err != nil {
		return nil, false, err
	}

	o.Options, o.ReadOnly = []string{"userxattr", "index=on"}, false
	m, err = o.MountDirs(lower, object, other)
	switch {
	case errors.Is(err, unix.EBUSY):
		return nil, true, nil
	case errors.Is(err, unix.EINVAL):
		return nil, false, nil
	case err == nil:
		return nil, false, m.Close()
	}
	return nil, false, err
}

// MountOptions returns what a process in the user's namespaces passes to the kernel to mount the overlay.
func (l Layers) MountOptions() []string {
	return append([]string{"source=" + l.Name, "lowerdir=" + l.Lower,
		"upperdir=" + filepath.Join(l.Object, mount.UpperDir), "workdir=" + filepath.Join(l.Object, mount.WorkDir)},
		l.Options...)
}

// mountDirs mounts the overlay of two open directories. The kernel makes a directory without permissions in the work
// directory, which its owner could not copy or measure later.
func (l Layers) mountDirs(lower, object *os.File) (*mount.Detached, error) {
	m, err := l.overlay().MountDirs(lower, object, object)
	if err != nil || l.ReadOnly {
		return m, err
	}
	return m, OpenWork(l.Object)
}

// OpenWork gives the owner of an upper layer, the directory object, access to the directory in its work directory.
func OpenWork(object string) error {
	err := os.Chmod(filepath.Join(object, mount.WorkDir, "work"), 0o700)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // it was never mounted
	}
	return errs.Wrap("mount", object, err)
}

func (l Layers) overlay() mount.Overlay {
	return mount.Overlay{Name: l.Name, UpperPath: l.Object, Options: l.Options, ReadOnly: l.ReadOnly}
}

// openDir opens a directory as a place, without following a link.
func openDir(path string) (*os.File, error) {
	fd, err := unix.Open(filepath.Clean(path), unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, errs.Wrap("open", path, err)
	}
	return os.NewFile(uintptr(fd), path), nil
}

// answerOf describes an error for the process that has started the helper.
func answerOf(ref string, err error) (a answer) {
	if err == nil {
		return a
	}
	err = Explain("mount overlay", ref, err)
	a.Kind, a.Text, a.Hint = errs.KindOf(err), err.Error(), string(errs.HintIn(err))
	var e *errs.Error
	if errors.As(err, &e) && e.Err != nil {
		a.Text = e.Err.Error()
	}
	return a
}

// decodeError returns the error that an answer describes; nil if it describes none.
func decodeError(text []byte, ref string) error {
	var a answer
	if err := json.Unmarshal(text, &a); err != nil {
		return errs.Wrap("mount", ref, err)
	}
	if a.Used {
		return errUsed
	}
	if a.Text == "" {
		return nil
	}
	return &errs.Error{Kind: a.Kind, Op: "mount overlay", Ref: ref, Err: errors.New(a.Text), Hint: errs.Message(a.Hint)}
}
