#!/usr/bin/env bash
# What a job pays for a workspace of its own, by each of the scripts beside this file, against git clone and cp:
#   examples/ci/run.sh
#
#   CI_FILES=N   how many files the repository has (default: 5000)
#   CI_DIR=DIR   where to work (default: a temporary directory)
#   PANDO=FILE   the program (default: bin/pando)
#
# It runs the hooks as the runners do, works in one new directory and leaves nothing behind, even when it is
# interrupted. It needs git.
set -euo pipefail
me=ci
# shellcheck source=scripts/temp-pool.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/temp-pool.sh"
# shellcheck source=scripts/figures.sh
source "$root/scripts/figures.sh"

: "${CI_DIR:=}" "${CI_FILES:=5000}"
become_root CI_DIR CI_FILES
type -P git >/dev/null || die 'there is no git: install it, for example with apt-get install git'
jobs=10

# repository DIR: files in folders, and a history.
repository() {
  git init -q -b main "$1" && cd "$1" || return
  local i
  for ((i = 1; i <= CI_FILES; i++)); do
    [ $((i % 100)) -ne 1 ] || mkdir -p "d$((i / 100))"
    printf '%s\n' "$i" {1..400} >"d$(((i - 1) / 100))/$i.txt" || return
  done
  git add -A && git -c user.name=ci -c user.email=ci@example.com commit -q -m first
}

# installed: the scripts as an administrator installs them, with a configuration of their own.
installed() {
  mkdir "$top/conf" "$top/tmp"
  cp -r "$root/examples/ci" "$top/ci"
  sed -i "s|^config=.*|config=$top/conf|" "$top/ci/pando-ci"
  printf '%s\n' 'golden acme/* app' "pando $PANDO" "pool $pool" "mounts $top/mnt" "workspaces $top/_work" \
    'user nobody' >"$top/conf/root.conf"
  chmod 755 "$top"
}

# --- one job each: until its first step could begin, and its end ---

github_start() { # JOB
  mkdir -p "$top/_work/app/app"
  github job-started "$1"
}
github_end() { github job-completed "$1"; }
github() { # HOOK JOB: the runner starts it in the workspace
  env -i -C "$top/_work/app/app" PATH="$PATH" HOME="$top" GITHUB_ACTIONS=true RUNNER_NAME=runner-1 \
    GITHUB_WORKSPACE="$top/_work/app/app" \
    GITHUB_ENV="$top/tmp/env" GITHUB_REPOSITORY=acme/app GITHUB_RUN_ID="$2" GITHUB_RUN_ATTEMPT=1 GITHUB_JOB=build \
    bash -e "$top/ci/github/$1.sh" >/dev/null
}

gitlab_start() { gitlab "$1" config >/dev/null && gitlab "$1" prepare >/dev/null; }
gitlab_end() { gitlab "$1" cleanup; }
gitlab() { # JOB STAGE
  mkdir -p "$top/tmp/$1"
  env -i PATH="$PATH" TMPDIR="$top/tmp/$1" BUILD_FAILURE_EXIT_CODE=1 SYSTEM_FAILURE_EXIT_CODE=2 \
    CUSTOM_ENV_CI_JOB_ID="$1" CUSTOM_ENV_CI_PROJECT_PATH=acme/app "$top/ci/gitlab/$2"
}

buildkite_start() { buildkite pre-checkout "$1"; }
buildkite_end() { buildkite pre-exit "$1"; }
buildkite() { # HOOK JOB: the agent sources it
  # shellcheck disable=SC2016 # for the shell in it
  env -i PATH="$PATH" BUILDKITE_AGENT_NAME=agent-1 BUILDKITE_JOB_ID="$2" BUILDKITE_ORGANIZATION_SLUG=acme \
    BUILDKITE_PIPELINE_SLUG=app BUILDKITE_PULL_REQUEST=false bash -c '. "$1"' bash "$top/ci/buildkite/$1" >/dev/null
}

shell_start() {
  local assignments
  assignments=$(pando clone app "job-$1" --mount --ttl 6h --shell) && eval "$assignments"
}
shell_end() { pando destroy "job-$1" -q >/dev/null; }

git_start() { git clone -q --no-local "$top/app.git" "$scratch/git-$1"; }
git_end() { rm -rf "$scratch/git-$1"; }
cp_start() { cp -a "$top/app.git" "$scratch/cp-$1"; }
cp_end() { rm -rf "$scratch/cp-$1"; }

# row LABEL WAY: the median of the start and of the end of some jobs, one after the other.
row() {
  local i starts=() ends=()
  for ((i = 1; i <= jobs; i++)); do
    wait_for "$2_start" "$i" || die "$1: a job could not begin"
    starts+=("$took")
    wait_for "$2_end" "$i" || die "$1: a job could not end"
    ends+=("$took")
  done
  printf '   %-34s %8.0f ms %8.0f ms\n' "$1" "$(median "${starts[@]}")" "$(median "${ends[@]}")"
}
median() {
  printf '%s\n' "$@" | sort -n |
    awk '{ t[NR] = $1 } END { print (t[int((NR + 1) / 2)] + t[int(NR / 2) + 1]) / 2000 }'
}

example() {
  temp_pool "$CI_DIR"
  scratch=$pool/data/scratch
  pando init -q >/dev/null
  installed

  say "1. A golden of a repository with $CI_FILES files"
  wait_for repository "$top/app.git" || die 'there is no repository'
  run pando golden import app "$top/app.git"
  mkdir "$scratch"

  say "2. What a job waits for, median of $jobs"
  printf '   %-34s %11s %11s\n' '' begin end
  row 'GitHub: job started, completed' github
  row 'GitLab: config, prepare, cleanup' gitlab
  row 'Buildkite: pre-checkout, pre-exit' buildkite
  row 'shell: pando clone, pando destroy' shell
  row 'git clone --no-local; rm -rf' git
  row 'cp -a; rm -rf' cp

  [ -z "$(pando ls -q)" ] || die "volumes are left: $(pando ls -q)"
  finished=1
}

example
