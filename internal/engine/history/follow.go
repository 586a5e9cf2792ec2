package history

import (
	"strconv"
	"strings"
)

// follow finds the events of everything that had a name, also those from the time when it had others. It returns a
// function that reports whether the event on a line is one of them.
//
// A volume and its snapshots are recognized by their lineage. A golden has no ID: it is followed from name to name.
func follow(lines [][]byte, ref string) func(i int, e Event) bool {
	name, at, one := strings.Cut(ref, "@")
	owners := make([]string, len(lines)) // the volume or golden of each line's object
	named := map[string]bool{}           // owners that had the name
	points := map[string][]string{}      // by owner, IDs of its snapshots or generations that were called at
	goldens := names{}
	for i, l := range lines {
		e, ok := parseLine(l)
		if !ok {
			continue
		}

		owner := goldens.ownerOf(i, e)
		owners[i] = owner
		for _, full := range []string{e.Name, e.NameBefore} {
			n, a, isPoint := strings.Cut(full, "@")
			if n == name {
				named[owner] = true
			}
			if one && isPoint && a == at {
				points[owner] = append(points[owner], e.ID)
			}
		}
	}

	if !one {
		return func(i int, e Event) bool { return named[owners[i]] || e.ID == ref || e.Lineage == ref }
	}

	ids := map[string]bool{}
	for owner := range named {
		for _, id := range points[owner] {
			ids[id] = true
		}
	}
	return func(_ int, e Event) bool { return e.ID != "" && ids[e.ID] }
}

// names are the goldens by the names that they have at a point of the log.
type names map[string]string

// ownerOf returns what the events of a volume with its snapshots, or of a golden with its generations, have in common.
// It must be called for all events in order; i is the line of the event.
func (n names) ownerOf(i int, e Event) string {
	if e.Kind != "golden" && e.Kind != "generation" {
		if e.Lineage != "" {
			return e.Lineage
		}
		return e.ID
	}

	name, _, _ := strings.Cut(e.Name, "@")
	if e.Kind == "golden" && e.NameBefore != "" {
		owner := n.find(i, e.NameBefore)
		delete(n, e.NameBefore)
		n[name] = owner
	}
	return n.find(i, name)
}

// find returns the golden that has a name now.
func (n names) find(i int, name string) string {
	if n[name] == "" {
		n[name] = "golden " + strconv.Itoa(i)
	}
	return n[name]
}
