#!/usr/bin/env bash
# Twenty branches of a running PostgreSQL, each with a server of its own:
#   examples/postgres-branch/run.sh
#
#   BRANCH_SCALE=N    pgbench's scale: N times 15 MB (default: 70, about 1 GB)
#   BRANCH_COUNT=N    how many branches (default: 20)
#   BRANCH_USER=NAME  who runs the servers (default: postgres)
#   BRANCH_DIR=DIR    where to work (default: a temporary directory)
#   PANDO=FILE        the program (default: bin/pando)
#
# It works in one new directory and leaves nothing behind, even when it is
# interrupted. It needs PostgreSQL's programs, and no running server.
set -euo pipefail
me=postgres-branch
# shellcheck source=scripts/temp-pool.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/temp-pool.sh"
# shellcheck source=scripts/temp-postgres.sh
source "$root/scripts/temp-postgres.sh"
# shellcheck source=scripts/figures.sh
source "$root/scripts/figures.sh"

: "${BRANCH_DIR:=}" "${BRANCH_SCALE:=70}" "${BRANCH_COUNT:=20}" "${BRANCH_USER:=postgres}"
need_numbers BRANCH_SCALE BRANCH_COUNT
become_root BRANCH_DIR BRANCH_SCALE BRANCH_COUNT BRANCH_USER
find_postgres "$BRANCH_USER"
copies=2 # of the ways that copy everything: more would only take longer

on_exit() {
  end_servers
  ! mountpoint -q "$top/copies" || umount "$top/copies"
}

production() {
  start_server prod "$top/prod/data" max_wal_size=4GB
  wait_server prod
}

older() {
  start_server older "$top/older/data"
  wait_server older |& sed 's/^/   /'
}

# written N: pgbench has committed N transactions.
written() {
  until [ "$(sql prod 'select count(*) from pgbench_history')" -ge "$1" ]; do sleep 0.1; done
}

# --- three ways to a database of one's own ---

cloned() { # COUNT GOLDEN: clone it, and start a server on each clone
  local i
  pando clone "$2" branch --count "$1" --mount "$top/b" -q >/dev/null || return
  for ((i = 1; i <= $1; i++)); do start_server "branch-$i" "$top/b/branch-$i/data"; done
  for ((i = 1; i <= $1; i++)); do wait_server "branch-$i" && answer "branch-$i" || return; done
}

copied() { # COUNT: copy the directory by PostgreSQL's own program, and start a server on each copy
  local i data
  for ((i = 1; i <= $1; i++)); do
    data=$top/copies/branch-$i
    as_user pg_basebackup -h "$servers/prod" -D "$data" --checkpoint=fast || return
    start_server "branch-$i" "$data"
    wait_server "branch-$i" && answer "branch-$i" || return
  done
}

templated() { # COUNT: copy the database in the server itself, while nobody else is connected to it
  local i
  for ((i = 1; i <= $1; i++)); do
    sql prod "create database branch_$i template shop" postgres && rows prod "branch_$i" || return
  done
}

# answer NAME: its server takes a row, which none of the others has.
answer() {
  sql "$1" "insert into pgbench_history (tid, bid, aid, delta) values (-1, -1, -1, 1)" || return
  [ "$(sql "$1" 'select count(*) from pgbench_history where tid = -1')" = 1 ] || die "$1 has the rows of another branch"
  rows "$1" shop
}

rows() { # SERVER DATABASE
  [ "$(sql "$1" 'select count(*) from pgbench_branches' "$2")" = "$BRANCH_SCALE" ] || die "rows are missing in $2 of $1"
}

# --- the branches of a golden ---

# checked: pg_amcheck reads all tables and indexes of all branches, two at a time.
checked() {
  seq "$BRANCH_COUNT" | as_user xargs -P 2 -I {} pg_amcheck -h "$servers/branch-{}" -d shop --install-missing \
    >"$top/amcheck" 2>&1 ||
    { tail -n 5 "$top/amcheck" >&2; die 'pg_amcheck finds damage'; }
}

# branches GOLDEN: makes them, checks them, and removes them.
branches() {
  local i names=()
  for ((i = 1; i <= BRANCH_COUNT; i++)); do names+=("branch-$i"); done
  measured "pando clone $1" cloned "$BRANCH_COUNT" "$1"

  wait_for checked || exit
  stop_servers "${names[@]}"
  pando destroy 'branch-*' -q >/dev/null
}

# --- the example ---

example() {
  temp_pool "$BRANCH_DIR"
  postgres_dirs
  pando init >/dev/null
  scratch=$pool/data/scratch

  say "1. A PostgreSQL in a volume, with pgbench's tables at scale $BRANCH_SCALE"
  mkdir "$top/empty" "$top/b"
  pando golden import empty "$top/empty" -q >/dev/null
  pando clone empty prod --mount "$top/prod" -q >/dev/null
  install -d -m 700 -o "$db_user" "$top/prod/data"
  as_user initdb -D "$top/prod/data" -A trust --data-checksums >/dev/null
  wait_for production || exit
  sql prod 'create database shop' postgres
  wait_for as_user pgbench -h "$servers/prod" -i -q -s "$BRANCH_SCALE" shop >"$top/pgbench" 2>&1 ||
    die "$(tail -n 3 "$top/pgbench")"
  sql prod checkpoint
  echo "   $(sql prod 'select pg_size_pretty(pg_database_size(current_database()))')"

  say '2. Goldens of it while pgbench writes: at any moment, and after a checkpoint'
  set -m
  become_user pgbench -h "$servers/prod" -n -c 2 -T 3600 shop </dev/null >/dev/null 2>&1 3>&- 4>&- &
  set +m
  load=$!
  wait_for written $((200 * BRANCH_SCALE))
  run pando golden publish shop prod
  run sql prod checkpoint
  run pando golden publish shop prod
  kill $load
  wait $load || true # it was killed
  sql prod checkpoint # so that it writes nothing while the others are measured

  say '3. Until a server answers in each'
  heading
  branches shop@1
  branches shop@2
  install -d -o "$db_user" "$scratch" # on the pool's filesystem, so that the bytes can be compared
  mkdir "$top/copies"
  mount --bind "$scratch" "$top/copies"
  measured pg_basebackup copied $copies
  measured 'CREATE DATABASE TEMPLATE' templated $copies
  echo "   pg_amcheck finds no damage in $((2 * BRANCH_COUNT)) of $((2 * BRANCH_COUNT)) branches"

  say '4. A branch that PostgreSQL does not accept, because an older one seems to have made it'
  run pando clone shop@2 older --mount "$top/older"
  echo 9.6 >"$top/older/data/PG_VERSION"
  ! wait_for older || die 'PostgreSQL accepts it'
  run pando destroy older
  finished=1
}

example
