#!/usr/bin/env bash
# Measures clones on this host, in a temporary pool:
#   scripts/bench.sh [ARGUMENT OF `pando bench clone`...]
#
#   BENCH_DIR=DIR   where to work (default: a temporary directory)
#   PANDO=FILE      the program (default: bin/pando)
set -euo pipefail
me=bench
# shellcheck source=scripts/temp-pool.sh
source "$(dirname "${BASH_SOURCE[0]}")/temp-pool.sh"

: "${BENCH_DIR:=}"
become_root BENCH_DIR -- "$@"

bench() {
  temp_pool "$BENCH_DIR"
  wait_for pando init
  wait_for pando bench clone "$@"
  # shellcheck disable=SC2034 # temp-pool.sh asks
  finished=1
}

bench "$@"
