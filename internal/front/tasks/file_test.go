package tasks

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"pando/internal/base/errs"
	"pando/internal/front/schedule"
	"pando/internal/remote/replicate"
)

const good = `
keep_free = "10%"
gc = "1h"

[[task]]
name = "nightly"
every = "1d"
snapshot = "db-*"
keep_last = 24
keep_within = "7d"

[[task]]
every = "15m"
push = ["web", "db-*", "job@v1"]
remote = "backup"
limit_rate = "50M/s"

[[task]]
every = "5m"
pull = "web"
as = "web2"
remote = "backup"

[[task]]
every = "10m"
refresh = "repo"

[[task]]
every = "1h"
prune = { idle = "7d", labels = ["ci", "team=x"] }

[[task]]
every = "7d"
verify = "backup"
read_data = "5%"

[[task]]
every = "1d"
remote_prune = "backup"
keep_daily = 7

[[task]]
every = "1h"
snapshot = "pg-*"
group = true
before = "psql -c checkpoint"
after = "true"

[[task]]
name = "old"
every = "1h"
[task.prune]
older_than = "30d"
keep_free = "20"
`

// TestParse reads a file with every kind of task.
func TestParse(t *testing.T) {
	c, err := parse("tasks.toml", []byte(good))
	if err != nil {
		t.Fatal(err)
	}
	if c.KeepFree != 10 || c.GC != time.Hour || len(c.Tasks) != 9 {
		t.Fatalf("got %+v", c)
	}

	var names []string
	for _, x := range c.Tasks {
		names = append(names, x.Name)
	}
	const want = "nightly; push web db-* job@v1 to backup; pull web from backup; refresh repo; " +
		"prune idle 7d, with ci, team=x; verify backup; remote prune backup; snapshot pg-* at once; old"
	if got := strings.Join(names, "; "); got != want {
		t.Errorf("names: %s", got)
	}
	nightly, push, pull, old := c.Tasks[0], c.Tasks[1], c.Tasks[2], c.Tasks[8]
	verify, pruneRemote, group := c.Tasks[5], c.Tasks[6], c.Tasks[7]
	if nightly.Keep != (replicate.Policy{Last: 24, Within: 168 * time.Hour}) || nightly.Every != 24*time.Hour {
		t.Errorf("nightly: %+v", nightly)
	}
	if push.Limit != 50<<20 || push.Push[1].Glob != "db-*" || push.Push[2].Ref.At != "v1" || push.Remote != "backup" {
		t.Errorf("push: %+v", push)
	}
	if pull.As.String() != "web2" || pull.Pull.Name != "web" {
		t.Errorf("pull: %+v", pull)
	}
	if old.Prune.OlderThan != 720*time.Hour || old.Prune.KeepFreePercent != 20 || old.Prune.Idle != 0 {
		t.Errorf("old: %+v", old.Prune)
	}

	if verify.Verify != "backup" || verify.ReadPercent != 5 || pruneRemote.PruneRemote != "backup" ||
		pruneRemote.Keep != (replicate.Policy{Daily: 7}) {
		t.Errorf("verify: %+v, remote prune: %+v", verify, pruneRemote)
	}
	if !group.Group || group.Before != "psql -c checkpoint" || group.After != "true" {
		t.Errorf("group: %+v", group)
	}

	jobs := (&Host{}).Jobs(c)
	if len(jobs) != 13 || jobs[0].Name != nameExpire || jobs[3].Name != nameGC || !jobs[2].Watch {
		t.Errorf("jobs: %+v", jobs)
	}
	if empty, err := parse("tasks.toml", nil); err != nil || len((&Host{}).Jobs(empty)) != 2 {
		t.Errorf("an empty file: %+v, %v", empty, err)
	}
}

// TestMistakes: each mistake is an error with the line, and a hint.
func TestMistakes(t *testing.T) {
	task := func(text string) string { return "[[task]]\nevery = \"15m\"\n" + text }
	for _, c := range []struct{ text, want string }{
		{"keep_fee = \"10%\"", `line 1: there is no key "keep_fee"`},
		{"\nkeep_free = \"100%\"", "line 2: keep_free: "},
		{"keep_free = \"0\"", "greater than 0"},
		{"keep_free = 10", "line 1"},
		{"gc = \"never\"", "line 1: gc: never: not a duration"},
		{"gc = \"10ms\"", "at least 1s (got 10ms)"},
		{"[[task]]\nsnapshot = \"db\"", "line 1: the task has no interval"},
		{"[[task]]\nevery = \"\"\nsnapshot = \"db\"", "line 2: every: "},
		{task(""), "line 1: the task does not say what to do"},
		{task("snapshot = \"db\"\nrefresh = \"g\""), "line 4: a task cannot have both snapshot and refresh"},
		{task("refresh = \"g\"\nprune = { idle = \"1h\" }"), "cannot have both refresh and prune"},
		{task("snapshot = \"db\"\nremote = \"b\""), "line 4: a task with snapshot cannot have remote"},
		{task("push = [\"db\"]\nkeep_last = 3\nremote = \"b\""), "line 4: a task with push cannot have keep_last"},
		{task("snapshot = \"db[\""), "line 3: snapshot: "},
		{task("snapshot = \"\""), "line 3: snapshot: "},
		{task("snapshot = \"db@v1\""), "line 3: \"db@v1\" is not a volume"},
		{task("snapshot = \"db\"\nkeep_last = 0"), "line 4: keep_last must be at least 1 (got 0)"},
		{task("snapshot = \"db\"\nkeep_within = \"x\""), "line 4: keep_within: "},
		{task("push = []\nremote = \"b\""), "line 3: nothing to push"},
		{task("push = [\"a/b\"]\nremote = \"b\""), "line 3: push: "},
		{task("push = [\"db\"]"), "line 1: the task has no remote"},
		{task("push = [\"db\"]\nremote = \"../b\""), "line 4: remote: "},
		{task("push = [\"db\"]\nremote = \"b\"\nlimit_rate = \"fast\""), "line 5: limit_rate: "},
		{task("pull = \"\"\nremote = \"b\""), "line 3: pull: "},
		{task("pull = \"g\"\nas = \"/\"\nremote = \"b\""), "line 4: as: "},
		{task("refresh = \"g@1\""), "line 3: refresh: "},
		{task("prune = {}"), "line 3: prune does not say what to remove"},
		{task("prune = { idle = \"\" }"), "line 3: idle: "},
		{task("prune = { idle = \"1h\", labels = [\"=\"] }"), "line 3: labels: "},
		{task("prune = { size = \"1h\" }"), `line 3: there is no key "task.size"`},
		{task("snapshot = \"x\"\nread_data = \"5%\""), "line 4: a task with snapshot cannot have read_data"},
		{task("push = [\"x\"]\nremote = \"b\"\nbefore = \"true\""), "line 5: a task with push cannot have before"},
		{task("verify = \"b\"\nread_data = \"0%\""), "line 4: read_data: "},
		{task("verify = \"a/b\""), "line 3: verify: "},
		{task("remote_prune = \"b\"\nkeep_last = 0"), "line 4: keep_last must be at least 1"},
		{task("verify = \"b\"\nkeep_last = 1"), "line 4: a task with verify cannot have keep_last"},
		{task("name = \"a b\"\nrefresh = \"g\""), "line 3: \"a b\" cannot be a name"},
		{task("name = \"gc\"\nrefresh = \"g\""), "line 1: there is another task \"gc\""},
		{task("refresh = \"g\"\n") + task("refresh = \"g\""), "line 4: there is another task \"refresh g\""},
		{task("push = [" + strings.Repeat("\"web\", ", 40) + "]\nremote = \"b\""), "line 1: the task needs a name"},
	} {
		_, err := parse("t.toml", []byte(c.text))
		if !errs.Is(err, errs.Invalid) || !strings.HasPrefix(err.Error(), "read tasks t.toml: ") ||
			!strings.Contains(err.Error(), c.want) {
			t.Errorf("%q:\n  got  %v\n  want %s", c.text, err, c.want)
		}
		if strings.Count(err.Error(), "read tasks") > 1 {
			t.Errorf("%q: %v", c.text, err)
		}
		typed := strings.Contains(err.Error(), "column")
		if errs.HintOf(err) == "" && !typed {
			t.Errorf("%q: %v has no hint", c.text, err)
		}
	}

	if _, err := ReadFile(filepath.Join(t.TempDir(), "none")); !errs.Is(err, errs.NotFound) {
		t.Errorf("no file: %v", err)
	}
}

// TestCommandsNeedOwner: others must not be able to change a file with commands.
func TestCommandsNeedOwner(t *testing.T) {
	name := filepath.Join(t.TempDir(), "tasks.toml")
	for text, refused := range map[string]bool{"": false, "before = \"true\"\n": true, "after = \"true\"\n": true} {
		for mode, open := range map[os.FileMode]bool{0o644: false, 0o664: true, 0o602: true} {
			_ = os.Remove(name) // it may be missing
			err := os.WriteFile(name, []byte("[[task]]\nevery = \"1h\"\nsnapshot = \"x\"\n"+text), 0o600)
			if err == nil {
				err = os.Chmod(name, mode)
			}
			if err != nil {
				t.Fatal(err)
			}
			if _, err := ReadFile(name); errs.Is(err, errs.Permission) != (refused && open) {
				t.Errorf("%q, mode %o: %v", text, mode, err)
			}
		}
	}
}

// TestSample: the sample in contrib is right.
func TestSample(t *testing.T) {
	c, err := ReadFile("../../../contrib/tasks.toml")
	if err != nil || len(c.Tasks) == 0 {
		t.Errorf("%+v, %v", c, err)
	}
}

// TestSame: two tasks that do something else are not the same to a schedule, and equal ones are.
func TestSame(t *testing.T) {
	read := func(text string) []schedule.Job {
		c, err := parse("t", []byte("[[task]]\nname = \"x\"\nevery = \"1h\"\n"+text))
		if err != nil {
			t.Fatal(err)
		}
		return (&Host{}).Jobs(c)
	}
	seen := map[string]bool{}
	for _, text := range []string{"refresh = \"g\"", "snapshot = \"g\"", "snapshot = \"g\"\nkeep_last = 1",
		"prune = {idle = \"1h\"}", "prune = {idle = \"2h\"}", "prune = {idle = \"1h\", labels = [\"x\"]}",
		"verify = \"b\"", "verify = \"b\"\nread_data = \"100%\"", "remote_prune = \"b\"",
		"remote_prune = \"b\"\nkeep_last = 1",
		"snapshot = \"g\"\ngroup = true", "snapshot = \"g\"\nbefore = \"true\"",
		"push = [\"g\"]\nremote = \"b\"", "push = [\"g*\"]\nremote = \"b\"", "pull = \"g\"\nremote = \"b\""} {
		same := read(text)[2].Same
		if seen[same] || same != read(text)[2].Same {
			t.Errorf("%s: %s", text, same)
		}
		seen[same] = true
	}
}

// TestLog: a problem is reported once as long as it stays the same, and again when it was over.
func TestLog(t *testing.T) {
	said := 0
	h := &Host{Log: func(string, ...any) { said++ }}
	var fail error
	idle := false
	j := h.job(schedule.Job{Name: "x", Run: func(context.Context) (schedule.Outcome, error) {
		return schedule.Outcome{Idle: idle}, fail
	}})
	for i, step := range []struct {
		err  error
		idle bool
		want int
	}{
		{nil, false, 0}, {os.ErrNotExist, false, 1}, {os.ErrNotExist, false, 1}, {nil, true, 1},
		{os.ErrNotExist, false, 1}, {os.ErrExist, false, 2}, {nil, false, 2}, {os.ErrExist, false, 3},
	} {
		fail, idle = step.err, step.idle
		_, _ = j.Run(t.Context())
		if said != step.want {
			t.Errorf("step %d: %d messages, want %d", i, said, step.want)
		}
	}
}
