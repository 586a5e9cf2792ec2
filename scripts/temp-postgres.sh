# For sourcing, after temp-pool.sh: PostgreSQL servers that listen on sockets below
# $top only. The script calls find_postgres USER, then temp_pool DIR, then
# postgres_dirs; end_servers belongs into its on_exit.
# shellcheck shell=bash

# find_postgres USER: who runs the servers; PostgreSQL refuses root.
find_postgres() {
  local p
  db_user=$1
  # Debian keeps them out of PATH, one directory for each version.
  PATH=$(printf '%s\n' /usr/lib/postgresql/*/bin | sort -rV | paste -sd:):$PATH
  export PATH
  for p in postgres initdb psql pgbench pg_basebackup pg_amcheck setpriv; do
    type -P $p >/dev/null || die "there is no $p: install PostgreSQL, for example with apt-get install postgresql"
  done
  id "$db_user" >/dev/null 2>&1 || die "there is no user $db_user, and PostgreSQL does not run as root"
}

# postgres_dirs makes the directories that the user of the servers needs. Only that user can reach what is in them.
postgres_dirs() {
  servers=$top/s
  chmod 711 "$top"
  install -d -m 700 -o "$db_user" "$servers"
}

# become_user PROGRAM...: in a subshell, or with & after it: then $! is the program's own number, and not that of a
# shell which waits for it and ignores signals.
become_user() { cd / && exec setpriv --reuid "$db_user" --regid "$(id -g "$db_user")" --clear-groups "$@"; }
as_user() { (become_user "$@"); }

# start_server NAME DATA SETTING...: starts a server on the directory DATA; call it in what wait_for runs.
# A clone of a running server has that server's postmaster.pid. Its process still
# runs, so PostgreSQL would take the clone for a directory in use.
start_server() {
  local name=$1 data=$2 options=() setting
  shift 2
  for setting; do options+=(-c "$setting"); done
  as_user mkdir -p "$servers/$name"
  rm -f "$data/postmaster.pid"

  become_user postgres -D "$data" -k "$servers/$name" -c listen_addresses= -c shared_buffers=16MB \
    -c max_connections=20 "${options[@]}" </dev/null >"$top/$name.log" 2>&1 3>&- 4>&- &
  echo $! >"$top/$name.server"
}

# wait_server NAME: until it answers.
wait_server() {
  local pid
  pid=$(<"$top/$1.server")
  until sql "$1" 'select 1' postgres >/dev/null 2>&1; do
    if ! kill -0 "$pid" 2>/dev/null; then
      refused "$1"
      return 1
    fi
    sleep 0.02
  done
}

# refused NAME: what a server said before it ended.
refused() {
  rm -f "$top/$1.server"
  echo "PostgreSQL does not accept the directory of $1:"
  grep -E 'FATAL|PANIC|DETAIL|HINT' "$top/$1.log" | tail -n 3 | sed 's/^.*\(FATAL\|PANIC\|DETAIL\|HINT\)/  \1/'
} >&2

# sql NAME STATEMENT [DATABASE]: what it returns, without decoration.
sql() { as_user psql -h "$servers/$1" -d "${3:-shop}" -XAtq -v ON_ERROR_STOP=1 -c "$2"; }

# stop_servers NAME...: as a service manager would, and waits until all have ended.
stop_servers() { signal_servers INT "$@"; }

signal_servers() { # SIGNAL NAME...
  local signal=$1 name
  shift
  for name; do
    [ ! -e "$top/$name.server" ] || kill "-$signal" "$(<"$top/$name.server")" 2>/dev/null || true
  done
  for name; do
    [ -e "$top/$name.server" ] || continue
    while kill -0 "$(<"$top/$name.server")" 2>/dev/null; do sleep 0.02; done
    rm -f "$top/$name.server"
  done
}

# end_servers ends those of a run that was interrupted, at once: their data is thrown away.
end_servers() {
  local file names=()
  for file in "$top"/*.server; do
    [ ! -e "$file" ] || names+=("$(basename "$file" .server)")
  done
  signal_servers QUIT "${names[@]}"
}
