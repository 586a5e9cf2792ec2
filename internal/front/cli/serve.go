package cli

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"time"

	"pando/internal/base/errs"
	"pando/internal/engine"
	"pando/internal/linux/account"
	"pando/internal/service/policy"
	"pando/internal/service/users"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
)

const (
	serviceDir    = "/run/pando"
	serviceSocket = serviceDir + "/pando.sock"
	policyFile    = "/etc/pando/policy.toml"
	serviceGroup  = "pando"
)

// How often the service maintains the pool, and how long it waits for requests when it ends.
const (
	maintainEvery = 10 * time.Second
	shutdownTime  = 30 * time.Second
)

// Service answers requests.
type Service interface {
	// Serve answers requests on a socket, which it closes, until Shutdown.
	Serve(l *net.UnixListener) error
	// Shutdown takes no more requests, and waits for those that are being answered until ctx ends.
	Shutdown(ctx context.Context) error
}

// serving is a request to serve a pool.
type serving struct {
	socket, policy, mounts string
}

func (a *App) serveCommand() *cobra.Command {
	var s serving
	c := &cobra.Command{
		Use:     "serve",
		GroupID: "pool",
		Short:   "Serve the pool to users without root, over a unix socket",
		Long: `Answer HTTP requests on a unix socket, until interrupted: clone, mount, unmount,
destroy, list and describe. Root and members of the group ` + serviceGroup + ` can connect;
the kernel says who is at the other end. docs/service.md describes the interface,
and GET /v1/openapi.json too, for programs.

Users other than root may do what the policy allows: see docs/service.md. Each gets
volumes of their own, and sees no others. These are mounted below MOUNTS/UID, where
only that user can reach them, nosuid and nodev, and their files belong to the user.
Without a policy, only root may use the service.

Commands and the service can work on a pool at the same time.`,
		Example: "  pando serve\n  curl --unix-socket " + serviceSocket + " http://pando/v1/volumes",
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			a.lasting = true
			return a.serve(c.Context(), s)
		},
	}
	f := c.Flags()
	f.StringVar(&s.socket, "socket", serviceSocket, "listen on the unix socket `PATH`")
	f.StringVar(&s.policy, "policy", policyFile, "read what users other than root may do from `FILE`")
	f.StringVar(&s.mounts, "mounts", serviceDir, "mount the volumes of users below `DIR`/UID")
	return c
}

// serve serves the pool until ctx ends.
func (a *App) serve(ctx context.Context, q serving) (err error) {
	if os.Geteuid() != 0 {
		return errs.New(errs.Permission, "serve", "", "only root can mount volumes for others")
	}
	allowed, err := policy.Load(ctx, q.policy)
	if err != nil {
		return err
	}

	// Begin.
	e, err := a.openPool(ctx)
	if err != nil {
		return err
	}
	defer e.Close()
	if err := makeServiceDir(q.mounts); err != nil {
		return err
	}
	l, unlock, err := a.listen(ctx, q.socket)
	if err != nil {
		return err
	}
	defer unlock()

	// Answer, and maintain the pool, until the end.
	log := slog.New(slog.NewTextHandler(a.Stderr, nil))
	server := a.NewService(users.New(e, allowed, q.mounts), log)
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }()
	a.printNote("serving %s on %s", e.Dir(), q.socket)
	if allowed == nil {
		a.printNote("there is no %s: only root may use it", q.policy)
	}
	err = maintainUntil(ctx, e, served, log)
	return errors.Join(err, endService(context.WithoutCancel(ctx), server, e))
}

// maintainUntil maintains the pool until ctx or the service ends, whose error it returns.
func maintainUntil(ctx context.Context, e *engine.Engine, served <-chan error, log *slog.Logger) error {
	tick := time.NewTicker(maintainEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case err := <-served:
			return err
		case now := <-tick.C:
			r, err := e.Maintain(ctx, now)
			if err != nil && ctx.Err() == nil {
				log.Error("cannot maintain the pool", "error", err)
			}
			for _, w := range r.Warnings {
				log.Warn(w.String())
			}
		}
	}
}

// endService waits for requests that are being answered, and cancels those that take too long.
func endService(ctx context.Context, server Service, e *engine.Engine) error {
	ctx, cancel := context.WithTimeout(ctx, shutdownTime)
	defer cancel()
	return errors.Join(server.Shutdown(ctx), e.Shutdown(ctx))
}

// makeServiceDir makes a directory, unless it is there, and checks that only root can change it.
func makeServiceDir(dir string) error {
	if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return errs.Wrap("serve", dir, err)
	}
	var st unix.Stat_t
	if err := unix.Lstat(dir, &st); err != nil {
		return errs.Wrap("serve", dir, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR || st.Uid != 0 || st.Mode&0o022 != 0 {
		return errs.New(errs.Permission, "serve", dir, "it must be a directory that only root can write to")
	}
	return nil
}

// listen listens on a unix socket for root and the group of the service. unlock removes it.
func (a *App) listen(ctx context.Context, path string) (_ *net.UnixListener, unlock func(), err error) {
	if err := makeServiceDir(filepath.Dir(path)); err != nil {
		return nil, nil, err
	}

	// A socket that a dead service has left is replaced.
	lock, err := os.OpenFile(path+".lock", os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, nil, errs.Wrap("serve", path, err)
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		lock.Close()
		return nil, nil, errs.New(errs.InUse, "serve", path, "another service uses this socket").
			WithHint("end it, or use another %s", errs.Param("socket"))
	}
	defer func() {
		if err != nil {
			lock.Close()
		}
	}()

	gid, gerr := account.GID(ctx, "serve", serviceGroup)
	if gerr != nil {
		a.printNote("there is no group %s: only root can connect", serviceGroup)
	}

	// Nobody can connect before it has its mode.
	hidden := path + ".new"
	if err := os.Remove(hidden); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, nil, errs.Wrap("serve", path, err)
	}
	before := unix.Umask(0o177)
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: hidden, Net: "unix"})
	unix.Umask(before)
	if err != nil {
		return nil, nil, errs.Wrap("serve", path, err)
	}
	l.SetUnlinkOnClose(false)
	if err := errors.Join(os.Chown(hidden, 0, int(gid)), os.Chmod(hidden, 0o660), os.Rename(hidden, path)); err != nil {
		l.Close()
		return nil, nil, errs.Wrap("serve", path, err)
	}
	return l, func() {
		_ = os.Remove(path) // a stale socket only refuses connections
		lock.Close()
	}, nil
}
