package syncbench

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"syscall"
)

// sample is what fio says at one moment about the run so far, summed over its jobs.
type sample struct {
	ms     int64 // that the jobs have run, the longest
	writes int64
	bytes  int64
	iops   float64
	cpu    float64 // seconds of processor time that the jobs have used
	sync   counts  // of calls that only sync
	write  counts  // of calls that write
	err    syscall.Errno
}

// counts is a distribution of latencies in nanoseconds.
type counts struct {
	n        int64
	min, max float64
	sum      float64
	bins     map[int64]int64 // by fio's value for the bin, which is its middle
}

// The part of fio's json+ that is used. Numbers are pointers to nothing: what is missing is 0.
type fioOutput struct {
	Jobs []fioJob `json:"jobs"`
}

type fioJob struct {
	Error   int     `json:"error"`
	Runtime float64 `json:"job_runtime"` // ms
	User    float64 `json:"usr_cpu"`     // % of it
	System  float64 `json:"sys_cpu"`
	Write   struct {
		Bytes   float64    `json:"io_bytes"`
		IOPS    float64    `json:"iops"`
		Total   float64    `json:"total_ios"`
		Latency fioLatency `json:"clat_ns"`
	} `json:"write"`
	Sync struct {
		Latency fioLatency `json:"lat_ns"`
	} `json:"sync"`
}

type fioLatency struct {
	Min  float64            `json:"min"`
	Max  float64            `json:"max"`
	Mean float64            `json:"mean"`
	N    float64            `json:"N"`
	Bins map[string]float64 `json:"bins"`
}

// maxObject bounds one of fio's objects: each job has at most some 4,000 bins.
const maxObject = 256 << 20

// readSamples reads what fio prints with --output-format=json+ and --status-interval, and
// hands on a sample for each object as it comes. What is between the objects is not JSON
// (fio's notes), and returned, cut short. An object without an end, as of a killed fio, is left out.
// The error is that of reading, of an object that is none of fio's, or of each.
func readSamples(r io.Reader, each func(*sample) error) (notes string, err error) {
	lines := bufio.NewReaderSize(r, 64<<10)
	var object, other bytes.Buffer
	inside := false
	for {
		line, err := lines.ReadBytes('\n')
		text := bytes.TrimRight(line, "\r\n")
		switch {
		case !inside && string(text) == "{":
			inside = true
			object.Reset()
			object.Write(line)
		case inside:
			if object.Len()+len(line) > maxObject {
				return other.String(), errors.New("the output of fio ends in the middle of an object")
			}

			object.Write(line)

			// fio indents what is inside.
			if string(text) == "}" {
				inside = false
				s, err := parseSample(object.Bytes())
				if err != nil {
					return other.String(), err
				}
				if err := each(s); err != nil {
					return other.String(), err
				}
			}
		case other.Len() < 4<<10:
			other.Write(line[:min(len(line), 1<<10)])
		}
		if errors.Is(err, io.EOF) {
			return other.String(), nil
		}
		if err != nil {
			return other.String(), err
		}
	}
}

// parseSample reads one object.
func parseSample(text []byte) (*sample, error) {
	var out fioOutput
	if err := json.Unmarshal(text, &out); err != nil {
		return nil, fmt.Errorf("output of fio: %w", err)
	}

	s := &sample{}
	for _, j := range out.Jobs {
		s.ms = max(s.ms, whole(j.Runtime))
		s.writes = add(s.writes, whole(j.Write.Total))
		s.bytes = add(s.bytes, whole(j.Write.Bytes))
		s.iops += finite(j.Write.IOPS)
		s.cpu += (finite(j.User) + finite(j.System)) / 100 * finite(j.Runtime) / 1000
		if s.err == 0 && j.Error > 0 {
			s.err = syscall.Errno(j.Error)
		}
		if err := errors.Join(s.sync.add(j.Sync.Latency), s.write.add(j.Write.Latency)); err != nil {
			return nil, err
		}
	}

	return s, nil
}

// most is the largest count that is believed: sums of some stay in range.
const most = 1 << 53

// whole is a count: not below 0, and within range.
func whole(f float64) int64 { return int64(finite(f)) }

func finite(f float64) float64 {
	if !(f > 0) { // NaN too
		return 0
	}
	return min(f, most)
}

func add(a, b int64) int64 { return min(a+b, most) }

// add sums up a job's distribution.
func (c *counts) add(l fioLatency) error {
	var n int64
	for key, v := range l.Bins {
		ns, err := strconv.ParseInt(key, 10, 64)
		if err != nil || ns < 0 {
			return fmt.Errorf("output of fio: %q is not a latency", key)
		}
		k := whole(v)
		if k == 0 {
			continue
		}
		if c.bins == nil {
			c.bins = map[int64]int64{}
		}
		c.bins[ns] = add(c.bins[ns], k)
		n = add(n, k)
	}

	if n == 0 {
		return nil
	}

	if lo := finite(l.Min); c.n == 0 || lo < c.min {
		c.min = lo
	}

	c.max = max(c.max, finite(l.Max))
	c.sum += finite(l.Mean) * float64(n)

	// Not l.N: while the job runs it is a moment older or newer than the bins.
	c.n = add(c.n, n)
	return nil
}

// since is what came after o, an earlier sample of the same run. Its min and mean are not known; its
// max is exact if it is the longest of the run so far, else the highest bin.
func (c *counts) since(o *counts) counts {
	d := counts{bins: map[int64]int64{}}
	for ns, n := range c.bins {
		if n -= o.bins[ns]; n > 0 {
			d.bins[ns] = n
			d.n = add(d.n, n)
			d.max = max(d.max, float64(ns))
		}
	}

	if d.n == 0 {
		return d
	}
	if c.max > o.max {
		d.max = c.max
	}

	d.max = min(d.max, c.max)
	return d
}

// percentile is the bin that the given part (0.99) of all is not above, in seconds: fio's way.
func (c *counts) percentiles(parts ...float64) []float64 {
	out := make([]float64, len(parts))
	keys := c.keys()
	for i, p := range parts {
		var sum int64
		for _, ns := range keys {
			sum += c.bins[ns]
			if float64(sum) >= p*float64(c.n) {
				out[i] = seconds(float64(ns))
				break
			}
		}
	}

	return out
}

func (c *counts) keys() []int64 {
	keys := make([]int64, 0, len(c.bins))
	for ns := range c.bins {
		keys = append(keys, ns)
	}
	slices.Sort(keys)
	return keys
}

// latency is the distribution for the report.
func (c *counts) latency() Latency {
	p := c.percentiles(0.50, 0.95, 0.99, 0.999)
	l := Latency{Count: c.n, Min: seconds(c.min), P50: p[0], P95: p[1], P99: p[2], P999: p[3], Max: seconds(c.max),
		Indicative: indicative(c.n), Histogram: []Bin{}}
	if c.n > 0 {
		l.Mean = seconds(c.sum / float64(c.n))
	}
	for _, ns := range c.keys() {
		l.Histogram = append(l.Histogram, Bin{Value: seconds(float64(ns)), Count: c.bins[ns]})
	}
	return l
}

// seconds from nanoseconds, as the nearest number that is short in JSON.
func seconds(ns float64) float64 { return math.Round(ns) / 1e9 }
