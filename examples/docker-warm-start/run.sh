#!/usr/bin/env bash
# Five Docker engines at once, each with warm images of its own:
#   examples/docker-warm-start/run.sh
#
#   WARM_SOURCE=DIR   the files in the large image (default: the Go distribution)
#   WARM_ENGINES=N    how many engines (default: 5)
#   WARM_DIR=DIR      where to work (default: a temporary directory)
#   PANDO=FILE        the program (default: bin/pando)
#
# It works in one new directory and leaves nothing behind, even when it is
# interrupted. It needs dockerd and docker, and neither a network nor a running engine.
set -euo pipefail
me=docker-warm-start
# shellcheck source=scripts/temp-pool.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/temp-pool.sh"
# shellcheck source=scripts/figures.sh
source "$root/scripts/figures.sh"

: "${WARM_DIR:=}" "${WARM_SOURCE:=}" "${WARM_ENGINES:=5}"
if [ -z "$WARM_SOURCE" ]; then
  WARM_SOURCE=$(cd "$root" && scripts/go.sh go env GOROOT) || die 'no Go distribution for the image: set WARM_SOURCE=DIR'
fi
[ -d "$WARM_SOURCE" ] || die "WARM_SOURCE=$WARM_SOURCE is not a directory"
need_numbers WARM_ENGINES
become_root WARM_DIR WARM_SOURCE WARM_ENGINES
export PATH=$PATH:/usr/sbin:/sbin
for p in dockerd docker unshare; do
  type -P $p >/dev/null || die "there is no $p: install Docker, for example with \`apt-get install docker.io\`"
done

# --- engines ---

# engine NAME DATA: starts a dockerd on the directory DATA and waits until it answers.
# Its namespaces take along everything that it has started, when it ends or is killed.
# It gets a /run/containerd of its own, because a dockerd that sees the host's
# containerd there would use it. What it keeps while it runs is there, too: the path
# of a socket in $top could be too long. So are the temporary files of its containerd,
# which writes its stacks when it is slow to answer, and leaves them.
engine() {
  local dir=$top/e/$1 pid
  mkdir -p "$dir"
  # In a session it stays in the session's process group, which clean_up ends as a whole: when a signal
  # comes in this very moment, nobody has its PID.
  [ "$BASH_SUBSHELL" -gt 0 ] || set -m
  # shellcheck disable=SC2016 # the inner shell expands it
  unshare --mount --propagation slave --pid --fork --kill-child --mount-proc \
    sh -c 'mkdir -p /run/containerd && mount -t tmpfs none /run/containerd && TMPDIR=/run/containerd exec "$@"' sh \
    dockerd --data-root "$2" --exec-root /run/containerd/docker --pidfile "$dir/pid" --host "unix://$dir/s" \
    --cgroup-parent "$group" --bridge=none --iptables=false \
    </dev/null >"$dir/log" 2>&1 3>&- 4>&- &
  pid=$!
  set +m
  echo $pid >"$dir/unshare"
  for _ in {1..3000}; do
    ! docker_on "$1" version >/dev/null 2>&1 || return 0
    kill -0 $pid 2>/dev/null || break
    sleep 0.02
  done
  tail -n 5 "$dir/log" >&2
  die "the engine $1 did not start"
}

docker_on() { # NAME ARGUMENT...
  docker --host "unix://$top/e/$1/s" "${@:2}"
}

# stop NAME...: as a service manager would, and waits until all have ended.
stop() {
  local name pid
  for name; do
    pkill -TERM -P "$(cat "$top/e/$name/unshare")" || true # its only child is dockerd
  done
  for name; do
    pid=$(cat "$top/e/$name/unshare")
    while kill -0 "$pid" 2>/dev/null; do sleep 0.02; done
  done
}

# answer NAME: a container of the large image reads a file of it.
answer() { docker_on "$1" run --rm --network none tools cat /tree.txt >/dev/null; }

# image NAME FILES...: a tar with the files, a shell and what that needs.
image() {
  local files=$top/image
  rm -rf "$files"
  mkdir -p "$files/bin"
  cp -L "$(type -P sh)" "$(type -P cat)" "$files/bin"
  ldd "$files"/bin/* | grep -o '/[^ ):]*' | sort -u | while read -r f; do
    case $f in "$files"/*) ;; *) install -D "$f" "$files$f" ;; esac
  done
  [ $# -eq 0 ] || cp -a "$1" "$files/tree"
  echo 'warm' >"$files/tree.txt"
  tar -C "$files" -c .
}

# on_exit ends the engines of a run that was interrupted, and removes the control
# groups of its containers, which are empty then.
on_exit() {
  local file pid
  for file in "$top"/e/*/unshare; do
    { read -r pid <"$file" && kill -KILL "$pid"; } 2>/dev/null || continue
    while kill -0 "$pid" 2>/dev/null; do sleep 0.02; done
  done
  find /sys/fs/cgroup -depth -type d -path "*/$group*" -exec rmdir {} + 2>/dev/null
}

# --- three ways to a data-root with images in it ---

cold() { # SESSION: load the images into an empty one
  mkdir -p "$scratch/$1"
  engine "$1" "$scratch/$1"
  docker_on "$1" load -q -i "$top/images.tar" >/dev/null
  answer "$1"
}

copied() { # SESSION: copy one that has them
  cp -a "$top/original" "$scratch/$1"
  engine "$1" "$scratch/$1"
  answer "$1"
}

cloned() { # SESSION: clone a golden
  pando clone images "$1" --mount -q >/dev/null
  engine "$1" "$pool/mnt/$1"
  answer "$1"
}

# at_once WAY: starts all sessions, waits until a container has run in each, stops
# their engines, and sets WAY_took (microseconds) and WAY_bytes (in the pool).
at_once() {
  local i before start pids=() names=()
  before=$(used)
  start=${EPOCHREALTIME/./}
  for ((i = 1; i <= WARM_ENGINES; i++)); do
    set -m # each in a process group of its own, which clean_up ends
    "$1" "$1-$i" </dev/null 3>&- 4>&- &
    set +m
    pids+=($!) names+=("$1-$i")
  done
  for i in "${pids[@]}"; do wait "$i" || die "a session failed ($1)"; done
  printf -v "$1_took" %s $((${EPOCHREALTIME/./} - start))

  stop "${names[@]}"
  for i in "${names[@]}"; do
    [ "$1" != cloned ] || pando umount "$i" >/dev/null
  done
  printf -v "$1_bytes" %s $(($(used) - before))
}

# --- figures ---

units='
function seconds(us,  s) { s = us / 1e6; return sprintf(s < 10 ? "%.2f s" : "%.1f s", s) }
function mib(n) { return sprintf("%.1f MiB", n / 1048576) }
'
table() {
  awk -v n="$WARM_ENGINES" -v args="$*" "$units"'
    function row(what, all, each, space, one) { printf "   %-28s %10s %10s %12s %12s\n", what, all, each, space, one }
    BEGIN {
      split(args, a, " ")
      row("", n " engines", "each", "bytes", "each")
      row("cold: docker load", seconds(a[1]), seconds(a[1] / n), mib(a[2]), mib(a[2] / n))
      row("cp -a of a data-root", seconds(a[3]), seconds(a[3] / n), mib(a[4]), mib(a[4] / n))
      row("pando clone", seconds(a[5]), seconds(a[5] / n), mib(a[6]), mib(a[6] / n))
    }'
}

# medians ENGINE...: prints for each the median time (microseconds) in which it answers. They take turns.
medians() {
  local name i start
  for i in {1..9}; do
    for name; do
      start=${EPOCHREALTIME/./}
      answer "$name"
      echo $((${EPOCHREALTIME/./} - start)) >>"$top/times.$name"
    done
  done
  for name; do sort -n "$top/times.$name" | sed -n 5p; done
}

# --- the example ---

example() {
  local way original clone
  temp_pool "$WARM_DIR"
  group=pando-$(basename "$top")
  scratch=$pool/data/scratch

  say "1. An engine with two images, of which one holds $WARM_SOURCE"
  engine original "$top/original"
  image >"$top/shell.tar"
  image "$WARM_SOURCE" | docker_on original import - tools >/dev/null
  docker_on original import - shell <"$top/shell.tar" >/dev/null
  rm -rf "$top/image"
  docker_on original images | sed 's/^/   /'
  docker_on original save -o "$top/images.tar" tools shell

  say '2. A golden of its data-root. The engine must have stopped'
  pando init >/dev/null
  mkdir "$scratch"
  ! run pando golden import images "$top/original" --preset docker || die 'a running engine should be refused'
  stop original
  run pando golden import images "$top/original" --preset docker

  say "3. $WARM_ENGINES engines at once, until a container has run in each"
  for way in cold copied; do
    at_once $way
    rm -rf --one-file-system "${scratch:?}"/*
  done
  at_once cloned
  # shellcheck disable=SC2154 # at_once sets them
  table "$cold_took" "$cold_bytes" "$copied_took" "$copied_bytes" "$cloned_took" "$cloned_bytes"

  say '4. docker run in a running engine: on the original, and on a clone'
  pando mount cloned-1 >/dev/null
  engine original "$top/original"
  engine cloned-1 "$pool/mnt/cloned-1"
  { read -r original && read -r clone; } < <(medians original cloned-1)
  awk -v a="$original" -v b="$clone" "$units"'
    BEGIN { printf "   original %s, clone %s: %.2fx (medians of 9)\n", seconds(a), seconds(b), b / a }'
  stop original

  say '5. A session makes a better golden: it adds an image, and stops its engine'
  docker_on cloned-1 import - extra <"$top/shell.tar" >/dev/null
  echo yes >"$pool/mnt/cloned-1/build-succeeded"
  ! run pando golden publish images cloned-1 --preset docker || die 'a running engine should be refused'
  stop cloned-1
  run pando golden publish images cloned-1 --preset docker
  pando clone images next --mount -q >/dev/null
  engine next "$pool/mnt/next"
  docker_on next images --format '{{.Repository}}' | sort | sed 's/^/   the next session has: /'
  [ ! -e "$pool/mnt/next/build-succeeded" ] || die 'a marker of a session was cloned'
  stop next

  say '6. Remove all sessions'
  run pando destroy 'cloned-*' next
  finished=1
}

example
