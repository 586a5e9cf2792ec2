package doctor

import (
	"context"
	"regexp"
	"strconv"
	"strings"
	"sync"

	"pando/internal/base/errs"
	"pando/internal/linux/zfs"
)

// vdev is a line of the table of vdevs in the output of `zpool status`.
type vdev struct {
	name   string // "mirror-0", "/dev/sda1"
	path   string // the name, if it is a path; "" otherwise
	top    string // name of the top-level vdev that it belongs to
	class  string // "" for data, otherwise the heading: "logs", "cache", "special", "spares", "dedup"
	state  string // "ONLINE"
	errors [3]int64
	note   string // text after the numbers: "(resilvering)", "block size: 512B configured, 4096B native"
}

// poolStatus is the parsed output of `zpool status` for one pool.
type poolStatus struct {
	state  string
	status string // what is wrong, in the words of zpool; "" if nothing is
	scan   string // the last or running scrub or resilver
	errors string // "No known data errors"
	vdevs  []vdev // without the pool itself
}

// statusOf asks zpool for the state of a pool, which works without root.
func statusOf(ctx context.Context, pool string) (*poolStatus, error) {
	out, err := zfs.Zpool.Output(ctx, "status", "-P", "-L", "-p", pool)
	if err != nil {
		return nil, err
	}
	s := parsePoolStatus(string(out), pool)
	if s.state == "" || len(s.vdevs) == 0 {
		return nil, errs.New(errs.Damaged, "zpool status", pool, "cannot parse its output")
	}
	return s, nil
}

// vdevsOf returns the vdevs of a pool.
func vdevsOf(ctx context.Context, pool string) ([]vdev, error) {
	s, err := statusOf(ctx, pool)
	if err != nil {
		return nil, err
	}
	return s.vdevs, nil
}

var statusHead = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^ *([a-z]+): ?(.*)$`) })

// parsePoolStatus parses the output of `zpool status -P -L -p POOL`: headings with text, which lines that begin with a
// tab continue, and the table of vdevs, in which two more spaces are one level deeper.
func parsePoolStatus(text, pool string) *poolStatus {
	s := &poolStatus{}
	head, class, top := "", "", ""
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, "\n ")
		// A heading.
		if m := statusHead().FindStringSubmatch(line); m != nil && !strings.HasPrefix(line, "\t") {
			head = m[1]
			switch head {
			case "state":
				s.state = m[2]
			case "status":
				s.status = m[2]
			case "scan":
				s.scan = m[2]
			case "errors":
				s.errors = m[2]
			}
			continue
		}

		// A continued text, or a line of the table.
		rest, tabbed := strings.CutPrefix(line, "\t")
		if !tabbed {
			continue
		}

		switch head {
		case "status":
			s.status += " " + strings.TrimSpace(rest)
		case "scan":
			s.scan += " " + strings.TrimSpace(rest)
		case "config":
			f := strings.Fields(rest)
			depth := (len(rest) - len(strings.TrimLeft(rest, " "))) / 2
			switch {
			case len(f) == 0 || f[0] == "NAME" || depth == 0 && f[0] == pool:
			case depth == 0:
				class = f[0]
			default:
				if depth == 1 {
					top = f[0]
				}
				s.vdevs = append(s.vdevs, parseVdev(f, top, class))
			}
		}
	}

	return s
}

// parseVdev parses the fields of a line of the table.
func parseVdev(f []string, top, class string) vdev {
	v := vdev{name: f[0], top: top, class: class}
	if strings.HasPrefix(v.name, "/") {
		v.path = v.name
	}
	if len(f) > 1 {
		v.state = f[1]
	}

	n := 2
	for ; n < len(f) && n < 5; n++ {
		e, err := strconv.ParseInt(f[n], 10, 64)
		if err != nil {
			break
		}
		v.errors[n-2] = e
	}

	v.note = strings.Join(f[min(n, len(f)):], " ")
	return v
}
