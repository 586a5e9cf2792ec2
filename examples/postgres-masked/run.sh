#!/usr/bin/env bash
# Masked branches of a PostgreSQL, from a replica, refreshed on schedule, and at
# a point in time:
#   examples/postgres-masked/run.sh
#
#   BRANCH_ROUNDS=N   how often to refresh (default: 3)
#   BRANCH_EVERY=SEC  the time between two refreshes (default: 5)
#   BRANCH_USER=NAME  who runs the servers (default: postgres)
#   BRANCH_DIR=DIR    where to work (default: a temporary directory)
#   PANDO=FILE        the program (default: bin/pando)
#
# It works in one new directory and leaves nothing behind, even when it is
# interrupted. It needs PostgreSQL's programs, and no running server.
set -euo pipefail
me=postgres-masked
# shellcheck source=scripts/temp-pool.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/temp-pool.sh"
# shellcheck source=scripts/temp-postgres.sh
source "$root/scripts/temp-postgres.sh"
# shellcheck source=scripts/figures.sh
source "$root/scripts/figures.sh"

: "${BRANCH_DIR:=}" "${BRANCH_ROUNDS:=3}" "${BRANCH_EVERY:=5}" "${BRANCH_USER:=postgres}"
become_root BRANCH_DIR BRANCH_ROUNDS BRANCH_EVERY BRANCH_USER
find_postgres "$BRANCH_USER"
here=$root/examples/postgres-masked
on_exit() { end_servers; }

# --- production ---

# production: a server that archives its log, with customers.
production() {
  as_user initdb -D "$servers/prod-data" -A trust --data-checksums >/dev/null
  as_user mkdir "$servers/archive"
  start_server prod "$servers/prod-data" wal_level=replica archive_mode=on "archive_command=cp %p $servers/archive/%f"
  wait_server prod || return
  sql prod 'create database shop' postgres
  sql prod "create table customers (id int primary key, name text, email text, orders int not null default 0);
    insert into customers select i, 'Real Name ' || i, 'person-' || i || '@private.test'
      from generate_series(1, 20000) i"
}

# replica: a standby that follows it, in a volume.
replica() {
  as_user pg_basebackup -h "$servers/prod" -D "$top/replica/data" -R --checkpoint=fast || return
  start_server replica "$top/replica/data" archive_mode=off
  wait_server replica
}

# caught_up: until the replica has everything that production has.
caught_up() {
  local at
  at=$(sql prod 'select pg_current_wal_lsn()')
  until [ "$(sql replica "select pg_last_wal_replay_lsn() >= '$at'")" = t ]; do sleep 0.05; done
}

# --- what runs on schedule ---

# refresh: a snapshot of the replica, which points in time begin with, and the next generation of the golden `masked`.
refresh() {
  local now
  now=$(date -u +%Y%m%dT%H%M%SZ)
  pando snapshot replica "$now" -q >/dev/null || return
  pando clone "replica@$now" staging --mount "$top/staging" -q >/dev/null || return
  masked staging "$top/staging/data" || return

  # The log has the rows as they were: begin a new one.
  stop_servers staging
  as_user pg_resetwal -D "$top/staging/data" >/dev/null || return
  pando golden publish masked staging --keep 3 || return
  pando destroy staging -q >/dev/null
}

# masked NAME DATA SETTING...: makes a copy of a replica a server of its own, and masks it before anybody else sees it.
masked() {
  local name=$1 data=$2
  rm -f "$data/standby.signal"
  start_server "$name" "$data" primary_conninfo= archive_mode=off "${@:3}"
  wait_server "$name" || return
  until [ "$(sql "$name" 'select pg_is_in_recovery()')" = f ]; do sleep 0.05; done
  as_user psql -h "$servers/$name" -d shop -Xq -v ON_ERROR_STOP=1 <"$here/mask.sql"
}

# at_time TIME NAME: a branch of production as it was at a time, masked: from the last snapshot before it, and the
# archive of the log.
at_time() {
  local snapshot data=$top/$2/data
  snapshot=$(pando show replica --json | grep -o '"replica@[^"]*"' | tr -d '"' | sort -u |
    awk -v at="replica@$(date -u -d "$1" +%Y%m%dT%H%M%SZ)" '$0 < at' | tail -n 1)
  [ -n "$snapshot" ] || die "no snapshot is older than $1"
  pando clone "$snapshot" "$2" --mount "$top/$2" -q >/dev/null || return
  as_user touch "$data/recovery.signal"
  masked "$2" "$data" "restore_command=cp $servers/archive/%f %p" "recovery_target_time=$1" \
    recovery_target_action=promote || return
  echo "   from $snapshot"
}

# --- the example ---

branch() { # NAME DATA
  start_server "$1" "$2"
  wait_server "$1"
}

example() {
  local round point
  temp_pool "$BRANCH_DIR"
  postgres_dirs
  pando init >/dev/null

  say '1. Production, and a replica in a volume'
  wait_for production || exit
  mkdir "$top/empty"
  pando golden import empty "$top/empty" -q >/dev/null
  pando clone empty replica --mount "$top/replica" -q >/dev/null
  install -d -m 700 -o "$db_user" "$top/replica/data"
  wait_for replica || exit
  wait_for caught_up
  echo "   $(sql replica 'select count(*) from customers') customers," \
    "such as $(sql replica 'select email from customers where id = 7')"

  say "2. Every $BRANCH_EVERY s: a snapshot, masked, as the next generation"
  for ((round = 1; round <= BRANCH_ROUNDS; round++)); do
    sql prod "update customers set orders = $round"
    wait_for caught_up
    wait_for refresh | sed 's/^/   /' || exit
    wait_for sleep "$BRANCH_EVERY"
  done

  say '3. A branch of the newest generation'
  run pando clone masked test-1 --mount "$top/test-1"
  wait_for branch test-1 "$top/test-1/data" || exit
  echo "   $(sql test-1 "select email || ', orders ' || orders from customers where id = 7")"
  # The files of the branch, its log too, have no row as it was.
  ! grep -rqa 'private\.test' "$top/test-1/data" || die 'unmasked rows are left'
  echo '   no file has an unmasked address'

  say '4. A branch at a point in time: before somebody deletes all customers'
  sql prod 'update customers set orders = orders + 100'
  sleep 1
  point=$(sql prod 'select clock_timestamp()')
  sleep 1
  sql prod 'delete from customers'
  sql prod 'select pg_switch_wal()' >/dev/null # so that it is archived
  wait_for at_time "$point" rescue || exit
  echo "   $(sql rescue "select count(*) || ' customers, ' || max(orders) || ' orders' from customers")"
  echo "   production: $(sql prod 'select count(*) from customers')"

  end_servers
  pando destroy test-1 rescue -q >/dev/null
  finished=1
}

example
