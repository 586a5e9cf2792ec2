package run

import (
	"errors"
	"os"
	"os/exec"
	"os/signal"
	"syscall"
)

// Foreground runs a command to which this process stands for its user: signals that ask this
// process to end are passed on to it, and what it does with them decides when it ends. It
// returns the exit status as a shell would have it: 128 + signal if one ended it. An error
// is that it could not be run, or not be waited for; the status is then 126.
func Foreground(cmd *exec.Cmd) (int, error) {
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT)
	defer signal.Stop(signals)
	if err := cmd.Start(); err != nil {
		return 126, err
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	for {
		select {
		case s := <-signals:
			_ = cmd.Process.Signal(s) // it may have ended just now
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
