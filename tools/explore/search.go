//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"strings"
	"sync"
)

// search is a search in packages.
type search struct {
	out          io.Writer
	isolate, dir string
	keep         string // directory for the output of tests that failed
	commit       string
	fuzzCache    string
	atOnce       int
	log          log
	records      []record // of earlier searches

	mu       sync.Mutex // guards what follows, and all items
	changed  *sync.Cond
	packages []*searched
	turn     int             // index of the package that comes next
	running  int             // units
	found    map[string]bool // what has been printed
	err      error
}

// run searches until the context ends, or there is nothing left to search.
func (s *search) run(ctx context.Context) error {
	s.changed = sync.NewCond(&s.mu)
	defer context.AfterFunc(ctx, s.changed.Broadcast)()

	var workers sync.WaitGroup
	for range s.atOnce {
		workers.Go(func() {
			for u, ok := s.next(ctx); ok; u, ok = s.next(ctx) {
				s.finish(u, s.runUnit(ctx, u))
			}
		})
	}
	workers.Wait()

	fmt.Fprintln(s.out)
	for _, p := range s.packages {
		if len(p.items) > 0 {
			fmt.Fprintln(s.out, p)
		}
	}
	fmt.Fprintf(s.out, "%d found\n", len(s.found))
	return s.err
}

// next waits for something to run. It returns false at the end of the search.
func (s *search) next(ctx context.Context) (unit, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for ctx.Err() == nil && s.err == nil {
		for range s.packages {
			p := s.packages[s.turn]
			s.turn = (s.turn + 1) % len(s.packages)
			if u, ok := p.take(); ok {
				s.running++
				return u, true
			}
		}
		if s.running == 0 {
			break
		}
		s.changed.Wait()
	}
	return unit{}, false
}

// finish makes the items of a unit free again.
func (s *search) finish(u unit, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.running--
	s.err = errors.Join(s.err, err)
	for _, i := range u.items {
		i.busy = false
	}

	if full, _, of, unseen := u.pkg.rounds(); unseen == 0 && full > u.pkg.told {
		u.pkg.told = full
		fmt.Fprintf(s.out, "%s: round %d is complete: %d shards, %s\n", u.pkg.Name(), full, of, u.pkg.commits(full))
	}
	s.changed.Broadcast()
}

func (s *search) binary(p *searched, suffix string) string {
	return filepath.Join(s.dir, strings.ReplaceAll(p.Name(), "/", "_")+"."+suffix)
}

// open builds the tests of a package, lists them, and takes in what earlier searches did.
func (s *search) open(ctx context.Context, p *searched) error {
	if err := p.Build(ctx, s.binary(p, "test")); err != nil {
		return err
	}
	r, err := p.Run(ctx, nil, s.isolate, s.binary(p, "test"), "-test.list=.")
	if err == nil && r.Status != 0 {
		err = fmt.Errorf("listing the tests of %s: exit status %d\n%s", p.Name(), r.Status, r.Output)
	}
	if err != nil {
		return err
	}

	s.mu.Lock()
	defer s.mu.Unlock()
	p.items = map[string]*item{}
	for name := range strings.FieldsSeq(r.Output) {
		if strings.HasPrefix(name, "Test") || strings.HasPrefix(name, "Fuzz") {
			p.items[name] = newItem(name)
		}
	}
	for _, r := range s.records {
		if i := p.items[r.Test]; i != nil && r.Package == p.Name() {
			i.add(r)
		}
	}
	p.told, _, _, _ = p.rounds()
	return nil
}
