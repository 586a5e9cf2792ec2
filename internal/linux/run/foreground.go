package run

import (
	"errors"
	"os"
	"os/exec"
	"syscall"
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
			_ = cmd.Process.Signal(s) // fails if the command has just ended
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
