package run

import (
	"os"
	"sync/atomic"
	"syscall"
	"time"
)

// WithTimeout adds to signals SIGTERM after a time, and SIGKILL a grace later. timedOut reports whether it has sent
// one. A timeout of 0 adds nothing.
func WithTimeout(signals Signals, timeout, grace time.Duration) (_ Signals, timedOut func() bool) {
	var sent atomic.Bool
	if timeout <= 0 {
		return signals, sent.Load
	}

	return func() (<-chan os.Signal, func()) {
		var arriving <-chan os.Signal
		stopSignals := func() {}
		if signals != nil {
			arriving, stopSignals = signals()
		}

		out, done := make(chan os.Signal), make(chan struct{})
		go func() {
			send := func(s os.Signal) {
				select {
				case out <- s:
				case <-done:
				}
			}
			next, end := syscall.SIGTERM, time.NewTimer(timeout)
			defer end.Stop()
			for {
				select {
				case s := <-arriving:
					send(s)
				case <-end.C:
					sent.Store(true)
					send(next)
					next = syscall.SIGKILL
					end.Reset(grace)
				case <-done:
					return
				}
			}
		}()
		return out, func() { close(done); stopSignals() }
	}, sent.Load
}
