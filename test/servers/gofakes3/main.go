// Gofakes3 serves S3 from memory, without looking at signatures, on a free port of
// this host. The arguments are buckets to make.
//
//	-ahead DURATION   its clock is so much ahead of this host's
package main

import (
	"flag"
	"net/http"
	"time"

	"pando/test/servers/internal/serve"

	"github.com/johannesboyne/gofakes3"
	"github.com/johannesboyne/gofakes3/backend/s3mem"
)

func main() {
	serve.UntilClosed()
	ahead := flag.Duration("ahead", 0, "")
	flag.Parse()
	store := s3mem.New()
	for _, b := range flag.Args() {
		if err := store.CreateBucket(b); err != nil {
			serve.Fail(err)
		}
	}

	s3 := gofakes3.New(store, gofakes3.WithoutVersioning(), gofakes3.WithTimeSource(clock{*ahead})).Server()
	l := serve.Loopback()
	serve.Listening(l.Addr())
	serve.Fail(http.Serve(l, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Date", time.Now().Add(*ahead).UTC().Format(http.TimeFormat))
		s3.ServeHTTP(w, r)
	})))
}

// clock is a clock that may be wrong.
type clock struct{ ahead time.Duration }

func (c clock) Now() time.Time                  { return time.Now().Add(c.ahead) }
func (c clock) Since(t time.Time) time.Duration { return c.Now().Sub(t) }
