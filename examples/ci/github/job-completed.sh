#!/bin/bash
# ACTIONS_RUNNER_HOOK_JOB_COMPLETED of a self-hosted runner: destroys the clone of the job, also after a failure or a
# cancellation. The runner executes `bash -e FILE` in the workspace, which is the clone.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# Steps of the job may have put directories of their own before it (GITHUB_PATH).
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
cd /

pando_ci() {
  if [ "$(id -u)" -eq 0 ]; then env -i "$here/pando-ci" "$@"; else sudo -n "$here/pando-ci" "$@"; fi
}

status=0
pando_ci destroy --runner "$RUNNER_NAME" || status=$?
case $status in
  0) ;;
  # The runner ends such processes right after this hook, and the next job of this runner destroys the clone first.
  5) echo '::warning title=Pando::processes of the job still use its clone; it is destroyed later' ;;
  *)
    echo '::error title=Pando::the clone of the job was not destroyed; the log of this step says why'
    exit "$status"
    ;;
esac
