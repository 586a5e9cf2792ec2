package run

import (
	"errors"
	"os"
	"os/exec"
	"syscall"
)

// Signals begins to receive the signals that a program in the foreground is to get, and
// returns them, and what ends it. Which ones these are, the front end decides: a library
// takes no signals of the process that it is part of. nil: none are passed on.
type Signals func() (arriving <-chan os.Signal, stop func())

// Foreground runs a command on behalf of the user of this process: signals are passed on
// to it while it runs, and how it reacts to them decides when it ends. Foreground
// returns the exit status as a shell reports it: 128 + signal if one ended the command. An error
// means that it could not be run, or not be waited for; the status is then 126.
func Foreground(cmd *exec.Cmd, signals Signals) (int, error) {
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
	go func() { ended <- cmd.Wait() }()

	for {
		select {
		case s := <-arriving:
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
