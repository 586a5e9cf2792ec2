# For sourcing: what the stages of the GitLab driver have in common. The runner executes them as root.
# shellcheck shell=bash
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export PATH
cd /

# Any other exit code is "unknown" to the runner. After this one it tries again where that makes sense.
failed=${SYSTEM_FAILURE_EXIT_CODE:-2}
die() {
  printf 'pando: %s\n' "$*" >&2
  exit "$failed"
}
[ "$(id -u)" -eq 0 ] ||
  die 'gitlab-runner must run as root for this driver: jobs run as the user of /etc/pando/ci/root.conf'

# setting NAME: of root.conf.
config=$(sed -n 's/^config=//p' "$here/pando-ci" | head -n 1)
setting() { sed -n "s/^$1[[:space:]][[:space:]]*//p" "$config/root.conf" | head -n 1; }

mounts=$(setting mounts)
mounts=${mounts:-/run/pando-ci}

# The runner gives all stages of one attempt the same directory, which jobs cannot reach and their variables cannot
# change: the runner puts CUSTOM_ENV_ before the names of those.
name_file=$TMPDIR/pando-job

# read_job: sets $job, the name that the config stage has chosen for this attempt, and $at, where its clone is.
read_job() {
  [ -f "$name_file" ] || die 'the config stage did not run: set config_exec'
  job=$(<"$name_file")
  # shellcheck disable=SC2034 # for the stages
  at=$mounts/gitlab-$job
}

# trusted PATH FALLBACK: what GitLab says, from the job's description. A job can change its CUSTOM_ENV_ variables, and
# only runners before 14.1 have nothing else.
trusted() {
  if [ -z "${JOB_RESPONSE_FILE:-}" ]; then
    printf '%s\n' "$2"
    return
  fi
  type -P jq >/dev/null || die 'jq is missing: install it, for example with apt-get install jq'
  jq -er "$1" "$JOB_RESPONSE_FILE"
}

job_id() { trusted '.id' "${CUSTOM_ENV_CI_JOB_ID:-}"; }

# repository: GROUP/PROJECT of https://user:token@host/GROUP/PROJECT.git
repository() {
  trusted '.git_info.repo_url | sub("^[a-z+]+://[^/]+/"; "") | sub("\\.git$"; "")' "${CUSTOM_ENV_CI_PROJECT_PATH:-}"
}

pando_ci() { env -i "$here/pando-ci" "$@"; }
