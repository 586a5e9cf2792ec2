package s3_test

import (
	"testing"

	"pando/internal/remote/objstore"
	"pando/internal/remote/objstore/s3"
	"pando/internal/testing/servertest"
	"pando/internal/testing/storetest"
)

// servers are those of S3.
var servers = map[string]func(testing.TB) *servertest.Server{
	"gofakes3":  func(t testing.TB) *servertest.Server { return servertest.GoFakeS3(t) },
	"versitygw": func(t testing.TB) *servertest.Server { return servertest.VersityGW(t) },
}

func TestConformance(t *testing.T) {
	for name, start := range servers {
		t.Run(name, func(t *testing.T) {
			server := start(t)
			server.Setenv(t)
			storetest.Run(t, func(t *testing.T) objstore.Store {
				s, err := s3.Open(t.Context(), server.URL(prefix(t)), access)
				if err != nil {
					t.Fatal(err)
				}
				return s
			})
		})
	}
}
