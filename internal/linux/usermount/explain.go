package usermount

import (
	"errors"
	"os"
	"strconv"
	"strings"

	"pando/internal/base/errs"
	"pando/internal/linux/kernel"

	"golang.org/x/sys/unix"
)

// Settings of the kernel that keep users from having namespaces, as files.
var (
	cloneSetting    = "/proc/sys/kernel/unprivileged_userns_clone" // Debian, Ubuntu
	mostNamespaces  = "/proc/sys/user/max_user_namespaces"
	mostMounts      = "/proc/sys/user/max_mnt_namespaces"
	appArmorSetting = "/proc/sys/kernel/apparmor_restrict_unprivileged_userns" // Ubuntu 23.10 and newer
)

// Explain explains why a user could not make namespaces, or mount an overlay in them: it names the setting that forbids
// it, and what to do. Unsupported for such a setting; other errors it only wraps.
func Explain(op, ref string, err error) error {
	var known *errs.Error
	if errors.As(err, &known) && known.Hint != "" && known.Kind == errs.Unsupported {
		return err
	}

	fail := func(format string, args ...any) *errs.Error {
		return errs.New(errs.Unsupported, op, ref, format, args...)
	}

	denied := errs.IsAny(err, unix.EPERM, unix.EACCES, unix.ENOSPC, unix.EUSERS)
	switch {
	case denied && setting(cloneSetting) == "0":
		return fail("this host forbids users to have namespaces: kernel.unprivileged_userns_clone is 0").
			WithHint("as root, run `sysctl kernel.unprivileged_userns_clone=1`, or clone without %s", errs.Param("overlay"))
	case denied && setting(mostNamespaces) == "0":
		return fail("this host forbids users to have namespaces: user.max_user_namespaces is 0").
			WithHint("as root, run `sysctl user.max_user_namespaces=10000`, or clone without %s", errs.Param("overlay"))
	case denied && setting(mostMounts) == "0":
		return fail("this host forbids users to have mount namespaces: user.max_mnt_namespaces is 0").
			WithHint("as root, run `sysctl user.max_mnt_namespaces=10000`, or clone without %s", errs.Param("overlay"))
	case errs.IsAny(err, unix.ENOSPC, unix.EUSERS):
		return fail("there are already as many user namespaces as this host allows, or nested as deeply: "+
			"user.max_user_namespaces is %s", setting(mostNamespaces)).
			WithHint("as root, raise it with `sysctl user.max_user_namespaces=NUMBER`")
	case denied && setting(appArmorSetting) == "1":
		return fail("AppArmor keeps users from using namespaces: kernel.apparmor_restrict_unprivileged_userns is 1").
			WithHint("as root, run `sysctl kernel.apparmor_restrict_unprivileged_userns=0`, or give pando an AppArmor profile "+
				"that allows userns, or clone without %s", errs.Param("overlay"))
	case errors.Is(err, unix.EINVAL) && !kernel.AtLeast(5, 11):
		return fail("users can mount overlays since Linux 5.11, and this is %s", kernel.Release()).
			WithHint("clone without %s", errs.Param("overlay"))
	case errors.Is(err, unix.ENOSYS), errs.IsAny(err, unix.EPERM) && inFilter():
		return fail("a seccomp filter keeps this process from making namespaces or mounts, as those of containers do").
			WithHint("run the container with `--security-opt seccomp=unconfined`, or clone without %s", errs.Param("overlay"))
	case errs.IsAny(err, unix.EOPNOTSUPP, unix.EINVAL):
		return fail("overlayfs cannot keep a user's changes in this filesystem: %w", err).
			WithHint("put the pool on ext4, XFS or btrfs (network filesystems, and tmpfs before Linux 6.6, have no "+
				"attributes user.*), or clone without %s", errs.Param("overlay"))
	}

	return errs.Wrap(op, ref, err)
}

// Forbidden returns an error, as Explain does, if a setting keeps all users from having namespaces. Other reasons show
// only when they are made.
func Forbidden(op, ref string) error {
	if setting(cloneSetting) == "0" || setting(mostNamespaces) == "0" || setting(mostMounts) == "0" {
		return Explain(op, ref, unix.EPERM)
	}
	return nil
}

// setting returns what a file with a setting contains; "" if it cannot be read.
func setting(path string) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// inFilter reports whether a seccomp filter restricts this process.
func inFilter() bool {
	b, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return false
	}
	for line := range strings.Lines(string(b)) {
		if text, ok := strings.CutPrefix(line, "Seccomp:"); ok {
			n, err := strconv.Atoi(strings.TrimSpace(text))
			return err == nil && n == 2
		}
	}
	return false
}
