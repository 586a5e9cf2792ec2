# For sourcing: a pool in a new temporary directory, which is gone afterwards,
# however the script ends. The script sets $me (its name in messages), calls
# become_root and temp_pool DIR, runs everything that takes long by wait_for, and
# sets $finished at its end.
# shellcheck shell=bash
set -euo pipefail
export LC_ALL=C
unset PANDO_POOL

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
: "${me:?}" "${PANDO:=$root/bin/pando}"
top='' pool=''

die() {
  printf '%s: %s\n' "$me" "$*" >&2
  exit 1
}

[ -x "$PANDO" ] || die "there is no $PANDO: run \`make build\` first"
PANDO=$(cd "$(dirname "$PANDO")" && pwd)/$(basename "$PANDO")

# become_root VARIABLE... -- ARGUMENT...: if this is not root, starts the script
# again by sudo, with these variables and arguments.
become_root() {
  [ "$(id -u)" -ne 0 ] || return 0
  local keep=(PANDO="$PANDO" NO_COLOR="${NO_COLOR:-}")
  while [ $# -gt 0 ] && [ "$1" != -- ]; do
    keep+=("$1=${!1}")
    shift
  done
  type -P sudo >/dev/null || die 'mounting needs root, and there is no sudo: run it as root'
  sudo -n true 2>/dev/null || [ -t 0 ] || die 'mounting needs root, and sudo wants a password that nobody can type here: run it as root'
  echo "$me: mounting needs root: going on with sudo"
  exec sudo env "${keep[@]}" bash "$0" "${@:2}"
}

# temp_pool DIR: makes a directory for a pool in DIR, or in the directory for
# temporary files. Nothing is in it yet but what PATH needs to find pando.
temp_pool() {
  local base=$1
  if [ -z "$base" ]; then
    base=${TMPDIR:-/tmp}
    # Not on a tmpfs: that would be a test of memory.
    [ "$(findmnt -n -o FSTYPE -T "$base")" != tmpfs ] || base=/var/tmp
  fi
  [ -d "$base" ] || die "$base is no directory"
  top=$(cd "$base" && pwd -P)/pando-$me.$(od -An -N8 -tx8 /dev/urandom | tr -d ' ')
  pool=$top/pool
  [ ! -e "$top" ] || die "$top is there already"
  exec 3>&1 4>&2
  trap 'clean_up $?' EXIT
  trap 'clean_up 129' HUP
  trap 'clean_up 130' INT
  trap 'clean_up 141' PIPE
  trap 'clean_up 143' TERM
  mkdir -m 700 "$top"
  mkdir "$top/bin"
  ln -s "$PANDO" "$top/bin/pando"
  export PATH=$top/bin:$PATH:/usr/sbin:/sbin PANDO_POOL=$pool
}

# wait_for runs a program, or a function, in a process group of its own and waits
# for it: so a signal ends the script at once, and not when the program is done.
# $took is how long that was.
took=0 # microseconds
wait_for() {
  local start=${EPOCHREALTIME/./} status=0
  set -m
  "$@" </dev/null 3>&- 4>&- &
  set +m
  wait $! || status=$?
  # shellcheck disable=SC2034 # for the script
  took=$((${EPOCHREALTIME/./} - start))
  return "$status"
}

# --- leaving nothing behind ---

cleaning='' # it has begun
finished='' # the script went to its end

leftovers() {
  losetup -a | grep -F "$top/" || true
  grep -F "$top" /proc/self/mountinfo || true
  [ ! -e "$top" ] || printf '%s\n' "$top"
}

# In a session of their own, so that an impatient second Ctrl-C does not stop the
# cleaning up.
quietly() { setsid -w "$@" </dev/null >/dev/null 2>&1; }

remove_pool() {
  # No pool and no removal of one begun: init had only made files.
  if [ ! -e "$pool/pool.json" ] && [ ! -e "$pool/deinit.inprogress" ]; then
    return 0
  fi
  # What the script has put beside the driver's objects.
  [ ! -d "$pool/data/scratch" ] || quietly rm -rf --one-file-system "$pool/data/scratch"
  for _ in 1 2 3 4 5 6; do
    ! quietly pando deinit --force --lose-keys --pool "$pool" || return 0
    sleep 0.5
  done
  echo "$me: the pool could not be removed:" >&2
  setsid -w pando deinit --force --lose-keys --pool "$pool" </dev/null >&2
}

# stop_programs ends what wait_for has started: whole process groups.
stop_programs() {
  local group
  for group in $(jobs -p); do
    kill -TERM -- "-$group" 2>/dev/null || continue
    for _ in {1..100}; do
      kill -0 -- "-$group" 2>/dev/null || continue 2
      sleep 0.1
    done
    kill -KILL -- "-$group" 2>/dev/null || true
  done
  wait
}

# on_exit runs when all programs have ended: a script may define it anew.
on_exit() { :; }

# clean_up STATUS: more signals do not disturb it, not even one that bash has
# already noted down, to be handled in the next subshell.
clean_up() {
  [ -z "$cleaning" ] || return 0
  cleaning=1
  trap '' HUP INT PIPE TERM
  trap - EXIT
  set +e
  exec >&3 2>&4 3>&- 4>&- # the signal may have come while they led to a file
  local status=$1 left
  if [ -z "$finished" ]; then
    printf '\n%s: %s: cleaning up\n' "$me" "$([ "$status" -gt 128 ] && echo interrupted || echo failed)" >&2 || true
  fi
  stop_programs 2>/dev/null
  on_exit
  if remove_pool; then
    quietly rm -rf --one-file-system "$top" || true
  fi
  left=$(leftovers)
  if [ -n "$left" ]; then
    printf '%s: left behind:\n%s\n' "$me" "$left" >&2
    exit 1
  fi
  echo 'Left behind: nothing (no file, no mount, no loop device).' 2>/dev/null || true
  exit "$status"
}
