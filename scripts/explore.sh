#!/usr/bin/env bash
# Looks for faults with other shards and seeds than the gate, and with fuzz targets, until the time is up:
#
#   scripts/explore.sh [PACKAGE...]     default: all that draw something
#
# What it finds it says with a command that repeats it; what it has searched is in out/explored, where the next search
# goes on. TIME is how long it takes, as 90s or 20m; AT_ONCE, how many tests run at a time. See tools/explore.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PANDO_FAULT_AT PANDO_TEST_FULL

me=explore.sh
# shellcheck source=scripts/test-programs.sh
. scripts/test-programs.sh ./tools/isolate ./tools/explore
run_tool "$top/explore" -for "${TIME:-20m}" -isolate "$top/isolate" -dir "$top" ${AT_ONCE:+-at-once "$AT_ONCE"} "$@"
