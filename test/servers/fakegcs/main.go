// Fakegcs serves Google Cloud Storage from memory on a free port of this host. The
// arguments are buckets to make.
package main

import (
	"net/http"
	"os"

	"pando/test/servers/internal/serve"

	"github.com/fsouza/fake-gcs-server/fakestorage"
)

func main() {
	serve.UntilClosed()
	l := serve.Loopback()
	s, err := fakestorage.NewServerWithOptions(fakestorage.Options{
		NoListener: true, // its handler is served below
		Scheme:     "http",
		// Which paths it knows depends on the host that is asked for.
		PublicHost:  l.Addr().String(),
		ExternalURL: "http://" + l.Addr().String(),
	})
	if err != nil {
		serve.Fail(err)
	}

	for _, b := range os.Args[1:] {
		s.CreateBucketWithOpts(fakestorage.CreateBucketOpts{Name: b})
	}

	serve.Listening(l.Addr())
	serve.Fail(http.Serve(l, s.HTTPHandler()))
}
