//go:build linux && (amd64 || arm64)

package faulttest

import (
	"errors"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
)

// DefaultSeed is what tests draw from unless PANDO_SEED is set: the same draw for every commit, so that a change is
// judged by what it changed and not by what it happened to draw. A commit that changes it changes nothing else.
const DefaultSeed = 1

// Seed is what is drawn from in this process: PANDO_SEED, or [DefaultSeed].
var Seed = sync.OnceValue(func() uint64 { return number("PANDO_SEED", DefaultSeed) })

// Shard is PANDO_SHARD, or 0. Samples of one seed with the shards 0 to n-1 cover everything of which a sample is one
// n-th: see [Draw].
var Shard = sync.OnceValue(func() uint64 { return number("PANDO_SHARD", 0) })

// Full reports whether a test is to leave nothing out, as in `make test-all`: PANDO_TEST_FULL is set.
func Full() bool { return os.Getenv("PANDO_TEST_FULL") != "" }

// number reads an environment variable.
func number(name string, otherwise uint64) uint64 {
	text := os.Getenv(name)
	if text == "" {
		return otherwise
	}
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		panic(fmt.Sprintf("%s is not a number: %q", name, text))
	}
	return n
}

// Draw returns a number below n that depends on [Seed], the test and what is drawn for, and goes up by one, modulo n,
// with each [Shard]. It is 0 with PANDO_TEST_FULL, so that `for i := Draw(t, n); ...; i += DrawStep(n)` takes a sample
// by default, and else everything.
func Draw(t testing.TB, n int, what ...any) int { return DrawInside(t, n, 1, what...) }

// DrawInside is Draw below a draw that is one of outer: it goes up by one whenever the outer one has gone round, so
// that outer*n shards cover all combinations.
func DrawInside(t testing.TB, n, outer int, what ...any) int {
	if Full() {
		return 0
	}
	noteDraw(t, n*outer)
	return residue(n, Shard()/uint64(outer), t.Name(), what)
}

// DrawStep is the step of a loop that begins with [Draw].
func DrawStep(n int) int {
	if Full() {
		return 1
	}
	return n
}

// residue returns (a hash of the seed and of what + shard) modulo n.
func residue(n int, shard uint64, what ...any) int {
	every := uint64(n)
	return int((source(what...).Uint64()%every + shard%every) % every)
}

// Rand returns random numbers that depend on [Seed], the test and what they are for, and logs how to repeat them.
// They are not safe for concurrent use.
func Rand(t testing.TB, what ...any) *rand.Rand {
	t.Helper()
	t.Logf("drawn with PANDO_SEED=%d", Seed())
	noteDraw(t, 1)
	return rand.New(source(t.Name(), what))
}

// DrawnVariable is the environment variable that names a file which gets a line for each test that draws: its top-level
// name, a tab, and how many shards cover what it samples; 1 if only other seeds make it draw something else.
const DrawnVariable = "PANDO_TEST_DRAWN"

var drawn sync.Map // files, each with a line that is in it

func noteDraw(t testing.TB, shards int) {
	path := os.Getenv(DrawnVariable)
	if path == "" {
		return
	}
	top, _, _ := strings.Cut(t.Name(), "/")
	line := fmt.Sprintf("%s\t%d\n", top, shards)
	if _, known := drawn.LoadOrStore(path+line, true); known {
		return
	}

	f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o666)
	if err == nil {
		_, err = f.WriteString(line)
		err = errors.Join(err, f.Close())
	}
	if err != nil {
		t.Fatalf("%s: %v", DrawnVariable, err)
	}
}

func source(what ...any) *rand.PCG {
	h := fnv.New64a()
	fmt.Fprintln(h, what...)
	// Not the sum itself: its low bits are tied between all draws of a seed.
	return rand.NewPCG(h.Sum64(), Seed())
}
