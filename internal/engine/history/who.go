package history

import (
	"context"
	"os"
	"os/user"
	"strconv"
	"strings"
	"sync"
)

// Actor is what a front end knows about the user for whom it calls the engine.
type Actor struct {
	SudoUID  *uint32 // user who ran sudo
	SudoUser string
	ForUID   *uint32 // user for whom a service acts, if it is a user of this host
	ForUser  string  // its name, or whom else the service acts for
	Command  string  // program and verb, without arguments: they may contain secrets
	Why      string  // reason, if nobody has asked for it
}

type actorKey struct{}

// ActAs returns a context whose events name the actor.
func ActAs(ctx context.Context, a Actor) context.Context {
	return context.WithValue(ctx, actorKey{}, a)
}

// WhoIn returns who acts in a context: this process, for its actor.
func WhoIn(ctx context.Context) Who {
	w := thisProcess()
	if a, ok := ctx.Value(actorKey{}).(Actor); ok {
		w.SudoUID, w.SudoUser, w.Command = a.SudoUID, a.SudoUser, a.Command
		w.ForUID, w.ForUser, w.Why = a.ForUID, a.ForUser, a.Why
	}
	return w
}

// thisProcess returns what does not change while the process runs.
var thisProcess = sync.OnceValue(func() Who {
	w := Who{UID: uint32(os.Getuid()), PID: os.Getpid(), LoginUID: loginUID()}
	w.User = userName(w.UID)
	if w.LoginUID != nil {
		w.LoginUser = userName(*w.LoginUID)
	}
	return w
})

// notSet is the login user ID of processes that no user has logged in for, such as services.
const notSet = 1<<32 - 1

// loginUID returns the user who logged in, which sudo and su do not change; nil if there is none.
func loginUID() *uint32 {
	b, err := os.ReadFile("/proc/self/loginuid")
	if err != nil {
		return nil
	}
	n, err := strconv.ParseUint(strings.TrimSpace(string(b)), 10, 32)
	if err != nil || n == notSet {
		return nil
	}
	id := uint32(n)
	return &id
}

// userName returns the name of a user, or "" if it has none.
func userName(uid uint32) string {
	if uid == 0 {
		return "root"
	}
	u, err := user.LookupId(strconv.FormatUint(uint64(uid), 10))
	if err != nil {
		return ""
	}
	return u.Username
}

// By returns the name of the person behind an event, as well as it is known: the user whom a service acted for, who ran
// sudo, who logged in, or whom the process belongs to.
func (w Who) By() string {
	switch {
	case w.ForUser != "":
		return w.ForUser
	case w.SudoUID != nil:
		return nameOr(w.SudoUser, *w.SudoUID)
	case w.LoginUID != nil:
		return nameOr(w.LoginUser, *w.LoginUID)
	}
	return nameOr(w.User, w.UID)
}

func nameOr(name string, uid uint32) string {
	if name != "" {
		return name
	}
	return strconv.FormatUint(uint64(uid), 10)
}
