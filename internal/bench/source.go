package bench

import (
	"context"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"

	"pando/internal/base/errs"
	"pando/internal/base/progress"
)

const (
	filesADir   = 20
	medianBytes = 3600 // of a generated file
	meanBytes   = 8 << 10
	maxBytes    = 256 << 10
	sizeSpread  = 1.3 // standard deviation of the logarithm of sizes
)

// generate makes a tree of n files in dir, sized like source code: most of a few
// KiB, some much larger, 8 KiB on average, 20 in a directory. With bytes, sizes are
// scaled so that all of them have about that. The same n and bytes give the same tree.
func generate(ctx context.Context, dir string, n int, bytes int64, t *progress.Tracker) error {
	scale := 1.0
	if bytes > 0 {
		scale = float64(bytes) / (float64(n) * meanBytes)
	}

	rng := rand.New(rand.NewPCG(1, uint64(n)))
	text := make([]byte, 2*maxBytes)
	for i := range text {
		text[i] = " etaoinshrdlucmfwypvbgkjqxz\n"[rng.IntN(28)]
	}

	t.StartOf(progress.RunningBenchmark, "creating a source tree", int64(n), 0)

	for i := range n {
		if i%filesADir == 0 {
			if err := ctx.Err(); err != nil {
				return err
			}
			if err := os.MkdirAll(filepath.Join(dir, generatedDir(i)), 0o755); err != nil {
				return errs.Wrap("bench", dir, err)
			}
		}

		size := min(int(scale*medianBytes*math.Exp(rng.NormFloat64()*sizeSpread)), maxBytes)
		path := filepath.Join(dir, generatedDir(i), fmt.Sprintf("file%d.txt", i%filesADir))
		if err := os.WriteFile(path, text[rng.IntN(maxBytes):][:size], 0o644); err != nil {
			return errs.Wrap("bench", path, err)
		}

		t.Add(1, int64(size))
	}

	return nil
}

func generatedDir(i int) string {
	d := i / filesADir
	return fmt.Sprintf("dir%d/sub%d", d/filesADir, d%filesADir)
}

// readTree reads everything below dir once, so that all who copy it find it in
// memory, as far as it fits, and counts files (of any kind but directories) and
// bytes of their data.
func readTree(ctx context.Context, dir string, t *progress.Tracker) (files, bytes int64, err error) {
	t.StartOf(progress.RunningBenchmark, "reading the source once", 0, 0)
	return readFiles(ctx, dir, t)
}

// readFiles is readTree, as part of another stage.
func readFiles(ctx context.Context, dir string, t *progress.Tracker) (files, bytes int64, err error) {
	buf := make([]byte, 1<<20)
	err = filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err != nil {
			return err
		}

		if err := ctx.Err(); err != nil {
			return err
		}

		if d.IsDir() {
			return nil
		}

		files++
		if !d.Type().IsRegular() {
			return nil
		}

		f, err := os.Open(path)
		if err != nil {
			return err
		}

		defer f.Close()

		n, err := io.CopyBuffer(onlyWriter{}, onlyReader{f}, buf)
		bytes += n
		t.Add(1, n)
		return err
	})

	return files, bytes, errs.Wrap("bench", dir, err)
}

// onlyWriter and onlyReader keep io.CopyBuffer at its buffer.
type onlyWriter struct{}

func (onlyWriter) Write(b []byte) (int, error) { return len(b), nil }

type onlyReader struct{ io.Reader }
