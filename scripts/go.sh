#!/usr/bin/env bash
# Runs a command with a Go that can build this module first in PATH:
#   scripts/go.sh go build ./...
# Without a command it prints the directory of that Go. It takes the first Go
# that is new enough for go.mod, or else the newest from 1.21 on: those download
# the version that go.mod asks for, unless GOTOOLCHAIN forbids it.
set -euo pipefail
export LC_ALL=C

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
need=$(awk '$1 == "go" { print $2; exit }' "$root/go.mod")

at_least() { [ "$(printf '%s\n' "$2" "$1" | sort -V | head -n 1)" = "$2" ]; }

# Not in the module's directory, where an old Go would refuse to say its version.
version_of() { (cd / && GOTOOLCHAIN=local "$1" version 2>/dev/null) | sed -n 's/^go version go\([0-9.]*\).*/\1/p'; }

find_go() {
  local c v best='' best_version=0
  local -a candidates
  mapfile -t candidates < <(
    type -P go || true
    printf '%s\n' /usr/local/go/bin/go
    compgen -G '/usr/lib/go-1.*/bin/go' | sort -rV || true
  )
  for c in "${candidates[@]}"; do
    [ -x "$c" ] || continue
    v=$(version_of "$c")
    [ -n "$v" ] || continue
    if at_least "$v" "$need"; then
      printf '%s\n' "$c"
      return
    fi
    if at_least "$v" 1.21 && ! at_least "$best_version" "$v"; then
      best=$c best_version=$v
    fi
  done
  [ -n "$best" ] && [ "${GOTOOLCHAIN:-auto}" != local ] && printf '%s\n' "$best"
}

if ! go=$(find_go); then
  echo "go.sh: no Go found that can build this (go.mod asks for $need): run \`make deps\`, or install it from https://go.dev/dl/" >&2
  exit 1
fi
dir=$(dirname "$go")
if [ $# -eq 0 ]; then
  printf '%s\n' "$dir"
  exit 0
fi
# Distributions set GOTOOLCHAIN=local in their Go. An older one is told which
# version to be, so that tools from elsewhere are built with the same.
toolchain=auto
at_least "$(version_of "$go")" "$need" || toolchain=go$need+auto
export PATH="$dir:$PATH" GOTOOLCHAIN="${GOTOOLCHAIN:-$toolchain}"
# The same for build, tests, lint and the guests, so that Go's cache has each package once, for every checkout.
export CGO_ENABLED="${CGO_ENABLED:-0}" GOFLAGS="${GOFLAGS:--trimpath -buildvcs=false}"
unset LC_ALL
exec "$@"
