package web

import (
	"fmt"
	"strings"
	"time"
)

// spacePoint is a point of GET /v1/pool/space.
type spacePoint struct {
	Time       time.Time `json:"time"`
	UsedBytes  int64     `json:"used_bytes"`
	TotalBytes int64     `json:"total_bytes"`
}

// Size of the chart, in units of its own.
const (
	chartWidth  = 1000
	chartHeight = 200
)

// chart is the used space over time, as paths.
type chart struct {
	Area, Line string // paths; "": there are not enough points
	Points     []spacePoint
	From, To   time.Time
	Low, High  int64 // the scale
	Min, Max   int64 // of the used space
}

func chartOf(points []spacePoint) (c chart) {
	if c.Points = points; len(points) == 0 {
		return c
	}
	first, last := points[0], points[len(points)-1]
	c.From, c.To, c.Min, c.Max = first.Time, last.Time, first.UsedBytes, first.UsedBytes
	for _, p := range points {
		c.Min, c.Max = min(c.Min, p.UsedBytes), max(c.Max, p.UsedBytes)
	}

	// Leave room above and below, so that small changes are visible and do not look like large ones.
	room := max((c.Max-c.Min)/5, last.TotalBytes/100, 1)
	c.Low, c.High = max(0, c.Min-room), min(max(last.TotalBytes, c.Max), c.Max+room)
	span := max(c.To.Sub(c.From), time.Second)
	if len(points) < 2 {
		return c
	}

	var line strings.Builder
	for i, p := range points {
		x := chartWidth * float64(p.Time.Sub(c.From)) / float64(span)
		y := chartHeight * (1 - float64(p.UsedBytes-c.Low)/float64(max(c.High-c.Low, 1)))
		fmt.Fprintf(&line, "%c%.1f %.1f", "ML"[min(i, 1)], x, y)
	}
	c.Line = line.String()
	c.Area = fmt.Sprintf("%sL%d %dL0 %dZ", c.Line, chartWidth, chartHeight, chartHeight)
	return c
}

// Every returns some of the points, for a table.
func (c chart) Every() (out []spacePoint) {
	step := max(1, len(c.Points)/12)
	for i := 0; i < len(c.Points); i += step {
		out = append(out, c.Points[i])
	}
	return out
}
