package proof

import (
	"context"
	"time"
)

// Sample x.
func (w *Watch) Sample(ctx context.Context, d time.Duration) error { return nil }
