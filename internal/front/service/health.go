package service

import (
	"context"
	"fmt"

	"pando/internal/base/errs"
	"pando/internal/engine"
)

// Health returns one line about what the service is doing, or an error if it could not answer requests: the catalogue
// does not answer until ctx ends.
func (s *Service) Health(ctx context.Context) (string, error) {
	if _, _, err := s.e.VolumePage(ctx, engine.PageQuery{Limit: 1}); err != nil {
		return "", err
	}

	s.operations.mu.Lock()
	running := s.operations.countRunning(nil)
	s.operations.mu.Unlock()
	return fmt.Sprintf("serving %s: %s, %s of events", s.e.Dir(), errs.Plural(running, "operation"),
		errs.Plural(s.streams.count(), "stream")), nil
}
