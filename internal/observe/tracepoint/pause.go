package tracepoint

import (
	"fmt"

	"pando/internal/base/errs"

	"golang.org/x/sys/unix"
)

// Pause stops recording until Resume, and keeps the records. It costs a few system calls for each event and CPU,
// whereas closing and reopening would make the kernel patch its code each time.
func (r *Recorder) Pause() error { return r.each(unix.PERF_EVENT_IOC_DISABLE) }

// Resume continues recording.
func (r *Recorder) Resume() error { return r.each(unix.PERF_EVENT_IOC_ENABLE) }

func (r *Recorder) each(request uint) error {
	one := func(fd int) error {
		if err := unix.IoctlSetInt(fd, request, 0); err != nil {
			return errs.Wrap("trace the kernel", "", fmt.Errorf("switch an event: %w", err))
		}
		return nil
	}

	for _, fd := range r.more {
		if err := one(fd); err != nil {
			return err
		}
	}

	for _, g := range r.rings {
		if err := one(g.fd); err != nil {
			return err
		}
	}

	return nil
}
