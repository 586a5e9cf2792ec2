package cli

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/base/principal"
	"pando/internal/base/ref"
	"pando/internal/engine"
	"pando/internal/linux/account"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// rightsFlags adds the flags of what a mounted volume may.
func rightsFlags(f *pflag.FlagSet, may *engine.Rights) {
	f.BoolVar(&may.Dev, "dev", false,
		"let device nodes in the volume open devices of this host, even where other users can reach it")
	f.BoolVar(&may.SUID, "suid", false,
		"let setuid and setgid bits in the volume take effect, even where other users can reach it")
}

// ownerFlag adds the flag of whom a mount shows as the owner of the volume. owner reads it.
func ownerFlag(f *pflag.FlagSet, op string) (owner func(context.Context) (*principal.Owner, error)) {
	text := f.String("owner", "",
		"mount for `USER[:GROUP]`, by name or ID: what belongs to the volume's owner belongs to them in the mount")
	return func(ctx context.Context) (*principal.Owner, error) {
		if !f.Changed("owner") {
			return nil, nil
		}
		o, err := account.ParseOwner(ctx, op, *text)
		return &o, err
	}
}

func (a *App) mountCommand() *cobra.Command {
	var may engine.Rights
	var owner func(context.Context) (*principal.Owner, error)
	var shell bool
	c := &cobra.Command{
		Use:     "mount VOLUME... [DIR]",
		GroupID: "volumes",
		Short:   "Mount volumes at a directory or below the pool",
		Long: `Mount VOLUME at DIR and print the mount point. DIR is a last word with a slash,
or an existing directory whose name no volume has. It must be empty, and pando
creates it if it does not exist. Without DIR, the volume is mounted at its place
below the pool. A volume with --fs none is
attached as a block device. Without root, a volume of the plain driver is linked
instead of mounted.

Several volumes, also by a quoted glob, are each mounted at DIR/VOLUME. If any name
is unknown, nothing is mounted.

If users other than root can reach the mount point, the volume is mounted nosuid
and nodev, because its content could otherwise give them control of this host.
Allow both with --suid and --dev, for example for root filesystems and Docker's
data. Only root can reach the place below the pool.

With --owner, the volume is mounted for a user without root: files that belong to
the owner of its root directory belong to that user in the mount, and what the user
creates belongs to the owner in the volume. Nothing is changed on disk. Such a mount
is always nosuid and nodev.`,
		Example: "  cd $(pando mount -q job-17)\n  pando mount job-17 /srv/job-17\n  pando mount 'agent-*' /srv/agents\n" +
			"  pando mount --dev --suid rootfs /srv/rootfs\n  pando mount job-17 /srv/job-17 --owner ci",
		Args: cobra.MinimumNArgs(1),
		ValidArgsFunction: func(c *cobra.Command, args []string, word string) ([]string, cobra.ShellCompDirective) {
			if strings.Contains(word, "/") {
				return nil, cobra.ShellCompDirectiveFilterDirs
			}
			return a.completeRefs(c, word, aVolume)
		},
		RunE: a.withPool(func(ctx context.Context, e *engine.Engine, args []string) error {
			what, dir, err := toMount(ctx, e, args)
			if err == nil {
				err = a.checkShell("mount", shell, what.many)
			}
			if err == nil {
				may.Owner, err = owner(ctx)
			}
			if err != nil {
				return err
			}

			if what.many && dir != "" {
				undo, err := makeDirOfMountpoints("mount", dir)
				if err != nil {
					return err
				}
				defer undo() // it does nothing if something is mounted there
			}

			return doEach(ctx, a, what, "could not be mounted", func(r ref.Ref) (api.Object, error) {
				volume, err := ref.ParseName("mount", r.Name)
				if err != nil {
					return api.Object{}, err
				}
				q := engine.MountRequest{Volume: volume, Dir: dir, May: may}
				if what.many && dir != "" {
					q.Dir = filepath.Join(dir, r.Name)
				}
				return e.Mount(ctx, q)
			}, func(v api.Object) error {
				if shell {
					return a.printShell(v)
				}
				return a.printResult(nil, v.Mountpoint, "%s  mounted at %s\n", v.Name, v.Mountpoint)
			})
		}),
	}

	rightsFlags(c.Flags(), &may)
	owner = ownerFlag(c.Flags(), "mount")
	shellFlag(c, &shell)
	return c
}

// toMount finds the volumes that words name, and the directory that the last one names: a word with a slash, or an
// existing directory whose name no volume has. Invalid, NotFound.
func toMount(ctx context.Context, e *engine.Engine, words []string) (what chosen, dir string, err error) {
	names, last := words[:len(words)-1], words[len(words)-1]
	isDir := strings.Contains(last, "/") || last == "." || last == ".."
	if !isDir {
		what, err = choose(ctx, e, "mount", words, aVolume)
		var unknown *errs.Error
		if len(names) == 0 || !errors.As(err, &unknown) || unknown.Kind != errs.NotFound || unknown.Ref != last {
			return what, "", err
		}
		if fi, serr := os.Stat(last); serr != nil || !fi.IsDir() {
			return what, "", unknown.WithHint("for a directory, write ./%s", last)
		}
	}

	if len(names) == 0 {
		return what, "", errs.New(errs.Invalid, "mount", last, "no volume is named").
			WithHint("name one before the directory: %s", errs.Run("mount", "VOLUME", errs.ShellWord(last)))
	}
	what, err = choose(ctx, e, "mount", names, aVolume)
	return what, last, err
}

// makeDirOfMountpoints makes a directory in which several volumes are to be mounted, if it does not exist and the
// directory above it does. undo removes it again if it is empty.
func makeDirOfMountpoints(op, dir string) (undo func(), err error) {
	switch err := os.Mkdir(dir, 0o755); {
	case err == nil:
		return func() { _ = os.Remove(dir) }, nil
	case errors.Is(err, fs.ErrExist):
		return func() {}, nil
	case errors.Is(err, fs.ErrNotExist):
		return nil, errs.New(errs.Invalid, op, dir, "the directory above does not exist").
			WithHint("create it: `mkdir -p %s`", errs.ShellWord(filepath.Dir(dir)))
	default:
		return nil, errs.Wrap(op, dir, err)
	}
}
