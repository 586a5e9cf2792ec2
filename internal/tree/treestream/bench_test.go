package treestream

import (
	"bytes"
	"io"
	"os"
	"os/exec"
	"strings"
	"testing"

	"pando/internal/tree/treediff"
)

// benchTree is $PANDO_BENCH_TREE or Go's own tree, about 15,000 files and 270 MB.
func benchTree(b *testing.B) string {
	b.Helper()
	if dir := os.Getenv("PANDO_BENCH_TREE"); dir != "" {
		return dir
	}
	out, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		b.Skipf("SKIPPED: set PANDO_BENCH_TREE: %v", err)
	}
	return strings.TrimSpace(string(out))
}

// BenchmarkSend reads a tree.
func BenchmarkSend(b *testing.B) {
	src := open(b, benchTree(b))
	for b.Loop() {
		must(b, Send(b.Context(), io.Discard, src, SendOptions{}))
	}
}

// BenchmarkApply makes one.
func BenchmarkApply(b *testing.B) {
	var stream bytes.Buffer
	must(b, Send(b.Context(), &stream, open(b, benchTree(b)), SendOptions{}))
	for b.Loop() {
		dir := b.TempDir()
		_, err := Apply(b.Context(), bytes.NewReader(stream.Bytes()), open(b, dir), ApplyOptions{})
		must(b, err)
	}
	b.SetBytes(int64(stream.Len()))
}

// BenchmarkSendDiff compares a tree with itself, as if it were a copy of which nothing is known.
func BenchmarkSendDiff(b *testing.B) {
	src, base := open(b, benchTree(b)), open(b, benchTree(b))
	for b.Loop() {
		must(b, SendDiff(b.Context(), io.Discard, base, src, treediff.Options{}, SendOptions{}))
	}
}
