package service

import (
	"cmp"
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"net/http"
	"os/user"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"pando/internal/base/errs"
	"pando/internal/engine"

	"golang.org/x/sys/unix"
)

// Caller is who sent a request: a process on this host, known by the kernel, or who has a token.
type Caller struct {
	Local bool // it came through the unix socket, and UID, GID and PID are known
	UID   uint32
	GID   uint32
	PID   int32

	Groups []uint32 // all groups of a local process when it connected, with GID
	Token  string   // name of its token; "" if it is local
	task   string   // name of the task of the service itself, which acts without a request; "" otherwise
}

// String names the caller for errors and operations.
func (c Caller) String() string {
	switch {
	case c.Token != "":
		return "token " + c.Token
	case c.task != "":
		return "task " + c.task
	case c.Local:
		return userName(c.UID)
	}
	return "unknown"
}

// Identity tells callers apart, also a user whose name is the number of another.
func (c Caller) Identity() string {
	if c.Local && c.UID != 0 {
		return fmt.Sprintf("uid %d", c.UID)
	}
	return c.String()
}

// actor describes the caller of an operation for the history.
func (c Caller) actor(id string) engine.Actor {
	a := engine.Actor{Command: "pando serve: " + id, ForUser: c.String()}
	if c.Local {
		a.ForUID = &c.UID
	}
	return a
}

// userNames has the names of users that were looked up. Hosts have few users, and who has none is remembered, too.
var userNames sync.Map // of uint32 to string

// userName returns the name of a user, or the number if it has none.
func userName(uid uint32) string { return cmp.Or(nameOf(uid), strconv.FormatUint(uint64(uid), 10)) }

// nameOf returns the name of a user, or "" if it has none. Its number would not do: another user may be called so.
func nameOf(uid uint32) string {
	if name, ok := userNames.Load(uid); ok {
		return name.(string)
	}
	name := ""
	if u, err := user.LookupId(strconv.FormatUint(uint64(uid), 10)); err == nil {
		name = u.Username
	}
	userNames.Store(uid, name)
	return name
}

type (
	peerKey   struct{}
	callerKey struct{}
	writerKey struct{}
)

// withPeer adds to the context of a connection which process is at the other end, if the kernel knows it.
func withPeer(ctx context.Context, c net.Conn) context.Context {
	if t, ok := c.(*tls.Conn); ok {
		c = t.NetConn()
	}
	u, ok := c.(*net.UnixConn)
	if !ok {
		return ctx
	}

	raw, err := u.SyscallConn()
	if err != nil {
		return ctx
	}
	var peer *unix.Ucred
	if cerr := raw.Control(func(fd uintptr) {
		peer, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); cerr != nil || err != nil {
		return ctx
	}
	who := Caller{Local: true, UID: peer.Uid, GID: peer.Gid, PID: peer.Pid}
	groups, err := peerGroups(raw)
	if err != nil && !who.trusted() {
		return ctx // a rule for one of its groups must not be skipped
	}
	who.Groups = append(groups, peer.Gid)
	return context.WithValue(ctx, peerKey{}, who)
}

// peerGroups returns the supplementary groups of the process at the other end of a unix socket, as it had them when it
// connected. The files of the host may say something else, or nothing: a container has groups of its own.
func peerGroups(raw syscall.RawConn) (out []uint32, err error) {
	cerr := raw.Control(func(fd uintptr) {
		for n := 64; ; {
			out = make([]uint32, n)
			size := uint32(n * 4)
			_, _, e := unix.Syscall6(unix.SYS_GETSOCKOPT, fd, unix.SOL_SOCKET, unix.SO_PEERGROUPS,
				uintptr(unsafe.Pointer(&out[0])), uintptr(unsafe.Pointer(&size)), 0)
			if e == unix.ERANGE && int(size/4) > n {
				n = int(size / 4)
				continue
			}
			if e != 0 {
				err = e
			}
			out = out[:size/4]
			return
		}
	})
	return out, cmp.Or(cerr, err)
}

// callerOf returns the caller of a request.
func callerOf(ctx context.Context) Caller {
	c, _ := ctx.Value(callerKey{}).(Caller)
	return c
}

// authenticate finds the caller of each request to a listener, and refuses those without one.
func (s *Service) authenticate(l *Listener, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w = &deadlineWriter{ResponseWriter: w}
		c, err := s.callerOfRequest(l, r)
		if err != nil {
			if !l.local {
				w.Header().Set("Connection", "close") // see strangers
			}
			sendProblem(w, r, err)
			return
		}
		if end, ok := r.Context().Value(trustedKey{}).(func()); ok {
			end()
		}
		ctx := context.WithValue(withWords(r.Context(), r), callerKey{}, c)
		next.ServeHTTP(w, r.WithContext(context.WithValue(ctx, writerKey{}, w)))
	})
}

func (s *Service) callerOfRequest(l *Listener, r *http.Request) (Caller, *Problem) {
	if l.local {
		c, ok := r.Context().Value(peerKey{}).(Caller)
		if !ok {
			return c, problemOf(errs.New(errs.Permission, "authenticate", "", "the kernel does not say who is connected"))
		}
		return c, nil
	}

	// A page in a browser reaches this port by a name of its own: see DNS rebinding.
	if !l.isHost(r.Host) {
		return Caller{}, wrongHost(r.Host)
	}

	secret, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	if ok && s.Tokens != nil {
		if name, known := s.Tokens.find(secret); known {
			return Caller{Token: name}, nil
		}
	}
	p := problemOf(errs.New(errs.Permission, "authenticate", "", "no valid token").
		WithHint("send the header Authorization: Bearer TOKEN, with a token from %s", errs.Run("serve token", "NAME")))
	return Caller{}, p.withStatus(http.StatusUnauthorized)
}

// wrongHost is the problem of a request that names another host.
func wrongHost(host string) *Problem {
	p := problemOf(errs.New(errs.Permission, "authenticate", host, "this service has another host name").
		WithHint("use one of the names in its certificate, or localhost where it listens on a loopback address"))
	return p.withStatus(http.StatusMisdirectedRequest)
}

// writeTimeout limits how long a client may take to read what was written for it. Tests use less.
var writeTimeout = 30 * time.Second

// deadlineWriter gives each write its own deadline, so that a client that stops reading ends the request.
type deadlineWriter struct {
	http.ResponseWriter
}

// Write writes a part of the response.
func (w *deadlineWriter) Write(b []byte) (int, error) {
	c := http.NewResponseController(w.ResponseWriter)
	_ = c.SetWriteDeadline(time.Now().Add(writeTimeout)) // writers of tests have none
	return w.ResponseWriter.Write(b)
}

// Unwrap returns the writer below, for http.ResponseController.
func (w *deadlineWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// keepReading removes the deadline that the body of a request had. Without that, the server would take a call that
// takes longer for one whose client went away.
func keepReading(ctx context.Context) {
	if w, ok := ctx.Value(writerKey{}).(http.ResponseWriter); ok {
		_ = http.NewResponseController(w).SetReadDeadline(time.Time{})
	}
}
