#!/usr/bin/env bash
# Checks the source: format, vet, dead code, shell scripts, layers, style, the length of files, and that nothing of a
# developer's machine got in. All checks run, at once, even when one fails.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit

STATICCHECK=honnef.co/go/tools/cmd/staticcheck@v0.8.2
DEADCODE=golang.org/x/tools/cmd/deadcode@v0.52.0
# Functions of the product that only tests of several packages call.
TESTS_ONLY='ImportFile|MountOn|HintOf|Clear|Runs|DecodeNode|EncodePage|Unpack|With'
MAX_LINES=800
MAX_COLUMNS=120

results=$(mktemp -d) || exit
trap 'rm -rf "$results"' EXIT
# shellcheck disable=SC2317,SC2329 # a trap calls it
interrupted() {
  local job
  for job in "${jobs[@]}"; do kill -TERM -- "-$job" 2>/dev/null; done
  wait
  exit 130
}
trap interrupted HUP INT TERM

# check NAME COMMAND...: a check is good if it prints nothing and exits with 0. It runs in the background, in a process
# group of its own.
names=() jobs=()
set -m
check() {
  local name=$1 to=$results/${#names[@]}
  shift
  names+=("$name")
  {
    "$@" </dev/null >"$to.out" 2>&1
    echo $? >"$to.status"
  } &
  jobs+=($!)
}

# report: waits for all checks, and says how they went, in their order. Its status is how many have failed.
report() {
  local i out failed=0
  wait
  for i in "${!names[@]}"; do
    out=$(grep -vE '^go: (downloading|.*; switching to) ' "$results/$i.out") || true
    if [ "$(<"$results/$i.status")" = 0 ] && [ -z "$out" ]; then
      printf 'ok    %s\n' "${names[i]}"
      continue
    fi
    printf 'FAIL  %s\n' "${names[i]}"
    [ -z "$out" ] || printf '      %s\n' "${out//$'\n'/$'\n      '}"
    failed=$((failed + 1))
  done
  return "$failed"
}

# files [SUFFIX]: every file that belongs to the project.
files() {
  {
    if git rev-parse --git-dir >/dev/null 2>&1; then
      git ls-files -co --exclude-standard
    else
      find . -type f -not -path './.git/*' -not -path './bin/*' -not -path './out/*' -not -path './dist/*' -printf '%P\n'
    fi
  } | while IFS= read -r f; do [ ! -f "$f" ] || [[ $f != *"${1:-}" ]] || printf '%s\n' "$f"; done
}

format() { files .go | xargs -d '\n' scripts/go.sh gofmt -l; }
staticcheck() { scripts/go.sh go run "$STATICCHECK" ./...; }
# What nothing calls, and what only tests call.
deadcode() {
  scripts/go.sh go run "$DEADCODE" -test ./... || return
  local found
  found=$(scripts/go.sh go run "$DEADCODE" ./...) || return
  grep -vE "/(testing|drivertest)/|unreachable func: ($TESTS_ONLY)\$" <<<"$found" || true
}
layers() { scripts/go.sh go test ./test/layers ./test/style | grep -v '^ok'; return "${PIPESTATUS[0]}"; }
shell() {
  if ! type -P shellcheck >/dev/null; then
    echo 'shellcheck is not installed: run make deps'
    return 1
  fi
  files | while IFS= read -r f; do
    if [ "$(head -c 2 "$f" | tr -d '\0')" = '#!' ] && head -n 1 "$f" | grep -q 'sh$'; then printf '%s\n' "$f"; fi
  done | xargs -r -d '\n' shellcheck -x
}
lengths() {
  files .go | xargs -d '\n' wc -l |
    awk -v max="$MAX_LINES" '$2 != "total" && $1 > max { printf "%s has %d lines, more than %d: is there a seam?\n", $2, $1, max }'
}
columns() {
  files .go | xargs -d '\n' awk -v max="$MAX_COLUMNS" 'length > max { printf "%s:%d has %d columns, more than %d\n", FILENAME, FNR, length, max }'
}
# Paths that exist on the machine of who wrote it only. The brackets keep this
# file from finding itself.
private() { files | xargs -d '\n' grep -nIE '(^|[^[:alnum:]_.-])/(wor[k]|hom[e]/[a-z]+|User[s])/[a-z]' || true; }

check 'gofmt' format
check 'go vet' scripts/go.sh go vet ./...
check "staticcheck ($STATICCHECK)" staticcheck
check "deadcode ($DEADCODE)" deadcode
check 'shellcheck' shell
check 'layers, phrases, paragraphs' layers
check "no Go file longer than $MAX_LINES lines" lengths
check "no line longer than $MAX_COLUMNS columns" columns
check 'no private paths' private

report || {
  printf 'lint: %d checks failed\n' "$?"
  exit 1
}
