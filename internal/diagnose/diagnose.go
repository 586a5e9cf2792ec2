// Package diagnose watches a live system for a while and ranks what makes the
// storage below a path slow, with the evidence. It only looks.
package diagnose
