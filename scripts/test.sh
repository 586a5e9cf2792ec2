#!/usr/bin/env bash
# Runs tests, several packages at a time, and says how it went:
#
#   scripts/test.sh [PACKAGE...]     default: all
#
# As root each package runs in namespaces of its own, with its temporary files in memory (tools/isolate). What
# costs what is said at the end, and kept in out/: events.json is what `go test -json` said, usage.json what each
# package cost. Variables:
#
#   RUN                  a pattern of tests, as for go test -run
#   TESTFLAGS            more flags of go test
#   AT_ONCE              how many packages run at a time
#   PANDO_TEST_SCRATCH   memory or disk: where temporary files are; default: memory, if there is enough
#   PANDO_TEST_FULL=1    leaves nothing out
#   PANDO_CHAOS          how long each test of test/remotechaos runs: 1m, with PANDO_TEST_FULL 1h
#   RACE=1               uses the race detector, by default on the packages that use goroutines
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

GOTESTSUM=gotest.tools/gotestsum@v1.13.0
race=()
if [ -n "${RACE:-}" ]; then
  # Not of SQLite and of compression, which are slow enough and not ours. -short leaves out what shows no races.
  race=(-race -short -gcflags='modernc.org/...=-race=false' -gcflags='github.com/klauspost/...=-race=false')
  export CGO_ENABLED=1
  [ $# -gt 0 ] || set -- ./internal/engine ./internal/engine/catalog ./internal/linux/treewalk ./internal/remote/replicate ./internal/remote/repo ./internal/remote/objstore/... ./internal/front/...
fi
[ $# -gt 0 ] || set -- ./...

# More than processors: packages wait for disks and timers.
at_once=${AT_ONCE:-$(($(nproc) + 1))}
timeout=25m # less than CI gives the whole run, so that what hangs says where
[ -z "${PANDO_TEST_FULL:-}" ] || timeout=3h

top=$(mktemp -d "${TMPDIR:-/tmp}/pando-make-test.XXXXXX")
trap 'rm -rf "$top"' EXIT
trap 'exit 130' HUP INT TERM
go() { scripts/go.sh go "$@"; }

# Everything that more than one package needs is built once.
mkdir -p out
go build -o "$top/" ./tools/isolate ./tools/testreport
go build -ldflags '-s -w' -o "$top/pando" ./cmd/pando
for server in gofakes3 versitygw fakegcs; do
  GOFLAGS='-mod=readonly -trimpath -buildvcs=false' go -C test/servers tool -n "$server" >/dev/null ||
    echo "test.sh: could not build $server; tests that need it will say so" >&2
done
GOFLAGS='-mod=readonly -trimpath -buildvcs=false' go -C test/browser tool -n browser >/dev/null ||
  echo 'test.sh: could not build what drives a browser; tests that need it will say so' >&2
for runner in buildkite=github.com/buildkite/agent/v3 gitlab=pando/test/runners/gitlab; do
  GOFLAGS='-mod=readonly -trimpath -buildvcs=false' \
    go -C "test/runners/${runner%%=*}" tool -n "${runner#*=}" >/dev/null ||
    echo "test.sh: could not build the runner ${runner%%=*}; tests that need it will say so" >&2
done

# What the tests ask of Go's modules is fetched here: as root, they have no network.
go list -m all >/dev/null || echo "test.sh: could not list all modules; the test of tools/sbom may say so" >&2

# Longest first, so that no processor idles at the end; those that measure the disk, one at a time, between the others.
# Not from Go's cache, which does not see kernel and disks. Vet belongs to lint; without symbols programs link faster.
order=(./test/crash ./test/remotechaos ./internal/observe/syncbench ./internal/remote/replicate ./internal/engine ./internal/observe/diagnose ./test/model
  ./test/python ./internal/bench ./internal/observe/proof ./internal/cli ./cmd/pando ./internal/tree/treecopy ./internal/observe/iostat ./internal/driver/... ./internal/observe/doctor)
[ "$*" = ./... ] || order=()
rm -f out/events.json out/usage.json
status=0
read -ra more <<<"${TESTFLAGS:-}"
# The tests are a job of their own: bash runs a trap only when what it waits for lets it, and a run whose make was killed
# would go on. What the signal ends cleans up first: see tools/isolate.
# shellcheck disable=SC2317 # a trap calls it
end_tests() {
  trap '' HUP INT TERM
  kill -TERM -- "-$tests" 2>/dev/null || true
  for _ in $(seq 300); do kill -0 -- "-$tests" 2>/dev/null || break; sleep 0.1; done
  exit 130
}
set -m
PANDO_TEST_BINARY=$top/pando PANDO_TEST_USAGE=$PWD/out/usage.json \
  nice -n 10 scripts/go.sh go run "$GOTESTSUM" --format pkgname-and-test-fails --hide-summary skipped,failed,output --jsonfile out/events.json -- \
  -count=1 -p "$at_once" -vet=off -ldflags='-s -w' -timeout "$timeout" -exec "$top/isolate" \
  "${race[@]}" ${RUN:+-run "$RUN"} "${more[@]}" "${order[@]}" "$@" &
tests=$!
set +m
trap end_tests HUP INT TERM
wait "$tests" || status=$?

"$top/testreport" -usage out/usage.json out/events.json || status=$?
exit "$status"
