package service

import (
	"context"
	"sync"
	"time"

	"pando/internal/base/errs"
	"pando/internal/engine"
	"pando/internal/remote/replicate"

	"github.com/prometheus/client_golang/prometheus"
)

// Limits of a scrape. Tests use others.
var (
	// scrapeTimeout is how long a scrape waits for the pool. Then it answers without its figures.
	scrapeTimeout = 5 * time.Second

	// scrapeFresh is how long the figures of the pool serve further scrapes: otherwise anybody who may read them could
	// keep the catalogue busy.
	scrapeFresh = time.Second
)

// MaxMetricsVolumes limits Options.MetricsVolumes.
const MaxMetricsVolumes = 10000

// maxEventsRead limits how many events of the history a scrape counts. The next one continues.
const maxEventsRead = 20000

// poolCollector reads figures of the pool for scrapes, each time with one query of the catalogue. Scrapes at the same
// time share it.
type poolCollector struct {
	s *Service

	mu     sync.Mutex
	last   *reading // that is under way, or the last one
	closed bool

	// Of the reading under way, of which there is one at a time.
	tail   *engine.HistoryTail // nil: not yet
	events map[string]uint64   // by verb, since tail was opened
	failed map[string]bool     // parts that failed the last time
}

// reading is one reading of the pool. Its fields are valid when done is closed.
type reading struct {
	done    chan struct{}
	endedAt time.Time
	took    time.Duration

	pool    engine.Metrics
	remotes []*replicate.Remote
	events  map[string]uint64
	errs    map[string]error // by part
}

// Parts of a reading that fail by themselves.
const (
	partCatalogue = "catalogue"
	partHistory   = "history"
	partRemotes   = "remotes"
	partSpace     = "space"
)

func newPoolCollector(s *Service) *poolCollector {
	return &poolCollector{s: s, events: map[string]uint64{}, failed: map[string]bool{}}
}

// Describe sends all metrics.
func (c *poolCollector) Describe(out chan<- *prometheus.Desc) {
	for _, d := range poolDescs {
		out <- d
	}
}

// Collect sends the figures of the pool. Parts that could not be read in time are missing.
func (c *poolCollector) Collect(out chan<- prometheus.Metric) {
	r := c.read()
	timeout := time.NewTimer(scrapeTimeout)
	defer timeout.Stop()

	select {
	case <-r.done:
	case <-timeout.C:
		late := errs.New(errs.Canceled, "read metrics", c.s.e.Dir(), "it took more than %v", scrapeTimeout)
		r = &reading{took: scrapeTimeout, errs: map[string]error{partCatalogue: late, partHistory: late, partRemotes: late,
			partSpace: late}}
	}
	r.send(out, c.s)
}

// read returns the reading under way, or a fresh one, or begins one.
func (c *poolCollector) read() *reading {
	c.mu.Lock()
	defer c.mu.Unlock()

	if r := c.last; r != nil {
		select {
		case <-r.done:
			if c.closed || time.Since(r.endedAt) < scrapeFresh {
				return r
			}
		default:
			return r
		}
	}

	r := &reading{done: make(chan struct{}), errs: map[string]error{}}
	c.last = r
	if c.closed {
		close(r.done)
		return r
	}
	go c.fill(r)
	return r
}

// fill reads the pool.
func (c *poolCollector) fill(r *reading) {
	defer close(r.done)
	ctx, cancel := context.WithTimeout(c.s.life, scrapeTimeout)
	defer cancel()

	begun := time.Now()
	r.pool = c.s.e.Metrics(ctx, engine.MetricsQuery{Volumes: c.s.MetricsVolumes})
	r.errs[partSpace], r.errs[partCatalogue] = r.pool.SpaceErr, r.pool.TotalsErr
	r.remotes, r.errs[partRemotes] = c.readRemotes()
	r.errs[partHistory] = c.countEvents()
	r.events = map[string]uint64{}
	for verb, n := range c.events {
		r.events[verb] = n
	}

	for part, err := range r.errs {
		if err != nil && !c.failed[part] {
			c.s.Log("metrics: %s: %v", part, err)
		}
		c.failed[part] = err != nil
	}
	r.endedAt, r.took = time.Now(), time.Since(begun)
}

// readRemotes reads what the pool has of its remotes. It connects to none.
func (c *poolCollector) readRemotes() ([]*replicate.Remote, error) {
	names, err := replicate.List(c.s.e.Dir())
	if err != nil {
		return nil, err
	}

	var out []*replicate.Remote
	var first error
	for _, name := range names {
		r, err := replicate.Load(c.s.e.Dir(), name, replicate.Access{})
		switch {
		case err == nil:
			out = append(out, r)
		case first == nil && !errs.Is(err, errs.NotFound): // it was removed in the meantime
			first = err
		}
	}
	return out, first
}

// countEvents counts the events of the history since the first scrape, whichever process they are from.
func (c *poolCollector) countEvents() (err error) {
	if c.tail == nil {
		if c.tail, err = engine.FollowHistory(c.s.e.Dir(), ""); err != nil {
			c.tail = nil
			return err
		}
	}

	for n := 0; n < maxEventsRead; {
		events, _, err := c.tail.Next()
		if err != nil || len(events) == 0 {
			return err
		}
		n += len(events)
		for _, e := range events {
			c.events[e.Verb]++
		}
	}
	return nil
}

// close ends readings, after the last scrape.
func (c *poolCollector) close() {
	c.mu.Lock()
	c.closed = true
	r := c.last
	c.mu.Unlock()

	if r != nil {
		select {
		case <-r.done:
		case <-time.After(scrapeTimeout):
			return // a filesystem that does not answer
		}
	}
	if c.tail != nil {
		c.tail.Close()
	}
}
