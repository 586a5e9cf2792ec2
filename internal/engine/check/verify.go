package check

import (
	"cmp"
	"context"
	"errors"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"sync"

	"pando/internal/base/errs"
	"pando/internal/driver"
	"pando/internal/engine/content"
	"pando/internal/linux/run"
)

// verifyFilesystem checks the filesystem in a copy that nothing else uses: it replays the log by mounting it, and then
// runs the filesystem's own program. wrong says what is wrong, and detail what the program printed. An error means that
// it could not be checked.
func verifyFilesystem(
	ctx context.Context, acc *content.Access, id driver.ObjectID, fs driver.FS,
) (wrong, detail string, err error) {
	if wrong, err = Replay(ctx, acc, id, fs); err != nil {
		return "", "", err
	}
	found, err := RunChecker(ctx, acc, id, fs)
	if err != nil {
		return "", "", err
	}
	if found.Damaged && wrong == "" {
		wrong = "its filesystem is damaged"
	}
	return wrong, found.Detail, nil
}

// Replay mounts and unmounts the filesystem in an image, which replays its log. wrong says why it cannot be mounted, if
// the image is at fault; the error, if the host is.
func Replay(ctx context.Context, acc *content.Access, id driver.ObjectID, fs driver.FS) (wrong string, err error) {
	o := content.ImageOptions{FS: fs}
	switch fs {
	case driver.Ext4:
		o.Extra = []string{"errors=continue"} // whatever the superblock wants: it could be to panic
	case driver.XFS:
		o.Extra = []string{"nouuid"} // another copy may be mounted
	}

	err = acc.WithImage(ctx, id, o, func(*os.File) error { return nil })
	if err == nil {
		return "", nil
	}

	switch errs.KindOf(err) {
	case errs.Unsupported, errs.InUse, errs.NoSpace, errs.Permission, errs.Canceled, errs.NotFound:
		return "", err
	}

	// Leave out the device, which differs every time.
	var outer *errs.Error
	if errors.As(err, &outer) && outer.Err != nil {
		err = outer.Err
	}

	return "its filesystem cannot be mounted: " + err.Error(), nil
}

// Checked is the result of a program that checks a filesystem.
type Checked struct {
	Damaged  bool
	DirtyLog bool   // of XFS: a mount has to replay the log, which the program ignored
	Detail   string // what it said
}

// RunChecker runs the read-only check of a filesystem in an image. Unsupported if
// the program is not installed, or is older than the filesystem.
func RunChecker(ctx context.Context, acc *content.Access, id driver.ObjectID, fs driver.FS) (found Checked, err error) {
	err = acc.WithPath(ctx, id, func(path string) error {
		args := []string{"-fn", path}
		if fs == driver.XFS {
			args = xfsRepair(path, "-n")
		}

		stdout, stderr, code, err := runForExitCode(ctx, Checker(fs), args...)
		if err != nil {
			return err
		}

		out := stdout + stderr
		if code != 0 && isTooOld(out) {
			return errs.New(errs.Unsupported, "check", "", "%s does not know all features of the filesystem", Checker(fs)).
				WithHint("install a newer %s, and check the filesystem with it", Checker(fs))
		}

		found.Damaged = code != 0
		found.DirtyLog = strings.Contains(out, "valuable metadata changes in a log") ||
			strings.Contains(out, "cannot find log head")

		// e2fsck writes what it found to standard output, xfs_repair to the other.
		found.Detail = cmp.Or(tellingLines(stdout, path), tellingLines(stderr, path))
		return nil
	})

	return found, err
}

// isTooOld reports whether e2fsck or xfs_repair gave up because a filesystem has features that it does not know. Their
// exit codes do not say so.
func isTooOld(out string) bool {
	return strings.Contains(out, "Get a newer version of e2fsck") ||
		strings.Contains(out, "unsupported filesystem features")
}

// xfsRepair are the arguments of xfs_repair for a file or a device.
func xfsRepair(path string, flags ...string) []string {
	if st, err := os.Stat(path); err == nil && st.Mode().IsRegular() {
		flags = append(flags, "-f")
	}
	return append(flags, path)
}

// runForExitCode runs a program whose exit code is its answer.
func runForExitCode(ctx context.Context, name string, args ...string) (stdout, stderr string, code int, err error) {
	b, errb, err := run.Output(ctx, name, args...)
	var exit *exec.ExitError
	if ctx.Err() == nil && errors.As(err, &exit) && exit.Exited() {
		if len(b)+len(errb) == 0 {
			b = []byte(err.Error())
		}
		return string(b), string(errb), exit.ExitCode(), nil
	}
	return string(b), string(errb), 0, err
}

// maxTellingLines is how many lines of a program's output are shown.
const maxTellingLines = 8

// noise are the beginnings of lines of e2fsck and xfs_repair that say nothing.
var noise = []string{
	"Pass ", "Phase ", "e2fsck ", "- ", "No modify flag set", "Fix", "Clear", "Warning: skipping journal recovery",
	"Cannot get host filesystem geometry", "Repair may fail if there is", "the image and the host filesystem",
	"ALERT: The filesystem has valuable", "ignored because the -n option", "which may be resolved by first mounting",
	"Maximum metadata LSN", "Would format log", "*****",
	"Note: if several inode", "of the inode table require", "running e2fsck with the '-b", "may lie only with",
	"the backup block group desc",
}

// prompt is a question that e2fsck asks, and answers itself.
var prompt = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`[.]?(^|\s+)\w[\w ]*\? no\s*$`)
})

// summary is how e2fsck ends: what is used of the filesystem.
var summary = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`^\d+/\d+ files \(.* blocks$`)
})

// address is a code address in the output of xfs_repair, which differs every time.
var address = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(` at 0x[0-9a-f]+\b`)
})

// tellingLines removes lines from a program's output that say nothing, and parts that differ every time, such as the
// path of the image.
func tellingLines(out, path string) string {
	var lines []string
	out = strings.ReplaceAll(strings.ReplaceAll(out, path+": ", ""), path, "the image")
	for l := range strings.Lines(out) {
		l = strings.TrimSpace(address().ReplaceAllString(prompt().ReplaceAllString(l, ""), ""))
		saysNothing := slices.ContainsFunc(noise, func(n string) bool { return strings.HasPrefix(l, n) })
		if l == "" || summary().MatchString(l) || saysNothing {
			continue
		}
		if len(lines) == maxTellingLines {
			lines = append(lines, "...")
			break
		}
		lines = append(lines, l)
	}

	return strings.Join(lines, "\n")
}
