package gcs_test

import (
	"crypto/rand"
	"strings"
	"testing"

	"pando/internal/objstore"
	"pando/internal/objstore/gcs"
	"pando/internal/objstore/servertest"
	"pando/internal/objstore/storetest"
)

// prefix is one that no other test uses.
func prefix(t *testing.T) string { return "t/" + strings.ToLower(rand.Text()[:10]) }

func TestConformance(t *testing.T) {
	server := servertest.FakeGCS(t)
	server.Setenv(t)
	storetest.Run(t, func(t *testing.T) objstore.Store {
		s, err := gcs.Open(t.Context(), server.URL(prefix(t)))
		if err != nil {
			t.Fatal(err)
		}
		return s
	})
}
