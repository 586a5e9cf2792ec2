package examples

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"pando/internal/testing/testfs"
)

// TestCIFigures runs the example, which measures all scripts. Its times are only printed.
func TestCIFigures(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: mounting needs root: run the tests as root")
	}
	out, err := command(t, []string{"CI_DIR=" + workDir(t), "CI_FILES=200"}, "../../examples/ci/run.sh").CombinedOutput()
	t.Logf("%s", out)
	if err != nil {
		t.Fatal(err)
	}

	for _, want := range []string{"GitHub: ", "GitLab: ", "Buildkite: ", "shell: ", "git clone ", "cp -a"} {
		if !regexp.MustCompile(want + `.* \d+ ms +\d+ ms\n`).Match(out) {
			t.Errorf("it does not print a row of %q", want)
		}
	}
	if !bytes.Contains(out, []byte("Left behind: nothing")) {
		t.Error("something is left")
	}
}

// shellJob makes the command of examples/ci/shell/job.sh.
func shellJob(h *ciHost, script string) (*exec.Cmd, *bytes.Buffer) {
	out := new(bytes.Buffer)
	cmd := command(h.T, []string{"PANDO_POOL=" + h.pool, "PATH=" + filepath.Dir(pando) + ":" + os.Getenv("PATH"),
		"BUILD_TAG=jenkins-folder%2Fjob-$(touch " + h.dir + "/owned) '\"\n-12"},
		filepath.Join(h.scripts, "shell/job.sh"), "app", "bash", "-c", script)
	cmd.Dir, cmd.Stdout, cmd.Stderr = h.dir, out, out
	return cmd, out
}

// TestCIShell runs jobs of Jenkins or a shell: one that succeeds, one that fails, and signals while it runs.
func TestCIShell(t *testing.T) {
	h := newCIHost(t, "root", "")
	cmd, out := shellJob(h, `cat cache/warm; [ "$PWD" = "$PANDO_MOUNT" ]; echo mine >mine`)
	if err := cmd.Run(); err != nil || out.String() != "warm\n" {
		t.Errorf("%v: %s", err, out)
	}
	h.clean()

	cmd, out = shellJob(h, "exit 7")
	if err := cmd.Run(); cmd.ProcessState.ExitCode() != 7 {
		t.Errorf("a job that fails: %v: %s", err, out)
	}
	h.clean()

	for signal, code := range map[syscall.Signal]int{syscall.SIGINT: 130, syscall.SIGTERM: 143} {
		running := filepath.Join(h.dir, "running-"+strconv.Itoa(code))
		cmd, out = shellJob(h, "touch "+running+"; sleep 1000 & sleep 1000")
		h.must(cmd.Start())
		h.waitFor(running)
		h.must(cmd.Process.Signal(signal))
		if err := cmd.Wait(); cmd.ProcessState.ExitCode() != code {
			t.Errorf("%v: %v: %s", signal, err, out)
		}
		h.clean()
	}
	if _, err := os.Stat(filepath.Join(h.dir, "owned")); err == nil {
		t.Error("the tag was executed")
	}
}

// asNobody runs a script in a mount namespace where nobody may call the helper by sudo, as docs/ci.md has it.
const asNobody = `
dir=$1
printf '%s\n' 'root ALL=(ALL:ALL) ALL' "nobody ALL=(root) NOPASSWD: $dir/ci/pando-ci" >"$dir/sudoers"
chmod 440 "$dir/sudoers"
mount --bind "$dir/sudoers" /etc/sudoers
trap 'umount /etc/sudoers' EXIT
cd "$dir/_work/app/app"
as_nobody() {
  setpriv --reuid nobody --regid nogroup --clear-groups env -i PATH="$PATH" HOME=/ RUNNER_NAME=r GITHUB_RUN_ID=1 \
    GITHUB_RUN_ATTEMPT=1 GITHUB_JOB=build GITHUB_REPOSITORY=acme/app GITHUB_WORKSPACE="$dir/_work/app/app" \
    GITHUB_ENV="$dir/_work/set_env" "$@"
}
as_nobody bash -e "$dir/ci/github/job-started.sh"
as_nobody bash -c 'cd "$1" && id -un >mine && stat -c "owner %U" . mine' bash "$dir/_work/app/app"

# What the sudoers line lets it try.
no() { if "$@"; then echo "ALLOWED: $*"; fi; }
no as_nobody sudo -n "$dir/ci/pando-ci" clone --runner r --job j --repository acme/app --at /etc/x
no as_nobody sudo -n "$dir/ci/pando-ci" clone --runner r --job j --repository secret/x
no as_nobody sudo -n SUDO_USER=root SUDO_UID=0 "$dir/ci/pando-ci" clone --runner r --job j --repository secret/x
no as_nobody sudo -n "$dir/ci/pando-ci" promote --runner r --job 1.1.build --repository acme/app --branch main
no as_nobody sudo -n /bin/true
as_nobody sudo -n "$dir/ci/pando-ci" destroy --runner root-runner
as_nobody sudo -n "$dir/ci/pando-ci" destroy --runner '*'
"$dir/ci/pando-ci" destroy --runner r

cd /
as_nobody env -C "$dir/_work/app/app" bash -e "$dir/ci/github/job-completed.sh"
`

// TestCISudo runs the hooks of GitHub as a user who is not root, by a real sudo, and what a hostile job of this user
// could try.
func TestCISudo(t *testing.T) {
	h := newCIHost(t, "root", "golden * secret\n")
	if _, err := exec.LookPath("sudo"); err != nil {
		t.Skipf("SKIPPED: %v: run make deps", err)
	}
	h.configure("nobody", "pando "+pando+"\ngolden acme/* app\nworkspaces "+h.dir+"/_work")
	h.must(os.MkdirAll(filepath.Join(h.dir, "_work/app/app"), 0o755))
	h.touch(filepath.Join(h.dir, "_work/set_env"))
	h.shell(`chown -R nobody "$1/_work"`, h.dir)

	// A volume of root that nobody must not destroy.
	h.shell(`"$1/ci/pando-ci" clone --runner root-runner --job 1 --repository x`, h.dir)
	out, err := command(t, nil, "unshare", "--mount", "--propagation", "slave", "bash", "-euc", asNobody, "bash",
		h.dir).CombinedOutput()
	if err != nil || strings.Contains(string(out), "ALLOWED") ||
		!strings.Contains(string(out), "owner nobody\nowner nobody\n") {
		t.Errorf("%v: %s", err, out)
	}
	for _, want := range []string{"does not allow clones at /etc/x", "no golden for secret/x",
		"publishes nothing of acme/app"} {
		if !strings.Contains(string(out), want) {
			t.Errorf("it does not print %q: %s", want, out)
		}
	}
	if v := h.onlyVolume(); v.Labels["ci.user"] != "root" {
		t.Errorf("left is %+v", v)
	}
	h.shell(`"$1/ci/pando-ci" destroy --runner root-runner`, h.dir)
	h.clean()
}

// TestCIHelperConfig checks that a configuration that others could write decides nothing.
func TestCIHelperConfig(t *testing.T) {
	h := newCIHost(t, "root", "golden * app\n")
	file := filepath.Join(h.config, "root.conf")
	refused := func(why string) {
		t.Helper()
		out, err := command(t, nil, filepath.Join(h.scripts, "pando-ci"), "clone", "--runner", "r", "--job", "j",
			"--repository", "x").CombinedOutput()
		if err == nil || !strings.Contains(string(out), why) {
			t.Errorf("%v: %s", err, out)
		}
	}

	h.must(os.Chmod(file, 0o666))
	refused("must belong to root")
	h.must(os.Chmod(file, 0o644))
	h.must(os.Chown(file, 65534, 0))
	refused("must belong to root")
	h.must(os.Chown(file, 0, 0))
	h.configure("root", "goldn * app")
	refused("unknown setting goldn")
	h.must(os.Remove(file))
	refused("has not allowed clones for the user root")
	h.configure("root", "pando "+pando)
	h.clean()
}

// TestCIGitLabResponse runs the stages as runners from 14.1 on do, which describe the job in JOB_RESPONSE_FILE. The
// real runner of the other tests is older. What the job says of itself in variables does not count.
func TestCIGitLabResponse(t *testing.T) {
	h := newCIHost(t, "root", glConf+"promote acme/app main\n")
	if _, err := exec.LookPath("jq"); err != nil {
		t.Skipf("SKIPPED: %v: run make deps", err)
	}
	const host = "https://gitlab-ci-token:secret@git.example.com/"
	for _, test := range []struct {
		url, ref, kind, script string
		exit                   int
		generation             string
	}{
		{host + "acme/app.git", "feature", "branch", "touch builds/x", 0, "app@1"},
		{host + "acme/app.git", "main", "tag", "touch builds/x", 0, "app@1"},
		{host + "acme/app.git", "main", "branch", "exit 7", 7, "app@1"},
		{host + "acme/fork.git", "main", "branch", "true", 0, "app@1"},
		{host + "acme/app.git", "main", "branch", "true", 0, "app@2"},
	} {
		tmp := t.TempDir()
		response, err := json.Marshal(map[string]any{"id": 12,
			"git_info": map[string]string{"repo_url": test.url, "ref": test.ref, "ref_type": test.kind}})
		h.must(err)
		h.must(os.WriteFile(filepath.Join(tmp, "response.json"), response, 0o600))
		h.must(os.WriteFile(filepath.Join(tmp, "script"), []byte(test.script), 0o600))
		stage := func(name string, args ...string) (string, int) {
			cmd := command(t, nil, filepath.Join(h.scripts, "gitlab", name), args...)
			cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "TMPDIR=" + tmp,
				"JOB_RESPONSE_FILE=" + filepath.Join(tmp, "response.json"),
				"BUILD_EXIT_CODE_FILE=" + filepath.Join(tmp, "code"), "BUILD_FAILURE_EXIT_CODE=1", "SYSTEM_FAILURE_EXIT_CODE=2",
				"CUSTOM_ENV_CI_PROJECT_PATH=other/secret", "CUSTOM_ENV_CI_JOB_ID=../..", "CUSTOM_ENV_PANDO_CI_PROMOTE=1",
				"CUSTOM_ENV_CI_COMMIT_BRANCH=main"}
			out, _ := cmd.CombinedOutput() // the exit code is compared
			return string(out), cmd.ProcessState.ExitCode()
		}

		out, code := stage("config")
		var config struct {
			BuildsDir string `json:"builds_dir"`
		}
		if err := json.Unmarshal([]byte(out), &config); err != nil || code != 0 ||
			!strings.HasPrefix(config.BuildsDir, h.dir+"/mnt/gitlab-12-") {
			t.Fatalf("config: %d, %v: %s", code, err, out)
		}
		if out, code := stage("prepare"); code != 0 {
			t.Fatalf("prepare: %d: %s", code, out)
		}
		out, code = stage("run", filepath.Join(tmp, "script"), "build_script")
		file, _ := os.ReadFile(filepath.Join(tmp, "code")) // there is none after a success
		if want := min(test.exit, 1); code != want || test.exit != 0 && string(file) != strconv.Itoa(test.exit)+"\n" {
			t.Errorf("run: %d, %q: %s", code, file, out)
		}
		for range 2 { // the runner may repeat it
			if out, code := stage("cleanup"); code != 0 {
				t.Errorf("cleanup: %d: %s", code, out)
			}
		}
		h.clean()
		if got := strings.TrimSpace(h.pando("clone", "app", "look", "-q")); got != "look" {
			t.Errorf("a clone: %s", got)
		}
		if origin := h.pando("ls", "--columns", "origin"); !strings.Contains(origin, test.generation) {
			t.Errorf("%s %s %s: the golden is %s", test.url, test.ref, test.kind, origin)
		}
		h.pando("destroy", "look")
	}
}

// replaceWorkspace stands for pando: after a clone it puts a link in the place of the workspace, as the user who owns
// the directory above can do at any time.
const replaceWorkspace = `#!/bin/bash
%[1]s "$@" || exit
case " $* " in *" clone "*)
  mv %[2]s/_work/app %[2]s/_work/moved
  mkdir %[2]s/_work/app
  ln -s %[2]s/victim %[2]s/_work/app/app
esac
`

// TestCIWorkspaceIsReplaced: a user who replaces the workspace while the helper, which is root, gives it to him, gets
// nothing of root's.
func TestCIWorkspaceIsReplaced(t *testing.T) {
	h := newCIHost(t, "root", "golden * secret\n")
	wrapper := filepath.Join(h.dir, "wrapper")
	h.must(testfs.WriteProgram(wrapper, fmt.Appendf(nil, replaceWorkspace, pando, h.dir)))
	h.configure("nobody", "pando "+wrapper+"\ngolden acme/* app\nworkspaces "+h.dir+"/_work")
	h.must(os.MkdirAll(filepath.Join(h.dir, "_work/app/app"), 0o755))
	h.touch(filepath.Join(h.dir, "victim"))

	h.shell(`SUDO_UID=65534 SUDO_USER=nobody "$1/ci/pando-ci" clone --runner r --job j --repository acme/app \
		--at "$1/_work/app/app"`, h.dir)
	if got := h.shell(`stat -c %U "$1/victim"`, h.dir); strings.TrimSpace(got) != "root" {
		t.Errorf("what the link led to belongs to %s", got)
	}

	h.shell(`rm "$1/_work/app/app"; rmdir "$1/_work/app"; mv "$1/_work/moved" "$1/_work/app"
		SUDO_UID=65534 SUDO_USER=nobody "$1/ci/pando-ci" destroy --runner r`, h.dir)
	h.clean()
}
