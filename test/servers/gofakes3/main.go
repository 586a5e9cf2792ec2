// Gofakes3 serves S3 from memory, without looking at signatures, on a free port of
// this host. The arguments are buckets to make.
package main

import (
	"net/http"
	"os"

	"pando/test/servers/internal/serve"

	"github.com/johannesboyne/gofakes3"
	"github.com/johannesboyne/gofakes3/backend/s3mem"
)

func main() {
	serve.UntilClosed()
	store := s3mem.New()
	for _, b := range os.Args[1:] {
		if err := store.CreateBucket(b); err != nil {
			serve.Fail(err)
		}
	}
	l := serve.Loopback()
	serve.Listening(l.Addr())
	serve.Fail(http.Serve(l, gofakes3.New(store, gofakes3.WithoutVersioning()).Server()))
}
