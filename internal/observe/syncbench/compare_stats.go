package syncbench

import (
	"math"

	"gonum.org/v1/gonum/mathext"
)

func mean(x []float64) float64 {
	s := 0.0
	for _, v := range x {
		s += v
	}
	return s / float64(len(x))
}

// variance is the unbiased one of a sample of at least two.
func variance(x []float64) float64 {
	m, s := mean(x), 0.0
	for _, v := range x {
		s += (v - m) * (v - m)
	}
	return s / float64(len(x)-1)
}

// studentQuantile returns the quantile p, above 0.5, of Student's t distribution: the tail 2(1-p) is an incomplete beta
// function of freedom/(freedom+t*t).
func studentQuantile(p, freedom float64) float64 {
	x := mathext.InvRegIncBeta(freedom/2, 0.5, 2*(1-p))
	return math.Sqrt(freedom * (1 - x) / x)
}
