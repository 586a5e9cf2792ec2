package web

import (
	"fmt"
	"html/template"
	"net/url"
	"os/user"
	"sort"
	"strconv"
	"strings"
	"sync"
	"time"

	"pando/client"
	"pando/internal/base/quantity"
)

// functions are what templates call.
var functions = template.FuncMap{
	"bytes": quantity.FormatBytes, "ago": formatAge, "when": formatTime, "count": formatCount, "plural": plural,
	"static": func(name string) string { return "/static/" + name + "?" + staticVersions()[name] },
	"volume": func(name string) string { return "/volumes/" + url.PathEscape(name) },
	"link":   linkOf, "owner": ownerName, "labels": sortedLabels, "bar": barOf, "iso": func(t time.Time) string {
		return t.UTC().Format(time.RFC3339)
	},
	"forever": func(t *time.Time) bool { return t != nil && t.Year() >= 2200 },
	"left":    func(t *time.Time) string { return quantity.FormatSpan(time.Until(*t)) },
	"pieces":  func(n int64) string { return plural(int(n), "piece") },
	"by":      byWhom, "percent": percent, "seconds": formatSeconds,
	"pair": func(name string, value any) map[string]any { return map[string]any{"Name": name, "Value": value} },
}

// formatCount separates thousands.
func formatCount(n int) string {
	s := strconv.Itoa(n)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

func plural(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return formatCount(n) + " " + noun + "s"
}

// formatAge formats a time relative to now.
func formatAge(t time.Time) string {
	switch d := time.Since(t); {
	case t.IsZero():
		return "never"
	case d < 0:
		return "in " + quantity.FormatSpan(-d)
	case d < time.Second:
		return "now"
	default:
		return quantity.FormatSpan(d) + " ago"
	}
}

func formatSeconds(s float64) string {
	return quantity.FormatSpan(time.Duration(s * float64(time.Second)))
}

func formatTime(t time.Time) string { return t.Local().Format(time.DateTime) }

// percent returns how much of a whole a part is, from 0 to 100.
func percent(part, whole int64) int {
	if whole <= 0 {
		return 0
	}
	return int(100 * min(part, whole) / whole)
}

// linkOf returns the address of the view of what a reference names: of a golden if it has a number, else of a volume.
func linkOf(ref string) string {
	name, at, has := strings.Cut(ref, "@")
	if _, err := strconv.Atoi(at); has && err == nil {
		return "/goldens/" + url.PathEscape(name)
	}
	return "/volumes/" + url.PathEscape(name)
}

// label is a label of an object.
type label struct{ Key, Value string }

func sortedLabels(all map[string]string) (out []label) {
	for k, v := range all {
		out = append(out, label{k, v})
	}
	sort.Slice(out, func(i, j int) bool { return out[i].Key < out[j].Key })
	return out
}

// userNames has names of users that were looked up.
var userNames sync.Map // of uint32 to string

// ownerName names the user to whom a volume belongs.
func ownerName(o *client.Owner) string {
	if o == nil {
		return "root"
	}
	return userName(o.UID)
}

func userName(uid uint32) string {
	if name, ok := userNames.Load(uid); ok {
		return name.(string)
	}
	name := strconv.FormatUint(uint64(uid), 10)
	if u, err := user.LookupId(name); err == nil {
		name = u.Username
	}
	userNames.Store(uid, name)
	return name
}

// byWhom names who did something, as the history of the command line does.
func byWhom(e client.Event) string {
	for _, who := range []string{e.ForUser, e.SudoUser, e.LoginUser, e.User} {
		if who != "" {
			return who
		}
	}
	return fmt.Sprint(e.UID)
}

// bar is the space of an object as two areas, of 100 in all that fit.
type bar struct {
	Exclusive, Shared  float64
	Label              string
	SharedX, SharedEnd float64
}

// barOf scales the space of an object to the largest of its table.
func barOf(exclusive, shared, most int64) bar {
	if most <= 0 {
		most = 1
	}
	scale := func(n int64) float64 {
		f := 100 * float64(n) / float64(most)
		if n > 0 && f < 0.6 {
			f = 0.6 // something is there
		}
		return min(f, 100)
	}
	e := scale(exclusive)
	return bar{Exclusive: e, Shared: min(scale(shared), 100-e), SharedX: e,
		Label: quantity.FormatBytes(exclusive) + " exclusive, " + quantity.FormatBytes(shared) + " shared"}
}
