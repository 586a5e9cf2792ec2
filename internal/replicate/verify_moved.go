package replicate

import (
	"context"
	"fmt"

	"pando/internal/repo"
)

// listMoved adds the segments that were moved to those that were listed. Tables are read after the listing: a segment
// that is moved at that time is in one of them, at least.
func (v *verifier) listMoved(ctx context.Context, tables int) error {
	v.moved, v.packsRead = map[repo.Segment]repo.Place{}, map[repo.Pack]bool{}
	missing := false
	for i := range v.segments {
		_, there := v.listed[v.segments[i].Segment]
		missing = missing || !there
	}
	if tables == 0 && !missing {
		return nil
	}
	m, err := v.repo.Moved(ctx)
	if err != nil {
		return err
	}
	for t, err := range m.Damaged {
		v.unreadTables = true
		why := fmt.Sprintf("nobody knows where the segments are that it says were moved: %v", err)
		v.problem(Problem{Object: "moved/" + t.String(), Message: why})
	}
	for s, at := range m.Places() {
		if _, there := v.listed[s]; !there {
			v.listed[s], v.moved[s] = at.Bytes, at
		}
	}
	return nil
}

// storedBytes is what a segment of n bytes takes: of one that was moved all of its pack, but only once for all that are
// in it, which counted tells.
func (v *verifier) storedBytes(s repo.Segment, n int64, counted map[repo.Pack]bool) int64 {
	at, moved := v.moved[s]
	if !moved {
		return n
	}
	if counted[at.Pack] {
		return 0
	}
	counted[at.Pack] = true
	return at.PackBytes
}

// packGarbage counts the packs that nothing needs.
func (v *verifier) packGarbage(packs map[repo.Pack]int64, used map[repo.Segment]bool, sessions map[repo.ID]bool) {
	needed := map[repo.Pack]bool{}
	for s, at := range v.moved {
		needed[at.Pack] = needed[at.Pack] || used[s]
	}
	for p, n := range packs {
		switch {
		case needed[p] || v.unreadTables:
		case sessions[p.Session]:
			v.out.WorkingBytes += n
		default:
			v.out.GarbageCount++
			v.out.GarbageBytes += n
		}
	}
}
