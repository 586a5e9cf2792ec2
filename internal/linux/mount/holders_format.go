package mount

import (
	"fmt"
	"strings"
	"unicode"
)

// maxNamed is how many holders of each sort FormatHolders names.
const maxNamed = 5

// FormatHolders lists the holders of a volume in one line for an error message:
//
//	held by pid 4242 (bash, uid 1000): cwd; pid 4300 (postgres): 3 open files, e.g. /x/base/1;
//	mounted at /y in mount namespace 4026532617 (pid 77, containerd)
//
// It returns "" without holders.
func FormatHolders(holders []Holder) string {
	var processes, others []string
	for _, h := range holders {
		if h.PID == 0 || h.Mountpoint != "" {
			others = append(others, strings.Join(h.How, ", "))
			continue
		}
		who := fmt.Sprintf("pid %d (%s", h.PID, h.Command)
		if h.UID != 0 {
			who += fmt.Sprintf(", uid %d", h.UID)
		}
		processes = append(processes, who+"): "+formatHow(h.How))
	}

	parts := append(firstFew(processes, "processes"), firstFew(others, "mounts or devices")...)
	if len(parts) == 0 {
		return ""
	}

	text := strings.Join(parts, "; ")
	if !strings.HasPrefix(text, "mounted at ") {
		text = "held by " + text
	}

	return printable(text)
}

func firstFew(parts []string, what string) []string {
	if n := len(parts) - maxNamed; n > 1 {
		return append(parts[:maxNamed:maxNamed], fmt.Sprintf("%d more %s", n, what))
	}
	return parts
}

// formatHow summarizes what one process holds.
func formatHow(how []string) string {
	var out, open, mapped []string
	for _, h := range how {
		switch {
		case strings.HasPrefix(h, "fd "):
			open = append(open, h)
		case strings.HasPrefix(h, "mmap "):
			mapped = append(mapped, strings.TrimPrefix(h, "mmap "))
		default:
			out = append(out, h)
		}
	}

	switch len(open) {
	case 0:
	case 1:
		out = append(out, open[0])
	default:
		_, path, _ := strings.Cut(strings.TrimPrefix(open[0], "fd "), " ")
		out = append(out, fmt.Sprintf("%d open files, e.g. %s", len(open), path))
	}

	switch len(mapped) {
	case 0:
	case 1:
		out = append(out, "mapped file "+mapped[0])
	default:
		out = append(out, fmt.Sprintf("%d mapped files, e.g. %s", len(mapped), mapped[0]))
	}

	return strings.Join(out, ", ")
}

// printable replaces characters that cannot be printed: names of files and processes may
// contain any.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, s)
}
