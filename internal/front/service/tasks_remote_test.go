package service

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"pando/client"
	"pando/internal/driver/plain"
	"pando/internal/driver/reflink"
)

// TestRemoteTasks: tasks verify a remote and remove old points from it. Damage is an error of the task.
func TestRemoteTasks(t *testing.T) {
	s := withGolden(t, plain.Name)
	store := s.addRemote(remoteStore{dir: t.TempDir()})
	_, err := s.c.Clone(t.Context(), client.CloneRequest{From: "web", Name: "db", Make: client.Make{Mount: true}})
	must(t, err)
	for i := range 3 {
		d, err := s.c.Volume(t.Context(), "db")
		must(t, err, os.WriteFile(filepath.Join(d.Mountpoint, "file"), fmt.Append(nil, i), 0o600))
		op, err := s.c.Push(t.Context(), "backup", client.PushRequest{Refs: []string{"db"}})
		done[any](s, op, err)
	}

	s.SetTasks(plan(t, "[[task]]\nname = \"check\"\nevery = \"1s\"\nverify = \"backup\"\nread_data = \"100%\"\n"+
		"[[task]]\nname = \"trim\"\nevery = \"1s\"\nremote_prune = \"backup\"\nkeep_last = 1\n"))
	x := s.until("trim", ran(1))
	if !strings.HasPrefix(x.LastResult, "removed ") || x.Verb != "remote prune" || x.Ref != "backup" {
		t.Errorf("got %+v", x)
	}
	x = s.until("check", func(x client.Task) bool {
		return strings.HasPrefix(x.LastResult, "checked 2 volumes with 2 points, read ")
	})
	if x.Verb != "verify" || x.LastError != nil {
		t.Errorf("got %+v", x)
	}

	// Lose its data.
	s.SetTasks(nil)
	s.endTasks(t)
	lost := 0
	must(t, filepath.WalkDir(store.dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() && strings.Contains(path, "/segments/") {
			lost++
			return os.Remove(path)
		}
		return err
	}))
	if lost == 0 {
		t.Fatal("the remote has no segments")
	}
	s.SetTasks(plan(t, "[[task]]\nname = \"check\"\nevery = \"1s\"\nverify = \"backup\"\n"))
	x = s.until("check", func(x client.Task) bool { return x.LastError != nil })
	if x.LastError.Kind != client.Damaged || !strings.Contains(x.LastError.Detail, "problem") || x.LastError.Hint == "" {
		t.Errorf("%+v", x.LastError)
	}
}

// TestGroupTask: the snapshots of a group have one name and one set of commands around them.
func TestGroupTask(t *testing.T) {
	s := withGolden(t, reflink.Name)
	for _, v := range []string{"pg-data", "pg-wal", "other"} {
		_, err := s.c.Clone(t.Context(), client.CloneRequest{From: "web", Name: v, Make: client.Make{Mount: true}})
		must(t, err)
	}
	log := filepath.Join(t.TempDir(), "log")
	s.Env = []string{"LOG=" + log, "PATH=" + os.Getenv("PATH")}
	s.SetTasks(plan(t, "[[task]]\nname = \"pg\"\nevery = \"1s\"\nsnapshot = \"pg-*\"\ngroup = true\nkeep_last = 1\n"+
		`before = 'echo before $PANDO_VOLUMES >> $LOG'`+"\n"+`after = 'echo after $PANDO_RESULT >> $LOG'`+"\n"))
	x := s.until("pg", ran(3))
	if x.LastResult != "took 2 snapshots, destroyed 2" || x.Ref != "pg-* at once" {
		t.Errorf("got %+v", x)
	}
	s.SetTasks(nil)
	s.endTasks(t)

	var names []string
	for _, v := range []string{"pg-data", "pg-wal"} {
		d, err := s.c.Volume(t.Context(), v)
		must(t, err)
		if len(d.Snapshots) != 1 {
			t.Fatalf("%s has %d snapshots", v, len(d.Snapshots))
		}
		_, name, _ := strings.Cut(d.Snapshots[0].Name, "@")
		names = append(names, name)
	}
	if names[0] != names[1] {
		t.Errorf("names: %q", names)
	}
	b, err := os.ReadFile(log)
	must(t, err)
	if !strings.HasPrefix(string(b), "before pg-data pg-wal\nafter taken\nbefore ") {
		t.Errorf("the commands ran as %q", b)
	}

	// If the command before them fails, there is no snapshot.
	s.SetTasks(plan(t, "[[task]]\nname = \"bad\"\nevery = \"1s\"\nsnapshot = \"other\"\nbefore = \"exit 3\"\n"))
	if x = s.until("bad", func(x client.Task) bool { return x.LastError != nil }); x.LastError.Kind != client.IO {
		t.Errorf("%+v", x.LastError)
	}
	if d, err := s.c.Volume(t.Context(), "other"); err != nil || len(d.Snapshots) > 0 {
		t.Errorf("%+v, %v", d.Snapshots, err)
	}
}
