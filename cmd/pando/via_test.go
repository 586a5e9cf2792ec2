package main

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"pando/internal/testing/testfs"
)

// commandLine runs commands on a pool, directly or through its service.
type commandLine struct {
	dir, pool string
	socket    string // "": directly
}

// outcome is what a command did, without what differs between two runs.
type outcome struct {
	exit           int
	stdout, stderr string
}

// pando runs pando with an input.
func (c commandLine) pando(t *testing.T, input string, args ...string) outcome {
	t.Helper()
	cmd := exec.Command("pando", args...)
	cmd.Dir, cmd.Stdin = c.dir, strings.NewReader(input)
	cmd.Env = append(os.Environ(), "PANDO_POOL="+c.pool)
	if c.socket != "" {
		cmd.Env = append(os.Environ(), "PANDO_SOCKET="+c.socket)
	}
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return outcome{cmd.ProcessState.ExitCode(), c.mask(stdout.String()), c.mask(stderr.String())}
}

// varying is what differs between two runs of the same command.
var varying = []struct {
	what *regexp.Regexp
	with string
}{
	{regexp.MustCompile(`\b[0-9a-v]{26}\b`), "ID"},
	{regexp.MustCompile(`\brun-[0-9a-v]{10}\b`), "run-ID"},
	{regexp.MustCompile(`\b[0-9]{8}T[0-9.]+Z`), "TIME"},
	{regexp.MustCompile(`"[0-9-]{10}T[0-9:.]+Z"`), `"TIME"`},
	{regexp.MustCompile(`\b[0-9-]{10} [0-9:]{8}( [A-Z]+)?`), "TIME"},
	{regexp.MustCompile(`\b[0-9]+ (s|min) ago`), "AGO"},
	{regexp.MustCompile(`(_seconds|bytes|free_bytes.*|extents|saved_ratio)": [-0-9.e]+`), `$1": N`},
	{regexp.MustCompile(`[0-9.]+ ([KMGT]i)?B\b`), "N B"},
	{regexp.MustCompile(` *"for_(uid|user)": .*\n`), ""},
	{regexp.MustCompile(`"(pid|command)": ("pando.*"|[0-9]+)`), `"$1": X`},
	{regexp.MustCompile(` +`), " "},
	{regexp.MustCompile(`[0-9.]+ % of the pool`), "N % of the pool"},
	{regexp.MustCompile(`, in [0-9.]+ s\b`), ", in N s"},
	{regexp.MustCompile(`"(manifest|seconds|seed)": ("[0-9a-z]+"|[0-9.e-]+)`), `"$1": X`},
}

// mask replaces what varies, and what says that there is a service.
func (c commandLine) mask(s string) string {
	if c.socket != "" {
		s = strings.ReplaceAll(s, "the service at "+c.socket+" says: ", "")
		s = strings.ReplaceAll(s, `,"service":"`+c.socket+`"`, "")
	}
	s = strings.ReplaceAll(s, c.dir, "DIR")
	for _, v := range varying {
		s = v.what.ReplaceAllString(s, v.with)
	}
	return s
}

// startService starts a service of the pool, and waits until it listens. It ends with the test.
func (c commandLine) startService(t *testing.T) *exec.Cmd {
	t.Helper()
	cmd := exec.Command("pando", "--pool", c.pool, "serve", "--socket", c.socket)
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Signal(os.Interrupt) // it may have been killed
		_ = cmd.Wait()
	})
	for end := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		if o := c.pando(t, "", "golden", "ls"); o.exit == 0 {
			return cmd
		} else if time.Now().After(end) {
			t.Fatalf("the service does not answer: %+v", o)
		}
	}
}

// newCommandLine makes a pool, which is removed at the end.
func newCommandLine(t *testing.T, through bool, init ...string) commandLine {
	t.Helper()
	dir := t.TempDir()
	c := commandLine{dir: dir, pool: filepath.Join(dir, "pool")}
	t.Cleanup(func() {
		for _, l := range testfs.Leaks(dir, 5e9) {
			t.Errorf("LEAK: %s", l)
		}
	})
	if o := c.pando(t, "", append([]string{"init", "-q"}, init...)...); o.exit != 0 {
		t.Fatalf("%+v", o)
	}
	t.Cleanup(func() {
		direct := commandLine{dir: c.dir, pool: c.pool}
		if o := direct.pando(t, "", "deinit", "--force"); o.exit != 0 {
			t.Errorf("%+v", o)
		}
	})
	if through {
		c.socket = filepath.Join(dir, "s")
	}
	return c
}

// addRemote adds the remote backup to the pool, in a directory beside it.
func (c commandLine) addRemote(t *testing.T) {
	t.Helper()
	direct := commandLine{dir: c.dir, pool: c.pool}
	if o := direct.pando(t, "", "remote", "add", "backup", "file://"+filepath.Join(c.dir, "store")); o.exit != 0 {
		t.Fatalf("%+v", o)
	}
}

// archive is a tar of a file.
func archive(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "file"), []byte("v1\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("tar", "--mtime=@1", "-C", dir, "-cf", "-", "file").Output()
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

// sameSteps are commands that do the same directly and through a service. Some fail.
var sameSteps = []string{
	"golden ls", "ls", "ls --json",
	"golden import web -", "golden import web -",
	"golden import web - --update --keep 2 --label stage=dev --json",
	"golden ls", "golden ls --json", "golden ls -q", "golden show web", "golden show web@1 --json",
	"golden show no",
	"clone web job", "clone web job", "clone no job2", "clone web a/b",
	"clone web@1 old --json --label team=web --ttl 2h",
	"clone web many --count 3 -q", "clone web many --count 2", "clone web x --dev", "clone web job3 --mount -q",
	"clone web there --mount there", "clone web e --ephemeral --json", "clone web s --mount --shell",
	"fork job job4", "fork no job5 --json", "fork web job5",
	"ls", "ls --json", "ls -q --filter name=many-*", "ls --filter label=team=web --columns name,labels",
	"ls --tree",
	"ls --sort name:desc -q", "ls --exact", "ls --filter state=mounted", "ls --filter name=none",
	"show job", "show job --json", "show job@no", "show --json", "show web",
	"mount job", "mount job", "mount job elsewhere", "mount no", "umount job", "umount job --json",
	"snapshot job one", "snapshot job one", "snapshot job two --json --label a=b",
	"snapshot job --group --name g -q",
	"snapshot job old --group --name g2", "show job@one", "diff job@one job", "diff web job --stat",
	"diff web job --json",
	"rewind job one", "rewind job one --detach", "rewind job no", "umount job", "rewind job one --json",
	"label set job k=v w=x", "label set job bad", "label job", "label rm job w", "label ls job --json",
	"label no", "label web",
	"pin job", "pin job --for 2h --json", "destroy job", "destroy job --json", "unpin job", "unpin job --json",
	"rename job4 renamed", "rename renamed renamed", "rename job@two job@three --json",
	"golden publish web job", "golden publish web old", "golden publish fresh job --json --keep 1",
	"golden publish web no",
	"golden set web keep=1", "golden set web overlay=never --json", "golden set no keep=1",
	"rebase many-1 web", "rebase many-1 web --json", "rebase many-2 no", "rebase many-2 web --ours --theirs",
	"run web -- cat file", "run web -- sh -c 'exit 7'", "run web -- no-such-program", "run no -- true",
	"run web --diff -- sh -c 'echo 2 >more; rm file'", "run web --keep --name kept -- touch x",
	"diff web kept", "run web --name kept -- true",
	"run web --keep-on-failure --name failed -- false", "run web --publish web --json -- touch published",
	"run web --timeout 100ms -- sleep 60",
	"run web -- sh -c 'test $PANDO_MOUNT = $PWD; echo $? ${PANDO_VOLUME%-*}'",
	"export no - --format tar", "export web -",
	"resize many-3 no", "prune --dry-run --older-than 1h", "prune --keep-free 1%",
	"push job", "push job --to backup --json", "push no", "push many-3 no nothing", "push job --as other -q", "push",
	"push --all --json", "push job --to nosuch", "push job --every 0s",
	"verify", "verify backup job --read-data --json", "verify nosuch", "verify backup --read-data=0%",
	"pull backup job --as pulled", "pull backup job --as labelled --label x=y --mount --json", "pull backup job",
	"pull backup no", "pull nosuch job", "pull backup job --as pulled --update",
	"fsck", "fsck job --json", "fsck no", "fsck --repair -q",
	"doctor --only programs --json", "doctor --only programs", "doctor --only nosuch", "doctor --list -q",
	"gc --json", "gc --explain -q", "history job --json --limit 3", "history no",
	"destroy no", "destroy many-* old", "destroy --label k", "destroy [", "destroy e s --json", "ls -q",
	"__complete show ''", "__complete rewind kept ''", "__complete label set kept ''",
	"__complete golden show ''", "__complete push --to ''", "__complete verify ''", "__complete pull backup ''",
}

// words splits a step, in which '...' is one word.
func words(step string) (out []string) {
	for i, part := range strings.Split(step, "'") {
		if i%2 == 1 {
			out = append(out, part)
		} else {
			out = append(out, strings.Fields(part)...)
		}
	}
	return out
}

// TestThroughService: commands print the same and end the same, whether they open the pool or go through the service.
func TestThroughService(t *testing.T) {
	kinds := map[string][]string{"plain": {"--driver", "plain"}}
	if os.Geteuid() == 0 {
		kinds["reflink"] = []string{"--driver", "reflink", "--size", "1G"}
	} else {
		t.Log("SKIPPED: pools that need root")
	}
	for name, init := range kinds {
		t.Run(name, func(t *testing.T) {
			direct, service := newCommandLine(t, false, init...), newCommandLine(t, true, init...)
			for _, c := range []commandLine{direct, service} {
				c.addRemote(t)
			}
			service.startService(t)
			tar := archive(t)
			worked := 0
			for _, step := range sameSteps {
				input := ""
				if slices.Contains(words(step), "import") {
					input = tar
				}
				want, got := direct.pando(t, input, words(step)...), service.pando(t, input, words(step)...)
				if got != want {
					t.Errorf("pando %s\n directly: %d\n%s%s through the service: %d\n%s%s", step, want.exit, want.stdout,
						want.stderr, got.exit, got.stdout, got.stderr)
				}
				if want.exit == 0 {
					worked++
				}
			}
			if worked < len(sameSteps)/2 {
				t.Errorf("only %d of %d commands succeeded", worked, len(sameSteps))
			}
		})
	}
}
