package doctor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"pando/internal/base/errs"
	"pando/internal/linux/extent"

	"golang.org/x/sys/unix"
)

// Numbers of extents from which a golden is reported, and the time that a clone needs for each: docs/doctor-storage.md
// describes the measurement. A note means 5 to 40 ms or more for each clone, a warning ten times that.
const (
	extentsNote    = 1000
	extentsWarning = 10000
	extentLowNS    = 5_000
	extentHighNS   = 40_000
)

// mostGoldens is how many goldens checkFragmentation lists. It only counts the others.
const mostGoldens = 10

// goldenExtents is a golden with an image, and the extents of the image.
type goldenExtents struct {
	GoldenFacts
	extent.Usage
}

// checkFragmentation finds goldens that are slow to clone, because their images have many extents.
func checkFragmentation(ctx context.Context, q *host, c *Report) error {
	if q.Pool == nil {
		return skip("this host has no Pando pool")
	}

	all, unread, cause, err := readExtents(ctx, q.Pool.Goldens)
	if err != nil {
		return err
	}

	// Report those with many extents, the most first.
	slices.SortFunc(all, func(a, b goldenExtents) int { return cmp.Compare(b.Extents, a.Extents) })
	more := 0
	for i, g := range all {
		switch {
		case g.Extents < extentsNote:
		case i >= mostGoldens:
			more++
		case g.Extents >= extentsWarning:
			c.find(g.fragmented(Warning))
		default:
			c.find(g.fragmented(Note))
		}
	}

	// Summarise.
	c.measure(count("goldens", "goldens with an image", len(all)))
	if len(all) > 0 {
		c.measure(count("most", "most extents of one golden", all[0].Extents))
	}

	text, moreText, unreadText := fmt.Sprintf("%s with an image", errs.Plural(len(all), "golden")), "", ""
	if len(all) == 0 && unread == 0 {
		text = "no golden has an image: clones of this driver copy no extents"
		if len(q.Pool.Goldens) == 0 {
			text = "there are no goldens"
		}
	}

	if more > 0 {
		moreText = fmt.Sprintf("%d more have many extents", more)
	}

	if unread > 0 {
		unreadText = fmt.Sprintf("%d could not be read: %v", unread, cause)
		if len(all) == 0 {
			return skip("no golden's image could be read: %v", cause)
		}
	}

	c.Summary = errs.JoinSet("; ", text, moreText, unreadText)
	return nil
}

// readExtents counts the extents of the goldens that have images. It also returns how many images could not be read,
// and the last cause; err is set only if ctx has ended.
func readExtents(ctx context.Context, goldens []GoldenFacts) (all []goldenExtents, unread int, cause, err error) {
	for _, g := range goldens {
		if err := ctx.Err(); err != nil {
			return nil, 0, nil, err
		}

		if g.Image == "" { // a clone copies no extents with this driver
			continue
		}

		u, err := extentsOf(ctx, g.Image)
		if ctx.Err() != nil {
			return nil, 0, nil, ctx.Err()
		}

		if err != nil {
			unread, cause = unread+1, err
			continue
		}

		all = append(all, goldenExtents{g, u})
	}

	return all, unread, cause, nil
}

// fragmented returns the finding about a golden with many extents.
func (g goldenExtents) fragmented(s Severity) Finding {
	name, _, _ := strings.Cut(g.Ref, "@")
	return Finding{
		Code: "fragmentation-golden", Severity: s, Subject: g.Ref,
		Title: fmt.Sprintf("the image of golden %s has %d extents, and every clone copies each of them", g.Ref, g.Extents),
		Measured: []Figure{
			count("extents", "extents", g.Extents),
			figure("allocated", "they hold", Bytes, g.Exclusive+g.Shared),
			figure("average", "each, on average", Bytes, (g.Exclusive+g.Shared)/max(g.Extents, 1)),
			words("clone", "time they add to a clone", fmt.Sprintf("%s to %s", nsText(g.Extents*extentLowNS),
				nsText(g.Extents*extentHighNS))).noted("computed from their number, not measured here"),
		},
		Why: "A clone shares the blocks, but copies the map of them extent by extent, and the golden cannot be written " +
			"in the meantime. Writes to a clone split extents further. Comparing and pushing goldens read these maps, too.",
		Do: []Step{step("import its content again, which writes the files one after the other. The current generation stays "+
			"for the clones that use it",
			"pando clone "+word(g.Ref)+" JOB --mount DIR", "pando golden import "+word(name)+" DIR")},
	}
}

// extentsOf counts the extents of a file. It writes nothing, not even the file's dirty data.
func extentsOf(ctx context.Context, path string) (u extent.Usage, err error) {
	f, err := os.Open(path)
	if err != nil {
		return u, err
	}

	defer f.Close()
	err = extent.Scan(f, false, func(x extent.Extent) error {
		u.Extents++
		if x.Flags&extent.Shared != 0 {
			u.Shared += x.Length
		} else {
			u.Exclusive += x.Length
		}
		return ctx.Err()
	})
	if errors.Is(err, unix.EOPNOTSUPP) {
		return u, fmt.Errorf("%s: its filesystem cannot list the extents of files", path)
	}

	return u, err
}

// nsText formats a number of nanoseconds.
func nsText(ns int64) string {
	if ns >= 1e9 {
		return fmt.Sprintf("%.1f s", float64(ns)/1e9)
	}
	if ns >= 1e6 {
		return fmt.Sprintf("%d ms", ns/1e6)
	}
	return fmt.Sprintf("%d µs", ns/1e3)
}
