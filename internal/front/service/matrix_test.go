package service

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"

	"pando/client"

	"github.com/danielgtaylor/huma/v2"
)

const matrixPolicy = `
[[rule]]
groups = ["64800"]
goldens = ["web"]
publish = ["team-*"]
import = true
mounts = ["DIR/{uid}"]
`

// matrixRow is a route with a request about a volume of alice's, for which V stands in path and body, and the statuses
// of the answers for root, alice, another member, and an outsider. NONE is a name that nothing has.
type matrixRow struct {
	path, body string
	want       [4]int
	free       bool // the answer does not depend on the volume
}

// Statuses of rows.
var (
	ownOnly  = [4]int{200, 200, 404, 403}
	ownMake  = [4]int{201, 201, 404, 403}
	ownGone  = [4]int{204, 204, 404, 403}
	everyone = [4]int{200, 200, 200, 403}
	onlyRoot = [4]int{200, 403, 403, 403}
)

// matrix has every route of the OpenAPI document, by its ID.
var matrix = map[string]matrixRow{
	"show-service":     {path: "/v1/service", want: everyone, free: true},
	"show-pool":        {path: "/v1/pool", want: everyone, free: true},
	"list-operations":  {path: "/v1/operations", want: everyone, free: true},
	"show-operation":   {path: "/v1/operations/NONE", want: [4]int{404, 404, 404, 403}},
	"wait-operation":   {path: "/v1/operations/NONE/wait", want: [4]int{404, 404, 404, 403}},
	"cancel-operation": {path: "/v1/operations/NONE", want: [4]int{404, 404, 404, 403}},

	"cancel-request": {path: "/v1/requests/NONE", want: [4]int{204, 204, 204, 403}, free: true},
	"open-web":       {path: "/v1/web/logins", want: [4]int{422, 422, 422, 403}, free: true}, // no page
	"show-space":     {path: "/v1/pool/space", want: everyone, free: true},
	"show-lineage":   {path: "/v1/lineage", want: everyone},
	"list-remains":   {path: "/v1/remains", want: onlyRoot, free: true},
	"watch-volume":   {path: "/v1/volumes/V/iostat", want: ownOnly},

	"list-volumes":          {path: "/v1/volumes", want: everyone},
	"show-volume":           {path: "/v1/volumes/V", want: ownOnly},
	"destroy-volume":        {path: "/v1/volumes/V", want: ownGone},
	"destroy":               {path: "/v1/destroy", body: `{"what":["V"]}`, want: ownOnly},
	"clone-volume":          {path: "/v1/volumes", body: `{"from":"V","name":"new-V"}`, want: ownMake},
	"fork-volume":           {path: "/v1/volumes/V/fork", body: `{"name":"new-V"}`, want: ownMake},
	"mount-volume":          {path: "/v1/volumes/V/mount", body: `{}`, want: ownOnly},
	"unmount-volume":        {path: "/v1/volumes/V/unmount", want: ownOnly},
	"rewind-volume":         {path: "/v1/volumes/V/rewind", body: `{"snapshot":"s"}`, want: ownOnly},
	"resize-volume":         {path: "/v1/volumes/V/resize", body: `{"size_bytes":134217728}`, want: ownOnly},
	"set-ttl":               {path: "/v1/volumes/V/ttl", body: `{"seconds":600}`, want: ownOnly},
	"rebase-volume":         {path: "/v1/volumes/V/rebase", body: `{"onto":"web@2"}`, want: ownOnly},
	"flatten-volume":        {path: "/v1/volumes/V/flatten", want: ownOnly},
	"diff":                  {path: "/v1/diff?a=V@s&b=V", want: ownOnly},
	"export":                {path: "/v1/exports/V", want: ownOnly},
	"show-object":           {path: "/v1/objects/V", want: ownOnly},
	"show-labels":           {path: "/v1/labels/V", want: ownOnly},
	"change-labels":         {path: "/v1/labels/V", body: `{"set":{"a":"b"}}`, want: ownOnly},
	"pin":                   {path: "/v1/pins/V", body: `{}`, want: ownOnly},
	"unpin":                 {path: "/v1/pins/V", want: ownOnly},
	"rename":                {path: "/v1/rename", body: `{"ref":"V","name":"new-V"}`, want: ownOnly},
	"list-events":           {path: "/v1/history?ref=V", want: ownOnly},
	"follow-events":         {path: "/v1/events?after=0", want: everyone},
	"list-snapshots":        {path: "/v1/volumes/V/snapshots", want: ownOnly},
	"create-snapshot":       {path: "/v1/volumes/V/snapshots", body: `{"name":"t"}`, want: ownMake},
	"create-snapshot-group": {path: "/v1/snapshot-groups", body: `{"volumes":["V"],"name":"t"}`, want: ownMake},
	"show-snapshot":         {path: "/v1/volumes/V/snapshots/s", want: ownOnly},
	"destroy-snapshot":      {path: "/v1/volumes/V/snapshots/s", want: ownGone},

	"list-goldens":   {path: "/v1/goldens", want: everyone, free: true},
	"show-golden":    {path: "/v1/goldens/secret", want: [4]int{200, 404, 404, 403}, free: true},
	"publish-golden": {path: "/v1/goldens/team-V/publish", body: `{"volume":"V"}`, want: ownOnly},
	"import-golden":  {path: "/v1/goldens/other/import", want: [4]int{201, 403, 403, 403}, free: true},

	"set-golden":        {path: "/v1/goldens/web", body: `{"keep":0}`, want: onlyRoot, free: true},
	"remove-golden":     {path: "/v1/goldens/spare", want: [4]int{204, 403, 403, 403}, free: true},
	"remove-generation": {path: "/v1/goldens/many/generations/1", want: [4]int{204, 403, 403, 403}, free: true},
	"list-tasks":        {path: "/v1/tasks", want: onlyRoot, free: true},
	"read-metrics":      {path: "/metrics", want: onlyRoot, free: true},
	"prune":             {path: "/v1/prune", body: `{"keep_free_percent":1,"dry_run":true}`, want: onlyRoot, free: true},
	"gc":                {path: "/v1/gc", want: onlyRoot, free: true},
	"fsck":              {path: "/v1/fsck", body: `{"refs":["web"]}`, want: onlyRoot, free: true},
	"doctor":            {path: "/v1/doctor", body: `{}`, want: onlyRoot, free: true},
	"list-remote":       {path: "/v1/remotes/none/volumes", want: [4]int{404, 403, 403, 403}, free: true},
	"prune-remote": {path: "/v1/remotes/none/prune", body: `{"keep_last":1}`,
		want: [4]int{404, 403, 403, 403}, free: true},
	"bench-clone": {path: "/v1/benches/clone", body: `{"golden":"none"}`,
		want: [4]int{404, 403, 403, 403}, free: true},
	"bench-reclaim": {path: "/v1/benches/reclaim", body: `{"no":1}`, want: [4]int{400, 403, 403, 403}, free: true},
	"bench-sync":    {path: "/v1/benches/sync", body: `{"no":1}`, want: [4]int{400, 403, 403, 403}, free: true},
	"list-remotes":  {path: "/v1/remotes", want: onlyRoot, free: true},
	"push":          {path: "/v1/remotes/none/push", body: `{"refs":["V"]}`, want: [4]int{404, 403, 403, 403}},
	"pull":          {path: "/v1/remotes/none/pull", body: `{"ref":"V"}`, want: [4]int{404, 403, 403, 403}},
	"verify":        {path: "/v1/remotes/none/verify", body: `{}`, want: [4]int{404, 403, 403, 403}},
}

// TestMatrix sends every route of the document as root, the owner of a volume, another member of the group, and an
// outsider. A new route fails it until it is in the matrix.
func TestMatrix(t *testing.T) {
	u := withUsers(t, matrixPolicy)
	for _, name := range []string{"web", "spare", "many", "many"} {
		_, err := u.c.Import(t.Context(), name, archive(t, map[string]string{"file": "v2"}),
			client.ImportOptions{Update: true, SizeBytes: 64 << 20})
		must(t, err)
	}
	callers := []*person{u.root, u.person(alice, members), u.person(bob, members), u.person(outsider)}
	names := []string{"root", "owner", "member", "outsider"}

	seen := 0
	for path, item := range u.api.OpenAPI().Paths {
		for method, op := range map[string]*huma.Operation{"GET": item.Get, "POST": item.Post, "PUT": item.Put,
			"PATCH": item.Patch, "DELETE": item.Delete} {
			if op == nil {
				continue
			}
			row, ok := matrix[op.OperationID]
			if !ok {
				t.Errorf("%s %s (%s) is not in the matrix", method, path, op.OperationID)
				continue
			}
			seen++
			for i, p := range slices.Backward(callers) { // root, who may change everything, is the last one
				t.Run(op.OperationID+"/"+names[i], func(t *testing.T) { u.testRoute(t, method, row, p, row.want[i], i == 2) })
			}
		}
	}
	if seen != len(matrix) || seen < 45 {
		t.Errorf("%d routes in the document, %d in the matrix", seen, len(matrix))
	}
}

// volumes numbers the volumes of the matrix: names that are never part of one another.
var volumes = 1000

// testRoute sends one request. other: the caller may use the service, but the volume is another user's.
func (u *usersTest) testRoute(t *testing.T, method string, row matrixRow, p *person, want int, other bool) {
	volumes++
	name := fmt.Sprintf("vol%d", volumes)
	from := "web@2"
	if strings.Contains(row.path, "rebase") {
		from = "web@1"
	}
	u.volumeOf(alice, from, name)
	with := func(name string) call {
		fill := strings.NewReplacer("V", name, "NONE", "none")
		q := call{Method: method, Path: fill.Replace(row.path), Body: fill.Replace(row.body)}
		if strings.HasSuffix(row.path, "/import") {
			b, err := io.ReadAll(archive(t, map[string]string{"file": "v1"}))
			must(t, err)
			q.Type, q.Body = "application/x-tar", string(b)
		}
		return q
	}

	before := u.state()
	a := p.do(with(name))
	if a.Status != want {
		t.Fatalf("%d %s, wanted %d", a.Status, a.Body, want)
	}
	if changed := u.state(); want >= 400 && changed != before {
		t.Errorf("it was refused, and changed\n%s to\n%s", before, changed)
	}
	if want < 400 || row.free {
		if other && !row.free && strings.Contains(a.Body, name) {
			t.Errorf("it shows another user's volume: %s", a.Body)
		}
		return
	}

	// The answer must be that for a name that does not exist.
	if none := p.do(with("zzz" + name[3:])); strings.ReplaceAll(none.Body, "zzz", "vol") != a.Body ||
		none.Status != a.Status {
		t.Errorf("%s\nbut for a name that nothing has: %d %s", a.Body, none.Status, none.Body)
	}
	if hint := a.problem(t).Hint; hint == "" {
		t.Errorf("no hint: %s", a.Body)
	}
}
