package proof

// Forget makes the evidence what it would be if no layer said of itself that it lies:
// so that tests see what the counts alone show.
func (e *Evidence) Forget() { e.facts = nil }

// Sampled is the number of syncs that Sample has seen so far.
func (w *Watch) Sampled() int64 {
	if w.sample == nil {
		return 0
	}
	return w.sample.Syncs
}
