package cli

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// supervisor is the process that started this one and wants to know its state, such as systemd (sd_notify(3)).
// Without one, its methods do nothing.
type supervisor struct {
	socket   string
	watchdog time.Duration // it expects a sign of life this often; 0: never
	warn     func(format string, args ...any)
}

// newSupervisor returns the supervisor that the environment names, and removes it from the environment: programs that
// this one starts must not speak for it.
func newSupervisor(warn func(format string, args ...any)) *supervisor {
	s := &supervisor{socket: os.Getenv("NOTIFY_SOCKET"), warn: warn}
	if pid := os.Getenv("WATCHDOG_PID"); pid == "" || pid == strconv.Itoa(os.Getpid()) {
		usec, _ := strconv.ParseInt(os.Getenv("WATCHDOG_USEC"), 10, 64) // 0 if there is none
		s.watchdog = time.Duration(max(usec, 0)) * time.Microsecond
	}
	for _, v := range []string{"NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC"} {
		_ = os.Unsetenv(v)
	}
	return s
}

// tell sends the state of the process, a line each. That it cannot is a warning: the service works without.
func (s *supervisor) tell(lines ...string) {
	if s.socket == "" {
		return
	}

	// A name that begins with @ stands for an abstract one, in package net too.
	c, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: s.socket, Net: "unixgram"})
	if err == nil {
		_, err = c.Write([]byte(strings.Join(lines, "\n")))
		err = errors.Join(err, c.Close())
	}
	if err != nil {
		s.warn("could not tell systemd the state of the service: %v", err)
	}
}

// status is the line that `systemctl status` shows. Its text may have no newline.
func status(text string) string { return "STATUS=" + strings.ReplaceAll(text, "\n", " ") }

// reload tells that the service reads its files again, does that, and tells how it went. A failure leaves the service
// as it was, so it is a warning.
func (s *supervisor) reload(fn func() error) {
	var now unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &now) // always there
	s.tell("RELOADING=1", fmt.Sprintf("MONOTONIC_USEC=%d", now.Nano()/1000), status("reading its files again"))

	said := "has read its files again"
	if err := fn(); err != nil {
		s.warn("the service continues as before: %v", err)
		said = "could not read its files again: " + err.Error()
	}
	s.tell("READY=1", status(said))
}

// watch sends a sign of life twice in the time that the supervisor allows, as long as check finds the service in
// order, until ctx ends. check returns the text of the status.
func (s *supervisor) watch(ctx context.Context, check func(context.Context) (string, error)) {
	if s.watchdog <= 0 {
		return
	}

	every := s.watchdog / 2
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}

		limited, cancel := context.WithTimeout(ctx, every)
		said, err := check(limited)
		cancel()
		switch {
		case err == nil:
			s.tell("WATCHDOG=1", status(said))
		case ctx.Err() == nil:
			s.warn("the service does not work: %v", err)
			s.tell(status("does not work: " + err.Error()))
		}
	}
}
