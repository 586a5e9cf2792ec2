package examples

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"pando/internal/testing/testfs"
)

// ciHost is a host with a pool, the golden "app" and the scripts of examples/ci as an administrator installs them.
type ciHost struct {
	*testing.T
	dir     string // clones are below it, and users other than root can reach it
	scripts string
	config  string // what is /etc/pando/ci elsewhere
	pool    string
}

// newCIHost makes a host whose root.conf, or that of another user, has these lines besides those for the host.
func newCIHost(t *testing.T, user, conf string) *ciHost {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: mounting needs root: run the tests as root")
	}

	h := &ciHost{T: t, dir: workDir(t)}
	h.scripts, h.config, h.pool = filepath.Join(h.dir, "ci"), filepath.Join(h.dir, "conf"), filepath.Join(h.dir, "pool")
	h.must(os.Chmod(h.dir, 0o755))
	h.must(os.CopyFS(h.scripts, os.DirFS("../../examples/ci")))

	// The place of the configuration is the one line that differs from what is installed.
	helper := filepath.Join(h.scripts, "pando-ci")
	text, err := os.ReadFile(helper)
	h.must(err)
	text = bytes.Replace(text, []byte("\nconfig=/etc/pando/ci\n"), []byte("\nconfig="+h.config+"\n"), 1)
	h.must(testfs.WriteProgram(helper, text))
	h.must(os.Mkdir(h.config, 0o755))
	h.configure(user, "pando "+pando+"\n"+conf)

	source := filepath.Join(h.dir, "source")
	h.must(os.MkdirAll(filepath.Join(source, "cache"), 0o755))
	h.must(os.WriteFile(filepath.Join(source, "cache", "warm"), []byte("warm\n"), 0o644))
	h.pando("init", "--size", "1G", "-q")
	t.Cleanup(func() { h.pando("deinit", "--force") })
	h.pando("golden", "import", "app", source, "-q")
	h.pando("golden", "import", "secret", source, "-q")
	return h
}

// configure writes USER.conf.
func (h *ciHost) configure(user, conf string) {
	h.Helper()
	conf += "\npool " + h.pool + "\nmounts " + filepath.Join(h.dir, "mnt") + "\npatience 2\n"
	h.must(os.WriteFile(filepath.Join(h.config, user+".conf"), []byte(conf), 0o644))
}

func (h *ciHost) must(err error) {
	h.Helper()
	if err != nil {
		h.Fatal(err)
	}
}

func (h *ciHost) pando(args ...string) string {
	h.Helper()
	out, err := command(h.T, nil, pando, append([]string{"--pool", h.pool}, args...)...).CombinedOutput()
	if err != nil {
		h.Fatalf("pando %s: %v: %s", strings.Join(args, " "), err, out)
	}
	return string(out)
}

// ciVolume is what pando ls --json says of a volume.
type ciVolume struct {
	Name, Mountpoint, Golden string
	Labels                   map[string]string
	ExpiresAt                *time.Time `json:"expires_at"`
}

func (h *ciHost) volumes() (list []ciVolume) {
	h.Helper()
	h.must(json.Unmarshal([]byte(h.pando("ls", "--json")), &list))
	return list
}

// onlyVolume returns the one volume there is.
func (h *ciHost) onlyVolume() ciVolume {
	h.Helper()
	list := h.volumes()
	if len(list) != 1 {
		h.Fatalf("there are %d volumes: %v", len(list), list)
	}
	return list[0]
}

// clean checks that no job left anything: no volume, no mount, and nothing that fsck finds.
func (h *ciHost) clean() {
	h.Helper()
	if list := h.volumes(); len(list) > 0 {
		h.Errorf("volumes are left: %v", list)
	}
	mounts, _ := filepath.Glob(filepath.Join(h.dir, "mnt", "[^.]*"))
	if len(mounts) > 0 {
		h.Errorf("mount points are left: %v", mounts)
	}
	h.pando("fsck", "-q")
}

// slowPando makes the scripts use a pando that stops at a stage, such as before-clone or after-clone, until the file go
// exists in dir. It makes a file with the name of the stage when it has come there.
func (h *ciHost) slowPando(stage string) (dir string) {
	h.Helper()
	dir = filepath.Join(h.dir, "slow")
	h.must(os.Mkdir(dir, 0o755))
	path := filepath.Join(dir, "pando")
	when, verb, _ := strings.Cut(stage, "-")
	h.must(testfs.WriteProgram(path, []byte(`#!/bin/bash
hold() {
  [ "$found $1" = "yes `+when+`" ] && [ ! -e "`+dir+`/go" ] || return
  : >"`+dir+`/`+stage+`"
  for ((i = 0; i < 3000; i++)); do [ ! -e "`+dir+`/go" ] || return; sleep 0.02; done
}
found=no
for word; do [ "$word" != `+verb+` ] || found=yes; done
# A clone begins with the removal of what earlier jobs left: here, of nothing.
[ `+verb+` != destroy ] || [ -n "$("`+pando+`" --pool "`+h.pool+`" ls -q)" ] || found=no
hold before
"`+pando+`" "$@"
status=$?
hold after
exit $status
`)))
	file := filepath.Join(h.config, "root.conf")
	conf, err := os.ReadFile(file)
	h.must(err)
	h.must(os.WriteFile(file, append(conf, "pando "+path+"\n"...), 0o644))
	return dir
}

// waitFor waits until the file exists.
func (h *ciHost) waitFor(file string) {
	h.Helper()
	for end := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
		if _, err := os.Stat(file); err == nil {
			return
		}
		if time.Now().After(end) {
			h.Fatalf("there is no %s", file)
		}
	}
}

// touch makes an empty file.
func (h *ciHost) touch(file string) {
	h.Helper()
	h.must(os.WriteFile(file, nil, 0o644))
}

// noProcesses waits until no process has the host's directory in its command line.
func (h *ciHost) noProcesses() {
	h.Helper()
	waitForEnd(h.T, h.dir)
}

// --- a runner of GitHub ---

// ghRunner does with hooks and steps what the runner does: ScriptHandler and ProcessInvoker in
// https://github.com/actions/runner (src/Runner.Worker/Handlers/ScriptHandler.cs, src/Runner.Sdk/ProcessInvoker.cs).
// The real one is not to be had here.
type ghRunner struct {
	*ciHost
	env       []string // of the runner and of the job
	workspace string
	envFile   string
}

func newGHRunner(h *ciHost, job string) *ghRunner {
	h.Helper()
	r := &ghRunner{ciHost: h, workspace: filepath.Join(h.dir, "_work", "app", "app")}
	h.must(os.MkdirAll(r.workspace, 0o755))
	r.envFile = filepath.Join(h.dir, "_work", "set_env")
	h.touch(r.envFile)
	r.env = []string{
		"PATH=" + os.Getenv("PATH"), "HOME=" + h.dir, "RUNNER_NAME=runner 1", "RUNNER_TEMP=" + filepath.Join(h.dir, "_work"),
		"GITHUB_ACTIONS=true", "CI=true", "GITHUB_WORKSPACE=" + r.workspace, "GITHUB_ENV=" + r.envFile,
		"GITHUB_REPOSITORY=acme/app", "GITHUB_RUN_ID=17", "GITHUB_RUN_ATTEMPT=1", "GITHUB_JOB=" + job,
		"GITHUB_REF=refs/heads/$(touch " + h.dir + "/owned)", "GITHUB_HEAD_REF=a'b\"c\nd",
	}
	return r
}

// command makes what the runner starts: `bash -e FILE`, in the workspace.
func (r *ghRunner) command(file string, out *bytes.Buffer) *exec.Cmd {
	cmd := command(r.T, nil, "bash", "-e", file)
	cmd.Env, cmd.Dir, cmd.Stdout, cmd.Stderr = slices.Clone(r.env), r.workspace, out, out
	cmd.WaitDelay = time.Minute
	return cmd
}

func (r *ghRunner) run(file string) (string, error) {
	var out bytes.Buffer
	err := r.command(file, &out).Run()
	return out.String(), err
}

func (r *ghRunner) started() (string, error) {
	return r.run(filepath.Join(r.scripts, "github/job-started.sh"))
}
func (r *ghRunner) completed() (string, error) {
	return r.run(filepath.Join(r.scripts, "github/job-completed.sh"))
}

// step runs a step of the job, with what the hook has set.
func (r *ghRunner) step(script string) (string, error) {
	r.Helper()
	file := filepath.Join(r.dir, "_work", "step.sh")
	r.must(os.WriteFile(file, []byte(script), 0o644))
	set, err := os.ReadFile(r.envFile)
	r.must(err)
	var out bytes.Buffer
	cmd := r.command(file, &out)
	cmd.Env = append(cmd.Env, strings.Split(strings.TrimSpace(string(set)), "\n")...)
	err = cmd.Run()
	return out.String(), err
}

func ghConfig(t *testing.T) *ciHost {
	h := newCIHost(t, "root", "golden acme/* app\n")
	file := filepath.Join(h.config, "root.conf")
	conf, err := os.ReadFile(file)
	h.must(err)
	h.must(os.WriteFile(file, append(conf, "workspaces "+h.dir+"/_work\n"...), 0o644))
	return h
}

// TestCIGitHub runs jobs: one that succeeds, one that leaves a process, and one after a runner that died.
func TestCIGitHub(t *testing.T) {
	h := ghConfig(t)
	r := newGHRunner(h, `build $(touch owned) "x"`)

	out, err := r.started()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	v := h.onlyVolume()
	if v.Mountpoint != r.workspace || v.ExpiresAt == nil || v.Labels["ci.runner"] == "" {
		t.Errorf("the volume is %+v", v)
	}
	if !regexp.MustCompile(`^ci-17-1-build[A-Za-z0-9-]*$`).MatchString(v.Name) {
		t.Errorf("its name is %q", v.Name)
	}
	work := `[ "$PWD" = "$PANDO_MOUNT" ] && cat cache/warm && git init -q . && echo changed >cache/warm`
	if out, err := r.step(work); err != nil || out != "warm\n" {
		t.Errorf("a step: %v: %s", err, out)
	}
	if out, err := r.completed(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
	h.clean()
	if out, err := r.completed(); err != nil { // the runner may repeat it
		t.Errorf("again: %v: %s", err, out)
	}
	if left, _ := os.ReadDir(r.workspace); len(left) > 0 {
		t.Errorf("the workspace has %v", left)
	}

	t.Run("process left", func(t *testing.T) {
		if out, err := r.started(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		sleep := exec.Command("sleep", "1000")
		sleep.Dir = r.workspace
		h.must(sleep.Start())
		defer func() { _ = sleep.Wait() }() // it was killed
		out, err := r.completed()
		if err != nil || !strings.Contains(out, "::warning") || !strings.Contains(out, "(sleep): cwd") {
			t.Errorf("%v: %s", err, out)
		}
		h.onlyVolume()

		// The runner ends it now, and gets its next job.
		h.must(sleep.Process.Kill())
		_ = sleep.Wait() // it was killed
		if out, err := r.started(); err != nil {
			t.Errorf("the next job: %v: %s", err, out)
		}
		h.onlyVolume()
		if out, err := r.completed(); err != nil {
			t.Errorf("%v: %s", err, out)
		}
		h.clean()
	})

	t.Run("not allowed", func(t *testing.T) {
		for name, change := range map[string]string{
			"repository": "GITHUB_REPOSITORY=other/app", "workspace": "GITHUB_WORKSPACE=" + h.dir + "/_work/../ci",
			"elsewhere": "GITHUB_WORKSPACE=/etc",
		} {
			bad := *r
			bad.env = append(slices.Clone(r.env), change, "PANDO_CI_GOLDEN=secret", "SUDO_UID=1", "SUDO_USER=other")
			out, err := bad.started()
			if err == nil || !strings.Contains(out, "::error") {
				t.Errorf("%s: %v: %s", name, err, out)
			}
		}
		h.clean()
	})

	if _, err := os.Stat(filepath.Join(h.dir, "owned")); err == nil {
		t.Error("a name of the job was executed")
	}
}

// TestCIGitHubCanceled cancels a job at each stage, in the ways of the runner: SIGINT to the process, then SIGTERM to
// it, then SIGKILL to its whole tree. The completed hook runs afterwards, unless the runner itself was killed.
func TestCIGitHubCanceled(t *testing.T) {
	for _, stage := range []string{"before-clone", "after-clone", "before-destroy", "after-destroy"} {
		for _, signal := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGKILL} {
			t.Run(stage+"/"+signal.String(), func(t *testing.T) {
				h := ghConfig(t)
				r := newGHRunner(h, "build")
				hook, verb := "github/job-started.sh", strings.Split(stage, "-")[1]
				if verb == "destroy" {
					hook = "github/job-completed.sh"
					if out, err := r.started(); err != nil {
						t.Fatalf("%v: %s", err, out)
					}
				}

				slow := h.slowPando(stage)
				var out bytes.Buffer
				cmd := r.command(filepath.Join(r.scripts, hook), &out)
				cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
				h.must(cmd.Start())
				h.waitFor(filepath.Join(slow, stage))
				if signal == syscall.SIGKILL {
					h.must(syscall.Kill(-cmd.Process.Pid, signal))
				} else {
					h.must(cmd.Process.Signal(signal))
				}
				h.touch(filepath.Join(slow, "go"))

				// The runner does not wait for what an ended hook has left running.
				_, _ = cmd.Process.Wait()
				if verb == "destroy" && signal == syscall.SIGKILL { // the runner was killed: its next job comes
					if out, err := r.started(); err != nil {
						t.Errorf("the next job: %v: %s", err, out)
					}
					h.onlyVolume()
				}
				if out, err := r.completed(); err != nil {
					t.Errorf("%v: %s", err, out)
				}
				h.noProcesses()
				h.clean()
			})
		}
	}
}
