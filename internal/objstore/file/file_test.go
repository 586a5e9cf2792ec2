package file_test

import (
	"net/url"
	"testing"

	"pando/internal/objstore"
	"pando/internal/objstore/file"
	"pando/internal/objstore/storetest"
)

func open(t *testing.T, dir string) objstore.Store {
	t.Helper()
	s, err := file.Create(t.Context(), &url.URL{Scheme: "file", Path: dir})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestConformance(t *testing.T) {
	storetest.Run(t, func(t *testing.T) objstore.Store { return open(t, t.TempDir()) })
}
