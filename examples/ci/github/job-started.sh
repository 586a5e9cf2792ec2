#!/bin/bash
# ACTIONS_RUNNER_HOOK_JOB_STARTED of a self-hosted runner: mounts a clone at the job's workspace, before its first step.
# The runner executes `bash -e FILE` in the workspace and fails the job if that fails.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
cd /

# As root there is no sudo, and nothing of the job's environment may pass for it.
pando_ci() {
  if [ "$(id -u)" -eq 0 ]; then env -i "$here/pando-ci" "$@"; else sudo -n "$here/pando-ci" "$@"; fi
}

# All jobs of a matrix have the same GITHUB_JOB, but a runner has only one job at a time.
if ! given=$(pando_ci clone --runner "$RUNNER_NAME" --job "$GITHUB_RUN_ID.$GITHUB_RUN_ATTEMPT.$GITHUB_JOB" \
  --repository "$GITHUB_REPOSITORY" --at "$GITHUB_WORKSPACE"); then
  echo '::error title=Pando::the job got no clone for its workspace; the log of this step says why'
  exit 1
fi

# The steps of the job see these variables.
printf '%s\n' "$given" >>"$GITHUB_ENV"
printf 'The workspace is a clone of its own:\n%s\n' "$given"
