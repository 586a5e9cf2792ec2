#!/usr/bin/env bash
# Runs tests, several packages at a time, and says how it went:
#
#   scripts/test.sh [PACKAGE...]     default: all
#
# As root each package runs in namespaces of its own, with its temporary files in memory (tools/isolate). What
# costs what is said at the end, and kept in out/: events.json is what `go test -json` said, usage.json what each
# package cost. A test that fails is repeated if that says something (tools/testreport); the first output of those that
# then pass is in out/flaky. SIGQUIT makes the tests that run say where they are, and ends them. Variables:
#
#   RUN                  a pattern of tests, as for go test -run
#   TESTFLAGS            more flags of go test
#   AT_ONCE              how many packages run at a time
#   PANDO_TEST_SCRATCH   memory or disk: where temporary files are; default: memory, if there is enough
#   PANDO_TEST_FULL=1    leaves nothing out
#   PANDO_SEED           what tests draw from; PANDO_SHARD, which part of what they leave out (internal/testing/faulttest)
#   PANDO_TEST_DEADLINE  when all must have ended, in seconds since 1970
#   PANDO_TEST_GROUP     a file that gets the process group of the tests, for whoever has to kill this script
#   RACE=1               uses the race detector, by default on the packages that use goroutines
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

GOTESTSUM=gotest.tools/gotestsum@v1.13.0
race=()
if [ -n "${RACE:-}" ]; then
  # Not of SQLite and of compression, which are slow enough and not ours. -short leaves out what shows no races.
  race=(-race -short -gcflags='modernc.org/...=-race=false' -gcflags='github.com/klauspost/...=-race=false')
  export CGO_ENABLED=1
  [ $# -gt 0 ] || set -- ./internal/engine ./internal/engine/catalog ./internal/remote/replicate ./internal/remote/repo ./internal/remote/objstore/...
fi
[ $# -gt 0 ] || set -- ./...

# More than processors: packages wait for disks and timers.
at_once=${AT_ONCE:-$(($(nproc) + 2))}
timeout=30m # of a package, so that what hangs says where; the longest takes 5 minutes alone, and 15 beside a load
[ -z "${PANDO_TEST_FULL:-}" ] || timeout=3h

me=test.sh
# shellcheck source=scripts/test-programs.sh
. scripts/test-programs.sh ./tools/isolate ./tools/testreport

# Longest first, so that no processor idles at the end; those that measure the disk, one at a time, between the others.
# Not from Go's cache, which does not see kernel and disks. Vet belongs to lint; without symbols programs link faster.
order=(./test/crash ./internal/remote/replicate ./internal/engine ./internal/observe/syncbench ./internal/bench ./test/foreign
  ./test/examples ./cmd/pando ./internal/front/cli ./internal/observe/diagnose ./test/buckets ./internal/source/git ./test/model ./test/remotechaos
  ./internal/tree/... ./internal/observe/... ./internal/driver/...)
[ "$*" = ./... ] || order=()
read -ra more <<<"${TESTFLAGS:-}"
flags=(-count=1 -vet=off -ldflags='-s -w' -timeout "$timeout" -exec "$top/isolate" "${race[@]}" "${more[@]}")
export PANDO_TEST_RUNNING=$top/running

# The tests are a job of their own, which a signal ends as a whole; bash would not see the signal before their end.
# shellcheck disable=SC2317,SC2329 # traps call them
running() { find "$top/running" -type f -printf '%f\n'; }
# shellcheck disable=SC2317,SC2329
say_where() {
  running | xargs -r kill -QUIT 2>/dev/null || true
  for _ in {1..200}; do
    [ -n "$(running)" ] || break
    sleep 0.1
  done
  kill -TERM -- "-$tests" 2>/dev/null || true # or packages that wait for their turn would run
}
# shellcheck disable=SC2317,SC2329
end_tests() {
  trap '' HUP INT TERM
  kill -TERM -- "-$tests" 2>/dev/null || true
  while kill -0 -- "-$tests" 2>/dev/null; do sleep 0.1; done
  exit 130
}

rm -rf out/events.json out/usage.json out/flaky
mkdir "$top/running"
set -m
PANDO_TEST_USAGE=$PWD/out/usage.json \
  nice -n 10 scripts/go.sh go run "$GOTESTSUM" --format pkgname-and-test-fails --hide-summary skipped,failed,output --jsonfile out/events.json -- \
  -p "$at_once" "${flags[@]}" ${RUN:+-run "$RUN"} "${order[@]}" "$@" &
tests=$!
set +m
[ -z "${PANDO_TEST_GROUP:-}" ] || echo "$tests" >"$PANDO_TEST_GROUP"
trap say_where QUIT
trap end_tests HUP INT TERM
while status=0; do
  wait "$tests" || status=$?
  kill -0 "$tests" 2>/dev/null || break # else it was a signal that ended the wait
done

scripts/changed.sh >"$top/changed"
"$top/testreport" -usage out/usage.json -status "$status" -changed "$top/changed" -flaky test/flaky.txt out/events.json -- \
  nice -n 10 scripts/go.sh go test -json "${flags[@]}"
