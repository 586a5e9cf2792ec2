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

// vdev is a line of the table that `zpool status` prints of a pool.
type vdev struct {
	name   string // as it stands there: "mirror-0", "/dev/sda1"
	path   string // of a leaf, if its name is one
	top    string // the name of the vdev right below the pool that it belongs to
	class  string // "" for data, else the heading: "logs", "cache", "special", "spares", "dedup"
	state  string // "ONLINE"
	errors [3]int64
	note   string // what stands behind the numbers: "(resilvering)", "block size: 512B configured, 4096B native"
}

// poolStatus is what `zpool status` says of a pool.
type poolStatus struct {
	state  string
	status string // what is wrong, as zpool words it; "" if nothing
	scan   string // the line of the last, or running, scrub or resilver
	errors string // "No known data errors"
	vdevs  []vdev // the pool itself is not among them
}

// statusOf asks for the state of a pool. It needs no root.
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

func vdevsOf(ctx context.Context, pool string) ([]vdev, error) {
	s, err := statusOf(ctx, pool)
	if err != nil {
		return nil, err
	}
	return s.vdevs, nil
}

var statusHead = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^ *([a-z]+): ?(.*)$`) })

// parsePoolStatus reads what `zpool status -P -L -p POOL` prints: headings with text
// that may go on in lines with a tab, and the table, in which two spaces more are
// one level deeper.
func parsePoolStatus(text, pool string) *poolStatus {
	s := &poolStatus{}
	head, class, top := "", "", ""
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, "\n ")
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
			case depth == 0: // a heading
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
