package service

import (
	"context"
	"sync"
	"time"
)

// Space is remembered at this interval, and when somebody asks and the last time is long enough ago, for a while.
const (
	spaceInterval = time.Minute
	spaceGap      = 5 * time.Second
	spaceKept     = 24 * time.Hour
	spacePoints   = 288 // of an answer, at most
)

// SpacePoint is the space of the pool at a time.
type SpacePoint struct {
	Time       time.Time `json:"time"`
	UsedBytes  int64     `json:"used_bytes"`
	TotalBytes int64     `json:"total_bytes"`
}

// SpaceHistory is the space of the pool over time, the oldest first.
type SpaceHistory struct {
	Items []SpacePoint `json:"items" nullable:"false"`
}

// spaceLog remembers the space of the pool. It is kept in memory only.
type spaceLog struct {
	mu     sync.Mutex
	points []SpacePoint
}

// note adds a point if the last one is old enough. Errors mean that there is none.
func (l *spaceLog) note(ctx context.Context, s *Service, gap time.Duration) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now().UTC()
	if n := len(l.points); n > 0 && now.Sub(l.points[n-1].Time) < gap {
		return nil
	}

	free, total, err := s.e.FreeSpace(ctx)
	if err != nil {
		return err
	}
	l.points = append(l.points, SpacePoint{now, total - free, total})
	old := 0
	for now.Sub(l.points[old].Time) > spaceKept {
		old++
	}
	l.points = l.points[old:]
	return nil
}

// list returns at most n points, with the largest of those that it leaves out in their place.
func (l *spaceLog) list(n int) []SpacePoint {
	l.mu.Lock()
	defer l.mu.Unlock()
	step := (len(l.points) + n - 1) / n
	out := []SpacePoint{}
	for i := 0; i < len(l.points); i += step {
		most := l.points[i]
		for _, p := range l.points[i:min(i+step, len(l.points))] {
			if p.UsedBytes > most.UsedBytes {
				most = p
			}
		}
		out = append(out, most)
	}
	return out
}

// run remembers the space until ctx ends.
func (l *spaceLog) run(ctx context.Context, s *Service) {
	tick := time.NewTicker(spaceInterval)
	defer tick.Stop()
	for {
		_ = l.note(ctx, s, spaceGap) // a pool that cannot tell now has a gap in its history
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

func (s *Service) addSpaceRoutes() {
	add(s, route{id: "show-space", access: anyUser, method: "GET", path: "/v1/pool/space", tag: "pool",
		summary: "Show the space of the pool over the last day",
		about: "A point for each minute since the service started. Long times have fewer points, each the highest of " +
			"its time."},
		func(ctx context.Context, _ *struct{}) (*struct{ Body SpaceHistory }, error) {
			if err := s.space.note(ctx, s, spaceGap); err != nil {
				return nil, err
			}
			return &struct{ Body SpaceHistory }{SpaceHistory{s.space.list(spacePoints)}}, nil
		})
}
