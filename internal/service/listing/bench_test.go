package listing

import (
	"cmp"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"pando/internal/base/ref"
	"pando/internal/driver/plain"
	"pando/internal/engine"
)

// BenchmarkPage reads pages of 100 volumes, of 1,000 or PANDO_BENCH_VOLUMES:
//
//	PANDO_BENCH_VOLUMES=47000 go test ./internal/service/listing -run '^$' -bench Page
func BenchmarkPage(b *testing.B) {
	volumes, err := strconv.Atoi(cmp.Or(os.Getenv("PANDO_BENCH_VOLUMES"), "1000"))
	must(b, err)
	e := newPool(b, plain.Name, b.TempDir())
	src := b.TempDir()
	must(b, os.WriteFile(filepath.Join(src, "file"), nil, 0o600))
	_, err = e.Import(b.Context(), engine.ImportRequest{Name: ref.MustName("g"), Source: src})
	must(b, err)
	_, err = e.Clone(b.Context(), engine.CloneRequest{From: ref.Ref{Name: "g"}, Name: ref.MustName("v"), Count: volumes})
	must(b, err)

	for _, q := range []Request{{}, {Sort: "name:desc"}, {Filters: []string{"name=v-9*"}}, {Filters: []string{"name=*9"}},
		{Filters: []string{"golden=g"}}, {Filters: []string{"golden=none"}}, {Sort: "created:desc"}, {Sort: "used"},
		{Sort: "exclusive:desc"}, {Filters: []string{"state=mounted"}}} {
		name := ""
		for _, f := range q.Filters {
			name += f
		}
		q.Limit = 100
		b.Run(name+" "+q.Sort, func(b *testing.B) {
			for range b.N {
				_, err := List(b.Context(), e, q)
				must(b, err)
			}
		})
	}
}
