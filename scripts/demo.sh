#!/usr/bin/env bash
# Shows Pando's main job on real input, beside the same job done by cp:
#   scripts/demo.sh
#
#   DEMO_SOURCE=DIR   the tree to import (default: the Go distribution)
#   DEMO_DIR=DIR      where to work (default: a temporary directory)
#   DEMO_QUICK=1      a short one, with fewer clones of a smaller tree
#   PANDO=FILE        the program (default: bin/pando)
#
# It works in one new directory and leaves nothing behind, even when it is
# interrupted.
set -euo pipefail
me=demo
# shellcheck source=scripts/temp-pool.sh
source "$(dirname "${BASH_SOURCE[0]}")/temp-pool.sh"

: "${DEMO_DIR:=}" "${DEMO_QUICK:=}" "${DEMO_SOURCE:=}"
if [ -z "$DEMO_SOURCE" ]; then
  # Distributions split it up: take the part that holds the sources.
  src=$(cd "$root" && readlink -e "$(scripts/go.sh go env GOROOT)/src") || src=''
  [ -n "$src" ] || die 'no Go distribution to import: set DEMO_SOURCE=DIR'
  DEMO_SOURCE=$(dirname "$src")
  [ -z "$DEMO_QUICK" ] || DEMO_SOURCE=$src/runtime
fi
[ -d "$DEMO_SOURCE" ] || die "DEMO_SOURCE=$DEMO_SOURCE is no directory"
DEMO_SOURCE=$(cd "$DEMO_SOURCE" && pwd -P)
become_root DEMO_DIR DEMO_QUICK DEMO_SOURCE

# --- showing ---

bold='' plain='' dim=''
if [ -t 1 ] && [ -z "${NO_COLOR:-}" ]; then
  bold=$'\e[1m' plain=$'\e[0m' dim=$'\e[2m'
fi
step_number=0
step() {
  step_number=$((step_number + 1))
  printf '\n%s%d. %s%s\n' "$bold" "$step_number" "$*" "$plain"
}
say() { printf '   %s\n' "$*"; }

show_command() {
  local word out=''
  for word; do
    case $word in
      *[\*\?\ ]*) out+=" '$word'" ;;
      *) out+=" $word" ;;
    esac
  done
  printf '   %s$%s%s\n' "$dim" "$plain$bold" "$out$plain"
}

# run shows a command, runs it, and shows what it prints: of many lines some.
run() {
  local status=0 n
  show_command "$@"
  wait_for "$@" >"$top/out" 2>"$top/err" || status=$?
  sed 's/^/   /' "$top/err"
  n=$(wc -l <"$top/out")
  if [ "$n" -gt 16 ]; then
    sed -n '1,3s/^/   /p' "$top/out"
    printf '   ... %d more ...\n' $((n - 4))
    sed -n '$s/^/   /p' "$top/out"
  else
    sed 's/^/   /' "$top/out"
  fi
  [ "$status" -eq 0 ] || die "that failed (exit code $status)"
}

# How awk writes times (given in microseconds) and sizes (in bytes).
units='
function seconds(us,  s) { s = us / 1e6; return sprintf(s < 0.1 ? "%.3f s" : s < 10 ? "%.2f s" : s < 100 ? "%.1f s" : "%.0f s", s) }
function bytes(n,  i) { for (i = 1; n >= 1023.95 && i < 5; i++) n /= 1024; return sprintf(i > 1 ? "%.1f %s" : "%d %s", n, substr("B  KiBMiBGiBTiB", 3 * i - 2, 3)) }
'
seconds() { awk -v us="$1" "$units"' BEGIN { print seconds(us) }'; }
# table CLONES, then time, space and time to remove of one copy by cp and of one by
# reflinks, then time of one clone and of all, space of one, and time to destroy all.
table() {
  awk -v args="$*" "$units"'
    function row(what, one, all, space, removing) { printf "   %-24s %10s %14s %14s %14s\n", what, one, all, space, removing }
    BEGIN {
      split(args, a, " "); n = a[1]
      row("", "one copy", n " copies", "space each", "removing " n)
      row("cp -a", seconds(a[2]), seconds(a[2] * n) " *", bytes(a[3]), seconds(a[4] * n) " *")
      row("cp -a --reflink=always", seconds(a[5]), seconds(a[5] * n) " *", bytes(a[6]), seconds(a[7] * n) " *")
      row("pando clone --mount", seconds(a[8]), seconds(a[9]), bytes(a[10]), seconds(a[11]))
    }'
}

# digest TREE: one checksum over names, types, owners, modes, times (ns), links
# and contents of everything in it.
digest() {
  (cd "$1" && {
    find . -mindepth 1 \( -type f -printf '%p %y %m %U:%G %T@ %s\n' \) -o -printf '%p %y %m %U:%G %T@ %l\n' | sort
    # Which names inside are the same file: each with the first of them.
    find . -type f -printf '%i %p\n' | sort -k 2 |
      awk '{ i = $1; sub(/^[0-9]+ /, ""); if (!(i in first)) first[i] = $0; print first[i], $0 }'
    find . -type f -print0 | sort -z | xargs -0 -r sha256sum
  } | sha256sum | cut -c1-16)
}
# digest_of NAME TREE: prints it, and keeps it in the variable NAME.
digest_of() {
  wait_for digest "$2" >"$top/digest"
  printf -v "$1" '%s' "$(cat "$top/digest")"
}

used() { # bytes in use in the pool, all written
  sync -f "$pool/data"
  df -B1 --output=used "$pool/data" | tail -n 1 | tr -d ' '
}

# --- the demo ---

copy() { cp -a "$@" && sync -f "${!#}"; }
remove() { rm -rf "$1" && sync -f "$(dirname "$1")"; }

# All in one function, so that bash has read all of it before a signal can come.
demo() {
  clones=100
  [ -z "$DEMO_QUICK" ] || clones=20
  temp_pool "$DEMO_DIR"
  case $top in
    "${DEMO_SOURCE%/}"/*) die "the demo would work inside of what it imports: set DEMO_DIR to a directory outside $DEMO_SOURCE" ;;
  esac
  began=${EPOCHREALTIME/./}
  want='' have=''

  files=$(find "$DEMO_SOURCE" | wc -l)
  printf '%sPando: instant copy-on-write volumes%s\n' "$bold" "$plain"
  say "source: $DEMO_SOURCE, $files files and directories"
  say "host:   Linux $(uname -r), $(nproc) CPUs, $top is on $(findmnt -n -o FSTYPE -T "$top")"

  step 'Create a pool with the best driver for this host'
  run pando init

  step 'Import the tree once, as a golden'
  run pando golden import go "$DEMO_SOURCE"
  import_took=$took
  say "in $(seconds "$import_took")"
  run pando golden ls

  step "Clone it $clones times"
  run pando clone go agent --count "$clones"
  say "$clones private, writable volumes in $(seconds "$took")"

  step 'Mount some of them, and change files in two'
  for i in 1 2 3; do
    run pando mount "agent-$i"
  done
  mnt=$pool/mnt
  victim=$(cd "$mnt/agent-1" && find . -type f -size +0 | sort | sed -n 1p)
  victim=${victim#./}
  [ -n "$victim" ] || die 'the source holds no file with something in it'
  big=$(cd "$mnt/agent-2" && find . -mindepth 1 -maxdepth 1 -type d | sort | tail -n 1)
  big=${big#./}
  say "agent-1: appends to $victim, writes 8 MiB of new data"
  echo 'agent-1 was here' >>"$mnt/agent-1/$victim"
  wait_for dd if=/dev/urandom of="$mnt/agent-1/demo.data" bs=1M count=8 status=none
  if [ -n "$big" ]; then
    say "agent-2: deletes all of $big/"
    wait_for rm -rf "$mnt/agent-2/$big"
  else
    say "agent-2: deletes $victim"
    rm "$mnt/agent-2/$victim"
  fi

  step 'Golden and neighbours are untouched: checksums over names, modes, times and contents'
  run pando clone go check --mount
  digest_of want "$DEMO_SOURCE"
  say "$want  the source"
  for v in check agent-3; do
    digest_of have "$mnt/$v"
    case $v in
      check) what='a fresh clone of the golden' ;;
      *) what="$v, a neighbour" ;;
    esac
    [ "$have" = "$want" ] || die "$what has $have: it should be as the source"
    say "$have  $what: the same"
  done
  ! cmp -s "$mnt/check/$victim" "$mnt/agent-1/$victim" || die "agent-1 lost its change to $victim"
  [ -s "$mnt/agent-1/demo.data" ] || die 'agent-1 lost demo.data'
  [ ! -e "$mnt/check/demo.data" ] || die 'the golden has agent-1'"'"'s demo.data'
  [ -z "$big" ] || [ ! -e "$mnt/agent-2/$big" ] || die "agent-2 has $big again"
  say 'and agent-1 and agent-2 have their own changes'

  step 'What is shared, and what is not'
  run pando show agent-1
  run pando umount agent-1
  run pando umount agent-2
  run pando ls
  run pando show

  step 'Destroy everything'
  run pando destroy 'agent-*' check -q
  say "$((clones + 1)) volumes in $(seconds "$took")"

  step "The same job with cp, on the pool's own filesystem"
  say 'One copy each. Times include waiting until it is on the disk, as a clone does.'
  cp_dir=$pool/data/scratch
  mkdir "$cp_dir"
  before=$(used)
  show_command cp -a "$DEMO_SOURCE" copy
  wait_for copy "$DEMO_SOURCE" "$cp_dir/copy"
  cp_took=$took cp_used=$(($(used) - before))
  before=$(used)
  show_command cp -a --reflink=always copy reflinks
  wait_for copy --reflink=always "$cp_dir/copy" "$cp_dir/reflinks"
  reflink_took=$took reflink_used=$(($(used) - before))
  show_command rm -rf reflinks copy
  wait_for remove "$cp_dir/reflinks"
  reflink_rm_took=$took
  wait_for remove "$cp_dir/copy"
  cp_rm_took=$took
  rmdir "$cp_dir"

  say 'And with Pando: one, and all of them, mounted.'
  run pando clone go job --mount -q
  one_took=$took
  run pando destroy job -q
  before=$(used)
  run pando clone go job --count "$clones" --mount -q
  all_took=$took all_used=$((($(used) - before) / clones))
  run pando destroy 'job-*' -q
  destroy_took=$took

  echo
  table "$clones" "$cp_took" "$cp_used" "$cp_rm_took" "$reflink_took" "$reflink_used" "$reflink_rm_took" \
    "$one_took" "$all_took" "$all_used" "$destroy_took"
  say "* estimated: $clones times one, measured. What pando did was all done. Before that it imported the tree, once: $(seconds "$import_took")."

  step 'Remove the pool'
  run pando golden rm go
  run pando deinit
  finished=1
  printf '\nThe whole demo took %s.\n' "$(seconds $((${EPOCHREALTIME/./} - began)))"
}

demo
