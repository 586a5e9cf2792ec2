# For sourcing, after temp-pool.sh: what the examples print, and how they measure.
# shellcheck shell=bash

# need_numbers VARIABLE...: each is a number of at least 1.
need_numbers() {
  local name
  for name; do [[ ${!name} =~ ^[1-9][0-9]{0,5}$ ]] || die "$name=${!name} is no number from 1 to 999999"; done
}

say() { printf '\n%s\n' "$*"; }

run() { # shows a command, and runs it
  local word
  printf '   $'
  for word; do
    case $word in *[\*\ ]*) printf " '%s'" "$word" ;; *) printf ' %s' "$word" ;; esac
  done
  printf '\n'
  "$@" 2>&1 | sed 's/^/   /'
}

used() { # bytes in use in the pool, all written, and what was destroyed freed: XFS does that in the background
  local now before=''
  while sync -f "$pool/data" &&
    now=$(df -B1 --output=used "$pool/data" | tail -n 1 | tr -d ' ') && [ "$now" != "$before" ]; do
    before=$now
    sleep 0.5
  done
  echo "$now"
}

heading() { printf '   %-26s %8s %11s %11s %16s\n' '' branches all each 'bytes each'; }

# measured LABEL WAY COUNT ARGUMENT...: makes COUNT of them by the function WAY, and prints a row.
measured() {
  local before
  before=$(used)
  wait_for "$2" "${@:3}" || die "$1: it failed"
  awk -v label="$1" -v n="$3" -v us="$took" -v bytes=$(($(used) - before)) '
    BEGIN { printf "   %-26s %8d %9.2f s %9.2f s %12.1f MiB\n", label, n, us / 1e6, us / n / 1e6, bytes / n / 1048576 }'
}
