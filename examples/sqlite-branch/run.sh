#!/usr/bin/env bash
# Twenty branches of a SQLite database that a program writes to:
#   examples/sqlite-branch/run.sh
#
#   BRANCH_SIZE=MIB   how large the database is (default: 512)
#   BRANCH_COUNT=N    how many branches (default: 20)
#   BRANCH_DIR=DIR    where to work (default: a temporary directory)
#   PANDO=FILE        the program (default: bin/pando)
#
# It works in one new directory and leaves nothing behind, even when it is
# interrupted. It needs the program sqlite3.
set -euo pipefail
me=sqlite-branch
# shellcheck source=scripts/temp-pool.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/temp-pool.sh"
# shellcheck source=scripts/figures.sh
source "$root/scripts/figures.sh"

: "${BRANCH_DIR:=}" "${BRANCH_SIZE:=512}" "${BRANCH_COUNT:=20}"
need_numbers BRANCH_SIZE BRANCH_COUNT
become_root BRANCH_DIR BRANCH_SIZE BRANCH_COUNT
type -P sqlite3 >/dev/null || die 'there is no sqlite3: install it, for example with apt-get install sqlite3'
copies=2       # of the ways that copy everything: more would only take longer
accounts=1000  # each begins with 100

sql() { sqlite3 -init /dev/null -cmd '.timeout 10000' "$@"; }

# filled DATABASE: accounts that pay one another, and random rows of 1 MiB.
filled() {
  sql "$1" >/dev/null <<SQL
    pragma journal_mode = wal;
    create table accounts (id integer primary key, balance integer not null);
    create table files (id integer primary key, content blob not null);
    insert into accounts select value, 100 from generate_series(1, $accounts);
    insert into files (content) select randomblob(1048576) from generate_series(1, $BRANCH_SIZE);
SQL
}

# payments DATABASE: transactions without end. After each the balances have the same sum.
payments() {
  while printf 'begin immediate;
      update accounts set balance = balance - 1 where id = %d;
      update accounts set balance = balance + 1 where id = %d;
      commit;\n' $((RANDOM % accounts + 1)) $((RANDOM % accounts + 1)); do :; done | sql "$1"
}

# paid N: payments have changed N accounts.
paid() {
  until [ "$(sql "$top/prod/shop.db" 'select count(*) from accounts where balance <> 100')" -ge "$1" ]; do sleep 0.1; done
}

# --- four ways to a database of one's own ---

cloned() { # COUNT GOLDEN
  local i
  pando clone "$2" branch --count "$1" --mount "$top/b" -q >/dev/null || return
  for ((i = 1; i <= $1; i++)); do answer "$top/b/branch-$i/shop.db" || return; done
}

backup() { # COUNT: SQLite's own way, page by page
  local i
  for ((i = 1; i <= $1; i++)); do
    sql "$top/prod/shop.db" ".backup '$scratch/backup-$i.db'" && answer "$scratch/backup-$i.db" || return
  done
}

vacuum() { # COUNT: SQLite's own way, row by row
  local i
  for ((i = 1; i <= $1; i++)); do
    sql "$top/prod/shop.db" "vacuum into '$scratch/vacuum-$i.db'" && answer "$scratch/vacuum-$i.db" || return
  done
}

copied() { # COUNT: not safe while somebody writes: the two files are copied one after the other
  local i
  for ((i = 1; i <= $1; i++)); do
    mkdir "$scratch/copy-$i" && cp --reflink=never "$top"/prod/shop.db* "$scratch/copy-$i" || return
    answer "$scratch/copy-$i/shop.db" || return
  done
}

# answer DATABASE: it takes a row, which none of the others has, and no payment is half in it.
answer() {
  local got
  got=$(sql "$1" "insert into accounts values (-1, 0); select count(*), sum(balance) from accounts") || return
  [ "$got" = "$((accounts + 1))|$((accounts * 100))" ] || die "$1 has other rows: $got"
}

checked() {
  local i got
  for ((i = 1; i <= BRANCH_COUNT; i++)); do
    got=$(sql "$top/b/branch-$i/shop.db" 'pragma integrity_check') || return
    [ "$got" = ok ] || die "branch-$i is damaged: $got"
  done
}

# --- the example ---

example() {
  local writer
  temp_pool "$BRANCH_DIR"
  scratch=$pool/data/scratch # on the pool's filesystem, so that the bytes can be compared
  pando init >/dev/null

  say "1. A SQLite database of $BRANCH_SIZE MiB in a volume, with a write-ahead log"
  mkdir "$top/empty" "$top/b"
  pando golden import empty "$top/empty" -q >/dev/null
  pando clone empty prod --mount "$top/prod" -q >/dev/null
  wait_for filled "$top/prod/shop.db"

  say '2. A golden of it while a program writes'
  set -m
  payments "$top/prod/shop.db" </dev/null >/dev/null 2>&1 3>&- 4>&- &
  set +m
  writer=$!
  wait_for paid 100
  run pando golden publish shop prod
  kill -- -$writer
  wait $writer || true # it was killed
  pando clone shop look --mount "$top/look" -q >/dev/null
  (cd "$top/look" && wc -c shop.db shop.db-wal) | sed '$d; s/^/  /'
  pando destroy look -q >/dev/null

  say '3. Until each has answered'
  mkdir "$scratch"
  heading
  measured 'pando clone shop' cloned "$BRANCH_COUNT" shop
  wait_for checked || exit
  measured .backup backup $copies
  measured 'VACUUM INTO' vacuum $copies
  measured 'cp, with nobody writing' copied $copies
  echo "   integrity_check finds no damage in $BRANCH_COUNT of $BRANCH_COUNT branches"
  pando destroy 'branch-*' -q >/dev/null
  finished=1
}

example
