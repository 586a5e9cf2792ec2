package run

import (
	"errors"
	"os"
	"os/exec"
	"syscall"

	"golang.org/x/sys/unix"
)

// Signals subscribes to the signals to pass on to a program in the foreground. It returns their channel
// and a function that unsubscribes. The front end decides which signals these are, because a library
// must not handle signals of its process. nil passes on none.
type Signals func() (arriving <-chan os.Signal, stop func())

// Foreground runs a command on behalf of the user of this process. It passes signals on to the
// command and returns when the command ends, however that reacts to them. It
// returns the exit status like a shell: 128 + signal if a signal ended the command. With an error,
// the command could not be started or waited for, and the status is 126.
func Foreground(cmd *exec.Cmd, signals Signals) (int, error) {
	pass := func(s os.Signal) { _ = cmd.Process.Signal(s) } // fails if it has just ended
	return foreground(cmd, signals, pass, func() {})
}

// ForegroundGroup is Foreground of a command in a process group of its own, which is not that of the terminal. Signals
// go to the whole group, and what is left of it when the command ends is killed.
func ForegroundGroup(cmd *exec.Cmd, signals Signals) (int, error) {
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Setpgid = true
	toGroup := func(s os.Signal) {
		if n, ok := s.(syscall.Signal); ok {
			_ = syscall.Kill(-cmd.Process.Pid, n)
		}
	}

	return foreground(cmd, signals, toGroup, func() {
		// As long as nobody has asked for its exit status, no other group gets its ID.
		for {
			err := unix.Waitid(unix.P_PID, cmd.Process.Pid, nil, unix.WEXITED|unix.WNOWAIT, nil)
			if !errors.Is(err, unix.EINTR) {
				break
			}
		}
		toGroup(syscall.SIGKILL)
	})
}

// foreground passes signals on with pass, and waits for the command after await has returned.
func foreground(cmd *exec.Cmd, signals Signals, pass func(os.Signal), await func()) (int, error) {
	var arriving <-chan os.Signal
	if signals != nil {
		var stop func()
		arriving, stop = signals()
		defer stop()
	}

	if err := cmd.Start(); err != nil {
		return 126, err
	}

	ended := make(chan error, 1)
	go func() {
		await()
		ended <- cmd.Wait()
	}()

	for {
		select {
		case s := <-arriving:
			pass(s)
		case err := <-ended:
			var exit *exec.ExitError
			if err == nil {
				return 0, nil
			}
			if !errors.As(err, &exit) {
				return 126, err
			}
			if st, ok := exit.Sys().(syscall.WaitStatus); ok && st.Signaled() {
				return 128 + int(st.Signal()), nil
			}
			return exit.ExitCode(), nil
		}
	}
}
