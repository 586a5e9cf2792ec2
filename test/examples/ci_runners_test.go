package examples

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"pando/internal/testing/servertest"
)

// repository makes a git repository with one commit that everyone can read.
func (h *ciHost) repository() string {
	h.Helper()
	dir := filepath.Join(h.dir, "app.git")
	h.shell(`
		git init -q -b main "$1" && cd "$1"
		git config user.name ci && git config user.email ci@example.com
		echo one >file && git add file && git commit -q -m one`, dir)
	return dir
}

// shell runs a script of the test itself.
func (h *ciHost) shell(script string, args ...string) string {
	h.Helper()
	out, err := command(h.T, nil, "bash", append([]string{"-euc", script, "bash"}, args...)...).CombinedOutput()
	if err != nil {
		h.Fatalf("%v: %s", err, out)
	}
	return string(out)
}

// --- Buildkite: the real agent ---

// bkJob makes the agent's command for one job. The agent that polls for jobs would start it as `buildkite-agent
// bootstrap`, with the job in its environment.
func bkJob(h *ciHost, script string, env ...string) (*exec.Cmd, *bytes.Buffer) {
	h.Helper()
	agent := servertest.Tool(h.T, "runners/buildkite", "github.com/buildkite/agent/v3")
	hooks, home, bin := filepath.Join(h.dir, "hooks"), filepath.Join(h.dir, "home"), filepath.Join(h.dir, "bin")
	for _, dir := range []string{hooks, home, bin} {
		h.must(os.MkdirAll(dir, 0o755))
	}
	_ = os.Symlink(agent, filepath.Join(bin, "buildkite-agent")) // a job before may have made them
	for _, hook := range []string{"pre-checkout", "pre-exit"} {
		_ = os.Symlink(filepath.Join(h.scripts, "buildkite", hook), filepath.Join(hooks, hook))
	}

	// The one question that this agent has for Buildkite: is the commit known?
	api := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, `{"exists": true}`) // the agent notices
	}))
	h.Cleanup(api.Close)

	out := new(bytes.Buffer)
	cmd := command(h.T, nil, agent, "bootstrap")
	cmd.Dir, cmd.Stdout, cmd.Stderr = h.dir, out, out
	cmd.Env = append([]string{
		"PATH=" + bin + ":" + os.Getenv("PATH"), "HOME=" + home, "TMPDIR=" + home, "BUILDKITE=true", "CI=true",
		"BUILDKITE_BIN_PATH=" + bin, "BUILDKITE_HOOKS_PATH=" + hooks,
		"BUILDKITE_BUILD_PATH=" + filepath.Join(h.dir, "builds"), "BUILDKITE_PLUGINS_PATH=" + filepath.Join(h.dir, "plugins"),
		"BUILDKITE_AGENT_NAME=agent 1", "BUILDKITE_AGENT_ACCESS_TOKEN=none", "BUILDKITE_AGENT_ENDPOINT=" + api.URL,
		"BUILDKITE_ORGANIZATION_SLUG=acme", "BUILDKITE_PIPELINE_SLUG=app", "BUILDKITE_PIPELINE_PROVIDER=git",
		"BUILDKITE_REPO=" + filepath.Join(h.dir, "app.git"), "BUILDKITE_COMMIT=HEAD", "BUILDKITE_BRANCH=main",
		"BUILDKITE_PULL_REQUEST=false", "BUILDKITE_JOB_ID=0190-job", "BUILDKITE_BUILD_ID=0190-build",
		"BUILDKITE_COMMAND_EVAL=true", "BUILDKITE_ARTIFACT_PATHS=", "BUILDKITE_COMMAND=" + script,
		"BUILDKITE_SHELL=/bin/bash -e -c", "BUILDKITE_SIGNAL_GRACE_PERIOD_SECONDS=5", "BUILDKITE_CANCEL_SIGNAL=SIGTERM",
		"BUILDKITE_CLEAN_CHECKOUT=true", // removes the checkout first
		"BUILDKITE_MESSAGE=$(touch " + h.dir + "/owned)\n\"'",
	}, env...)
	return cmd, out
}

// lines is the output without the terminal's line ends.
func lines(out *bytes.Buffer) string { return strings.ReplaceAll(out.String(), "\r\n", "\n") }

// TestCIBuildkite runs jobs by the real agent: one that succeeds, one that fails, a promotion, and what is not allowed.
func TestCIBuildkite(t *testing.T) {
	h := newCIHost(t, "root", "golden acme/* app\npromote acme/app main\n")
	h.repository()

	cmd, out := bkJob(h, `[ "$PWD" = "$PANDO_MOUNT/checkout" ] && cat file ../cache/warm && echo better >../cache/warm`)
	if err := cmd.Run(); err != nil || !strings.Contains(lines(out), "one\nwarm\n") {
		t.Errorf("a job: %v: %s", err, out)
	}
	h.clean()

	cmd, out = bkJob(h, "exit 7")
	if err := cmd.Run(); cmd.ProcessState.ExitCode() != 7 {
		t.Errorf("a job that fails: %v: %s", err, out)
	}
	h.clean()

	// A pull request publishes nothing, nor does another branch; main does.
	for _, change := range []string{"BUILDKITE_PULL_REQUEST=12", "BUILDKITE_BRANCH=other"} {
		cmd, out = bkJob(h, "echo bad >../cache/warm", "PANDO_CI_PROMOTE=1", change)
		if change == "BUILDKITE_BRANCH=other" {
			h.shell(`cd "$1" && git branch -f other`, filepath.Join(h.dir, "app.git"))
		}
		if err := cmd.Run(); err != nil || !strings.Contains(h.pando("golden", "show", "app", "--json"), `"generation": 1,`) {
			t.Errorf("%s: %v: %s", change, err, out)
		}
	}
	cmd, out = bkJob(h, "echo better >../cache/warm; rm -rf ../checkout/*", "PANDO_CI_PROMOTE=1")
	if err := cmd.Run(); err != nil {
		t.Errorf("a promotion: %v: %s", err, out)
	}
	cmd, out = bkJob(h, "cat ../cache/warm")
	if err := cmd.Run(); err != nil || !strings.Contains(lines(out), "\nbetter\n") {
		t.Errorf("after the promotion: %v: %s", err, out)
	}
	h.clean()

	cmd, out = bkJob(h, "true", "BUILDKITE_PIPELINE_SLUG=x", "BUILDKITE_ORGANIZATION_SLUG=other", "PANDO_CI_GOLDEN=secret")
	if err := cmd.Run(); err == nil || !strings.Contains(out.String(), "no golden for other/x") {
		t.Errorf("a repository without a golden: %v: %s", err, out)
	}
	h.clean()
	if _, err := os.Stat(filepath.Join(h.dir, "owned")); err == nil {
		t.Error("a message of a commit was executed")
	}
}

// TestCIBuildkiteCanceled cancels a job of the real agent at each stage. After SIGTERM the agent still runs pre-exit.
// After SIGKILL of the agent, the next job of it destroys what is left.
func TestCIBuildkiteCanceled(t *testing.T) {
	for _, stage := range []string{"before-clone", "after-clone", "job", "before-destroy", "after-destroy"} {
		for _, signal := range []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL} {
			t.Run(stage+"/"+signal.String(), func(t *testing.T) {
				h := newCIHost(t, "root", "golden acme/* app\n")
				h.repository()
				script, slow := "true", filepath.Join(h.dir, "slow")
				if stage == "job" {
					h.must(os.Mkdir(slow, 0o755))
					script = "touch " + slow + "/job; sleep 1000"
				} else {
					h.slowPando(stage)
				}

				cmd, out := bkJob(h, script)
				cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
				h.must(cmd.Start())
				if h.waitFor(filepath.Join(slow, stage)); signal == syscall.SIGKILL {
					h.killTree(cmd.Process.Pid)
				} else {
					h.must(cmd.Process.Signal(signal))
				}
				h.touch(filepath.Join(slow, "go"))
				err := cmd.Wait()
				t.Logf("%v: %s", err, out)

				if signal == syscall.SIGKILL {
					next, out := bkJob(h, "true")
					if err := next.Run(); err != nil {
						t.Errorf("the next job: %v: %s", err, out)
					}
				}
				h.noProcesses()
				h.clean()
			})
		}
	}
}

// killTree kills a process and all that it has started, as a system does that stops a service.
func (h *ciHost) killTree(pid int) {
	h.Helper()
	h.shell(`
		tree() { local c; for c in $(cat /proc/"$1"/task/*/children 2>/dev/null); do tree "$c"; done; echo "$1"; }
		kill -KILL $(tree "$1")`, fmt.Sprint(pid))
}

// --- GitLab: the real runner, and a server in place of GitLab ---

// gitlab answers a runner as GitLab does: one job, its log and its end.
type gitlab struct {
	*httptest.Server
	mu       sync.Mutex
	job      any
	log      bytes.Buffer
	state    string // success, failed
	reason   string
	canceled bool
}

func newGitLab(t *testing.T, job any) *gitlab {
	g := &gitlab{job: job}
	g.Server = httptest.NewServer(http.HandlerFunc(g.serve))
	t.Cleanup(g.Close)
	return g
}

func (g *gitlab) serve(w http.ResponseWriter, r *http.Request) {
	g.mu.Lock()
	defer g.mu.Unlock()
	body, _ := io.ReadAll(r.Body) // what is missing fails the test
	if g.canceled {
		w.Header().Set("Job-Status", "canceled")
	}

	switch {
	case strings.HasSuffix(r.URL.Path, "/jobs/request"):
		if g.job == nil {
			w.WriteHeader(http.StatusNoContent)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusCreated)
		_ = json.NewEncoder(w).Encode(g.job) // the runner notices
		g.job = nil
	case strings.HasSuffix(r.URL.Path, "/trace"):
		g.log.Write(body)
		w.Header().Set("Range", fmt.Sprintf("0-%d", g.log.Len()))
		w.WriteHeader(http.StatusAccepted)
	default:
		var update struct {
			State  string `json:"state"`
			Reason string `json:"failure_reason"`
		}
		_ = json.Unmarshal(body, &update) // the test sees that there is no state
		g.state, g.reason = update.State, update.Reason
		w.WriteHeader(http.StatusOK)
	}
}

func (g *gitlab) cancel() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.canceled = true
}

// result returns the state that the runner has reported, and the log.
func (g *gitlab) result() (state, log string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.state + g.reason, g.log.String()
}

// glJob makes a job as GitLab describes it to runners.
func glJob(h *ciHost, script string, variables ...string) map[string]any {
	h.Helper()
	repo := filepath.Join(h.dir, "app.git")
	sha := strings.TrimSpace(h.shell(`
		chown -R root "$1"; git -C "$1" rev-parse HEAD
		chown -R nobody "$1" # git serves a directory only to the user whom it belongs to`, repo))
	list := []map[string]any{
		{"key": "CI_PROJECT_PATH", "value": "acme/app", "public": true},
		{"key": "CI_JOB_ID", "value": "4711", "public": true},
		{"key": "CI_COMMIT_REF_NAME", "value": "x;$(touch " + h.dir + "/owned)\n'\"", "public": true},
		{"key": "TMPDIR", "value": "/etc", "public": true}, {"key": "SUDO_UID", "value": "1", "public": true},
	}
	for _, v := range variables {
		key, value, _ := strings.Cut(v, "=")
		list = append(list, map[string]any{"key": key, "value": value, "public": true})
	}
	return map[string]any{
		"id": 4711, "token": "job", "allow_git_fetch": true,
		"job_info": map[string]any{"name": "build", "stage": "test", "project_id": 3, "project_name": "app"},
		"git_info": map[string]any{"repo_url": "file://" + repo, "ref": "main", "sha": sha, "ref_type": "branch",
			"refspecs": []string{"+refs/heads/*:refs/remotes/origin/*"}},
		"runner_info": map[string]any{"timeout": 3600}, "variables": list,
		"steps": []any{map[string]any{"name": "script", "script": []string{script}, "timeout": 3600, "when": "on_success"}},
	}
}

// glRunner makes the command of the real runner for one job.
func glRunner(h *ciHost, g *gitlab) (*exec.Cmd, *bytes.Buffer) {
	h.Helper()
	runner := servertest.Tool(h.T, "runners/gitlab", "pando/test/runners/gitlab")
	tmp := filepath.Join(h.dir, "runner-tmp")
	h.must(os.MkdirAll(tmp, 0o700))
	driver := filepath.Join(h.scripts, "gitlab")
	out := new(bytes.Buffer)
	cmd := command(h.T, nil, runner, "run-single", "--url", g.URL, "--token", "runner-token", "--executor", "custom",
		"--shell", "bash", "--max-builds", "1", "--wait-timeout", "60", "--builds-dir", "/nowhere", "--cache-dir", "/nowhere",
		"--custom-config-exec", filepath.Join(driver, "config"), "--custom-prepare-exec", filepath.Join(driver, "prepare"),
		"--custom-run-exec", filepath.Join(driver, "run"), "--custom-cleanup-exec", filepath.Join(driver, "cleanup"),
		"--custom-graceful-kill-timeout", "5", "--custom-force-kill-timeout", "5")
	cmd.Env = append(os.Environ(), "TMPDIR="+tmp, "HOME="+h.dir)
	cmd.Dir, cmd.Stdout, cmd.Stderr = h.dir, out, out
	return cmd, out
}

const glConf = "golden acme/* app\nuser nobody\n"

// TestCIGitLab runs jobs by the real runner, which gets them from a small server.
func TestCIGitLab(t *testing.T) {
	h := newCIHost(t, "root", glConf)
	h.repository()
	for _, test := range []struct {
		name, script string
		variables    []string
		state, log   string
	}{
		{"succeeds", `id -un; cat file "$PANDO_MOUNT/cache/warm"; pwd; sleep 1000 & setsid sleep 1000 &`, nil, "success",
			"nobody\none\nwarm\n"},
		{"fails", "exit 7", nil, "failedscript_failure", "exit status 1"},
		{"cannot reach the host's files", "! ls " + h.dir + "/runner-tmp", nil, "success", ""},
		{"not allowed", "true", []string{"CI_PROJECT_PATH=other/x", "PANDO_CI_GOLDEN=secret"}, "failedrunner_system_failure",
			"no golden for other/x"},
	} {
		t.Run(test.name, func(t *testing.T) {
			g := newGitLab(t, glJob(h, test.script, test.variables...))
			cmd, out := glRunner(h, g)
			err := cmd.Run()
			state, log := g.result()
			if err != nil || state != test.state || !strings.Contains(log, test.log) {
				t.Errorf("%v, state %q: %s\nthe runner: %s", err, state, log, out)
			}
			h.clean()
		})
	}
	if _, err := os.Stat(filepath.Join(h.dir, "owned")); err == nil {
		t.Error("a name of a branch was executed")
	}
}

// TestCIGitLabCanceled cancels a job of the real runner at each stage, in GitLab and by killing the runner.
func TestCIGitLabCanceled(t *testing.T) {
	for _, stage := range []string{"before-clone", "after-clone", "job", "before-destroy", "after-destroy"} {
		for _, how := range []string{"canceled", "terminated", "killed"} {
			t.Run(stage+"/"+how, func(t *testing.T) {
				conf := glConf
				if how == "killed" { // nothing else is left to destroy the clone
					ttl := "2s"
					if strings.HasSuffix(stage, "-destroy") {
						ttl = "15s" // it must still be there at that stage, however slow the host is
					}
					conf += "ttl " + ttl + "\n"
				}
				h := newCIHost(t, "root", conf)
				h.repository()
				script, slow := "true", filepath.Join(h.dir, "slow")
				if stage == "job" {
					h.must(os.Mkdir(slow, 0o755))
					h.must(os.Chmod(slow, 0o777))
					script = "trap '' TERM; touch " + slow + "/job; sleep 1000"
				} else {
					h.slowPando(stage)
				}

				g := newGitLab(t, glJob(h, script))
				cmd, out := glRunner(h, g)
				h.must(cmd.Start())
				h.waitFor(filepath.Join(slow, stage))
				switch how {
				case "canceled":
					g.cancel()
				case "terminated":
					h.must(cmd.Process.Signal(syscall.SIGTERM))
				case "killed":
					h.killTree(cmd.Process.Pid)
				}
				h.touch(filepath.Join(slow, "go"))
				err := cmd.Wait()
				t.Logf("%v: %s", err, out)
				h.noProcesses()
				if how == "killed" {
					h.waitForExpiry()
				}
				h.clean()
			})
		}
	}
}

// waitForExpiry waits until the next commands of pando have destroyed what is left: the time limit is the net.
func (h *ciHost) waitForExpiry() {
	h.Helper()
	for end := time.Now().Add(time.Minute); len(h.volumes()) > 0; time.Sleep(100 * time.Millisecond) {
		if time.Now().After(end) {
			h.Fatalf("these do not expire: %v", h.volumes())
		}
	}
}
