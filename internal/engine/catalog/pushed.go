package catalog

import (
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"pando/internal/driver"
)

// The times of pushes are for monitoring: nothing that Pando does depends on them, and a rebuild loses them. The table
// meta has one row for each repository, and one for each volume and golden with the times for all repositories.

// pushedKey is the key of the times at which a volume, given its lineage, was pushed.
func pushedKey(lineage driver.ObjectID) string { return "pushed-" + string(lineage) }

// goldenPushedKey is pushedKey for a golden, given its name.
func goldenPushedKey(name string) string { return "pushed-@" + name }

// pushedToKey is the key of the time of the last push to a repository.
func pushedToKey(repo string) string { return "pushed-to-" + repo }

// SetPushed records that a volume or golden, one of whose snapshots or generations is given, was pushed to a repository
// successfully, even if there was nothing new to push. An object that no longer exists is success.
func (t *Tx) SetPushed(id driver.ObjectID, repo string, at time.Time) error {
	if err := t.SetMeta(pushedToKey(repo), strconv.FormatInt(toNano(at), 10)); err != nil {
		return err
	}

	r, ok, err := t.Object(id)
	if err != nil || !ok {
		return err
	}
	var key string
	switch r.Kind {
	case driver.Generation:
		key = goldenPushedKey(r.Golden)
	case driver.Snapshot:
		key = pushedKey(r.Volume)
	default:
		return nil // a layer, which is nothing that users push
	}

	was, err := t.Meta(key)
	if err != nil {
		return err
	}
	times := parsePushed(was)
	times[repo] = at
	return t.SetMeta(key, formatPushed(times))
}

// formatPushed formats times by repository: the ID and the time of each, with spaces in between.
func formatPushed(times map[string]time.Time) string {
	var words []string
	for _, repo := range slices.Sorted(maps.Keys(times)) {
		words = append(words, repo, strconv.FormatInt(toNano(times[repo]), 10))
	}
	return strings.Join(words, " ")
}

// parsePushed reads what formatPushed has written.
func parsePushed(text string) map[string]time.Time {
	out := map[string]time.Time{}
	words := strings.Fields(text)
	for i := 0; i+1 < len(words); i += 2 {
		if at := parseNano(words[i+1]); !at.IsZero() {
			out[words[i]] = at
		}
	}
	return out
}
