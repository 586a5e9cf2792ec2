package service

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"pando/internal/base/errs"
	"pando/internal/base/waiting"

	"golang.org/x/sys/unix"
)

// Group is the group whose members may connect to the socket. What they may do is another question: see authorize.
const Group = "pando"

// DefaultSocket is where clients look for the service.
const DefaultSocket = "/run/pando/pando.sock"

// Listener is where a service accepts connections.
type Listener struct {
	net.Listener
	local       bool              // a unix socket: callers are known by their credentials
	metricsOnly bool              // it serves metrics to everybody, and nothing else
	web         bool              // it serves the web page to browsers, and nothing else
	leaf        *x509.Certificate // of TLS; nil: a plain listener on a loopback address
}

// Purpose says, for people, what the listener is for, if it is not for everything.
func (l *Listener) Purpose() string {
	switch {
	case l.metricsOnly:
		return " (metrics)"
	case l.web:
		return " (web page)"
	}
	return ""
}

// Local returns a unix listener that another process has opened, such as systemd.
func Local(l net.Listener) *Listener { return &Listener{Listener: l, local: true} }

// ListenUnix listens on a socket that the members of Group may connect to, or only this user if there is no such group
// or it cannot be given to it; group reports which. It replaces a socket that nobody listens on any more. At no time
// may others connect. The directory is made if it is missing. InUse, Exists (it is something else), Permission,
// NotFound.
func ListenUnix(path string) (l *Listener, group bool, err error) {
	fail := func(err error) (*Listener, bool, error) { return nil, false, errs.Wrap("serve", path, err) }
	if path, err = filepath.Abs(path); err != nil {
		return fail(err)
	}
	if len(path) > maxSocketPath {
		return fail(errs.New(errs.Invalid, "serve", path, "the path of a socket has at most %d bytes", maxSocketPath).
			WithHint("choose a shorter path with %s", errs.Param("socket")))
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return fail(err)
	}

	// Keep other services from removing the socket between our steps.
	unlock, err := lockDir(filepath.Dir(path))
	if err != nil {
		return fail(err)
	}
	defer unlock()

	if err := removeStale(path); err != nil {
		return fail(err)
	}

	c := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) (err error) {
		// The socket file gets the mode of the descriptor.
		if cerr := raw.Control(func(fd uintptr) { err = unix.Fchmod(int(fd), 0o600) }); cerr != nil {
			return cerr
		}
		return err
	}}
	u, err := c.Listen(context.Background(), "unix", path) // which does not wait
	if err != nil {
		return fail(err)
	}

	group, err = openToGroup(path, Group)
	if err != nil {
		_ = u.Close()
		return fail(err)
	}
	return Local(u), group, nil
}

// maxSocketPath is sizeof(sun_path) without the NUL.
const maxSocketPath = 107

// lockPatience is how long to wait for another service that opens its socket in the same directory.
const lockPatience = 5 * time.Second

func lockDir(dir string) (unlock func(), err error) {
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}

	// Others hold it for a moment only.
	w := waiting.Wait{Op: "serve", Ref: dir, What: "the lock of the directory", Limit: lockPatience}
	if err := w.Until(context.Background(), func() (bool, error) {
		err := unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB)
		if err == unix.EWOULDBLOCK {
			return false, nil
		}
		return err == nil, err
	}); err != nil {
		_ = unix.Close(fd)
		return nil, err
	}
	return func() { _ = unix.Close(fd) }, nil // which unlocks it
}

// removeStale removes a socket on which nobody listens.
func removeStale(path string) error {
	info, err := os.Lstat(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if info.Mode().Type() != os.ModeSocket {
		return errs.New(errs.Exists, "serve", path, "it exists and is not a socket").
			WithHint("choose another path with %s", errs.Param("socket"))
	}

	c, err := net.DialTimeout("unix", path, time.Second)
	if err == nil {
		_ = c.Close()
	}
	if !errors.Is(err, unix.ECONNREFUSED) {
		return errs.New(errs.InUse, "serve", path, "another service listens on this socket").
			WithHint("stop it, or choose another socket with %s", errs.Param("socket"))
	}
	return os.Remove(path)
}

// openToGroup lets the members of a group connect, if there is one.
func openToGroup(path, group string) (bool, error) {
	g, err := user.LookupGroup(group)
	if err != nil || os.Geteuid() != 0 {
		return false, nil // there is none, or another user's socket is its own
	}
	gid, err := strconv.Atoi(g.Gid)
	if err != nil {
		return false, err
	}
	if err := os.Chown(path, -1, gid); err != nil {
		return false, err
	}
	return true, os.Chmod(path, 0o660)
}

// firstActivated is the first descriptor that systemd passes (sd_listen_fds(3)).
const firstActivated = 3

// Activated returns the unix socket that systemd has opened for this process, of n that it has passed. Invalid.
func Activated(n int) (*Listener, error) {
	if n != 1 {
		return nil, errs.New(errs.Invalid, "serve", "LISTEN_FDS", "the service takes exactly one socket (got %d)", n).
			WithHint("use one ListenStream in the .socket unit")
	}

	unix.CloseOnExec(firstActivated)
	f := os.NewFile(firstActivated, "activated socket")
	defer f.Close() // FileListener duplicates it
	l, err := net.FileListener(f)
	if err != nil {
		return nil, errs.Wrap("serve", "activated socket", err)
	}
	u, ok := l.(*net.UnixListener)
	if !ok {
		_ = l.Close()
		return nil, errs.New(errs.Invalid, "serve", l.Addr().String(), "the activated socket is not a unix socket").
			WithHint("use a path for ListenStream; %s opens TCP", errs.Param("listen"))
	}
	u.SetUnlinkOnClose(false) // it is systemd's
	return Local(u), nil
}

// ListenTCP listens on an address, with TLS 1.3 if certificate and key are given. Without them it must be a loopback
// address. Callers need a token. Invalid, NotFound, InUse, Permission.
func ListenTCP(address, certificate, key string) (*Listener, error) {
	const op = "serve"
	l := &Listener{}
	var config *tls.Config
	if certificate != "" || key != "" {
		pair, err := tls.LoadX509KeyPair(certificate, key)
		if err != nil {
			kind := errs.KindOf(err)
			if kind == errs.Internal {
				kind = errs.Invalid
			}
			return nil, errs.New(kind, op, certificate, "cannot use this certificate and key: %w", err).
				WithHint("give files in PEM with %s and %s", errs.Param("tls-cert"), errs.Param("tls-key"))
		}
		config = &tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS13,
			NextProtos: []string{"http/1.1"}}
		l.leaf = pair.Leaf
	}

	tcp, loopback, err := openTCP(address, "listen")
	if err != nil {
		return nil, err
	}
	if config == nil && !loopback {
		_ = tcp.Close()
		return nil, errs.New(errs.Invalid, op, address, "without TLS, tokens would be sent in the clear").
			WithHint("add %s and %s, or listen on 127.0.0.1", errs.Param("tls-cert"), errs.Param("tls-key"))
	}

	l.Listener = tcp
	if config != nil {
		l.Listener = tls.NewListener(tcp, config)
	}
	return l, nil
}

// ListenMetrics listens on a loopback address, where everybody on this host can read metrics, and do nothing else.
// Invalid, InUse, Permission.
func ListenMetrics(address string) (*Listener, error) {
	tcp, loopback, err := openTCP(address, "metrics")
	if err != nil {
		return nil, err
	}
	if !loopback {
		_ = tcp.Close()
		return nil, errs.New(errs.Invalid, "serve", address, "metrics without TLS are for this host only").
			WithHint("listen on 127.0.0.1, or let Prometheus use %s with a token", errs.Param("listen"))
	}
	return &Listener{Listener: tcp, metricsOnly: true}, nil
}

// openTCP listens on an address, and reports whether it is a loopback address. flag is the one with the address.
func openTCP(address, flag string) (l net.Listener, loopback bool, err error) {
	const op = "serve"
	l, err = net.Listen("tcp", address)
	if err != nil {
		var bad *net.AddrError
		var name *net.DNSError
		if errors.As(err, &bad) || errors.As(err, &name) {
			return nil, false, errs.New(errs.Invalid, op, address, "%w", err).
				WithHint("use %s", errs.Param(flag, "HOST:PORT"))
		}
		return nil, false, errs.Wrap(op, address, err)
	}

	// The address that it has become decides: a name may stand for any.
	a, ok := l.Addr().(*net.TCPAddr)
	return l, ok && a.IP.IsLoopback(), nil
}

// isHost reports whether a request may address this listener by a host name: one of its certificate, or of the loopback
// addresses.
func (l *Listener) isHost(host string) bool {
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	host = strings.Trim(host, "[]")
	if l.leaf != nil {
		return l.leaf.VerifyHostname(host) == nil
	}
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}
