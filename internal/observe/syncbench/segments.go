package syncbench

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"time"
)

// segmentPoll is how often it is looked whether fio has gone on to the next file. To fill a
// file of etcd's takes a fast disk a second.
const segmentPoll = 50 * time.Millisecond

// renewer makes the files that fio has left new again, so that fio, which writes one after the other
// and then begins anew, never overwrites: it truncates them to nothing and allocates them anew.
//
// That fio has gone on is seen by the time of change of the next file: fio keeps at most one file
// open, and the renewer touches only those that it has left, which it comes back to after all others.
type renewer struct {
	s       *scratch
	bytes   int64
	writers []renewed
}

type renewed struct {
	names []string
	made  []time.Time // when the file was last made: fio has written to it if it has changed since
	at    int         // fio is in this one
}

// newRenewer makes all files of the plan new.
func newRenewer(s *scratch, p *plan) (*renewer, error) {
	r := &renewer{s: s, bytes: p.files[0].bytes, writers: make([]renewed, p.Writers)}
	for w := range r.writers {
		for _, f := range p.files[w*p.segments : (w+1)*p.segments] {
			made, err := r.renew(f.name)
			if err != nil {
				return nil, s.full(err, 0)
			}
			r.writers[w].names = append(r.writers[w].names, f.name)
			r.writers[w].made = append(r.writers[w].made, made)
		}
	}

	return r, s.syncfs()
}

func (r *renewer) renew(name string) (time.Time, error) {
	f, err := os.OpenFile(r.s.path(name), os.O_WRONLY, 0)
	if err != nil {
		return time.Time{}, err
	}

	defer f.Close()
	if err := f.Truncate(0); err != nil {
		return time.Time{}, err
	}

	if err := allocate(f, r.bytes); err != nil {
		return time.Time{}, err
	}

	st, err := f.Stat()
	if err != nil {
		return time.Time{}, err
	}

	return st.ModTime(), f.Close()
}

// run renews until ctx ends, which is no error.
func (r *renewer) run(ctx context.Context) error {
	tick := time.NewTicker(segmentPoll)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		for w := range r.writers {
			if err := r.follow(&r.writers[w]); err != nil {
				return r.s.full(err, 0)
			}
		}
	}
}

// follow renews the files that one writer has left since.
func (r *renewer) follow(w *renewed) error {
	for range w.names {
		next := (w.at + 1) % len(w.names)
		st, err := os.Stat(r.s.path(w.names[next]))
		if err != nil {
			if errors.Is(err, fs.ErrNotExist) {
				return nil
			}
			return err
		}

		if st.ModTime().Equal(w.made[next]) {
			return nil
		}

		if w.made[w.at], err = r.renew(w.names[w.at]); err != nil {
			return err
		}

		w.at = next
	}

	return nil
}
