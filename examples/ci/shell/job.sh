#!/bin/bash
# A job of Jenkins, cron or a shell, as root, in a clone of its own that is destroyed when the job ends:
#
#   job.sh GOLDEN COMMAND [ARGUMENT...]
#
# The exit status is that of the command. After SIGKILL, the time limit is the net.
set -euo pipefail
golden=$1
shift

# Jenkins names builds after folders and branches: only what names of volumes can have, and a number of its own.
tag=${BUILD_TAG:-manual}
tag=${tag//[^A-Za-z0-9]/-}
job=job-${tag:0:80}-$(od -An -N4 -tx1 /dev/urandom | tr -d ' \n')

# destroy_clone: processes that end at this moment get some seconds.
destroy_clone() {
  cd /
  local i
  for ((i = 0; i < 20; i++)); do
    pando destroy "$job" -q >/dev/null 2>&1 && return
    [ -n "$(pando ls -q --filter "name=$job")" ] || return 0 # it was never made
    sleep 0.5
  done
  pando destroy "$job" -q
}
# The trap is first: a signal can come while pando makes the clone.
trap destroy_clone EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

assignments=$(pando clone "$golden" "$job" --mount --ttl 6h --shell)
eval "$assignments"
cd "$PANDO_MOUNT"

# In a process group of its own, so that a signal ends the job at once, with all of it.
set -m
"$@" &
child=$!
set +m
trap 'kill -- "-$child" 2>/dev/null; exit 143' TERM HUP
trap 'kill -- "-$child" 2>/dev/null; exit 130' INT
wait "$child"
