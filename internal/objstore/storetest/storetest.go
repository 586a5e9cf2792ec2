// Package storetest holds what every object store must do, as tests, and faults to
// put in front of one.
package storetest

import (
	"testing"

	"pando/internal/objstore"
)

// Run runs the conformance suite. open returns an empty store of its own for each
// test; what is in it afterwards is the business of who called.
func Run(t *testing.T, open func(t *testing.T) objstore.Store) {
	for _, c := range []struct {
		name string
		test func(*testing.T, objstore.Store)
	}{
		{"Probe", testProbe},
	} {
		t.Run(c.name, func(t *testing.T) { c.test(t, open(t)) })
	}
}

func testProbe(t *testing.T, s objstore.Store) {
	if err := objstore.Probe(t.Context(), s); err != nil {
		t.Fatal(err)
	}
}
