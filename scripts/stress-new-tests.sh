#!/usr/bin/env bash
# Runs the tests that a change adds or edits ten times each, for two minutes at most in all, so that a flaky one shows
# itself before it has landed. "Change" is what differs from the newest landed commit (scripts/changed.sh). All of them
# draw the same each time. out/events.json of the last `make test`, if there is one, tells how long each takes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

base=$(scripts/changed.sh --base)
if [ -z "$base" ]; then
  echo 'no ancestor has landed, so everything counts as changed, and no test as new: nothing runs'
  exit
fi

me=stress-new-tests.sh
# shellcheck source=scripts/test-programs.sh
. scripts/test-programs.sh ./tools/isolate ./tools/newtests
events=''
[ ! -f out/events.json ] || events=out/events.json
run_tool "$top/newtests" -isolate "$top/isolate" -events "$events" "$base"
