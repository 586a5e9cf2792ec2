package syncbench

import "math"

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

// student is the quantile p (above 0.5) of Student's t distribution.
func student(p, freedom float64) float64 {
	low, high := 0.0, 1.0
	for cdf := studentCDF(high, freedom); cdf < p && high < 1e9; cdf = studentCDF(high, freedom) {
		low, high = high, high*2
	}

	for range 200 {
		mid := (low + high) / 2
		if mid == low || mid == high {
			break
		}
		if studentCDF(mid, freedom) < p {
			low = mid
		} else {
			high = mid
		}
	}

	return (low + high) / 2
}

// studentCDF is the probability of at most t (not below 0).
func studentCDF(t, freedom float64) float64 {
	return 1 - incompleteBeta(freedom/2, 0.5, freedom/(freedom+t*t))/2
}

// incompleteBeta is the regularised incomplete beta function I_x(a, b), by the continued
// fraction of Abramowitz and Stegun, 26.5.8, evaluated by the method of Lentz.
func incompleteBeta(a, b, x float64) float64 {
	switch {
	case x <= 0:
		return 0
	case x >= 1:
		return 1
	case x > (a+1)/(a+b+2): // where it converges slowly
		return 1 - incompleteBeta(b, a, 1-x)
	}

	ab, _ := math.Lgamma(a + b)
	ga, _ := math.Lgamma(a)
	gb, _ := math.Lgamma(b)
	front := math.Exp(ab-ga-gb+a*math.Log(x)+b*math.Log1p(-x)) / a
	const tiny = 1e-300
	c, d := 1.0, 1-(a+b)*x/(a+1)
	if math.Abs(d) < tiny {
		d = tiny
	}

	d = 1 / d
	h := d
	for m := 1.0; m <= 500; m++ {
		for _, n := range [2]float64{
			m * (b - m) * x / ((a + 2*m - 1) * (a + 2*m)),
			-(a + m) * (a + b + m) * x / ((a + 2*m) * (a + 2*m + 1)),
		} {
			if d = 1 + n*d; math.Abs(d) < tiny {
				d = tiny
			}
			if c = 1 + n/c; math.Abs(c) < tiny {
				c = tiny
			}
			d = 1 / d
			h *= d * c
			if math.Abs(d*c-1) < 1e-15 {
				return front * h
			}
		}
	}

	return front * h
}
