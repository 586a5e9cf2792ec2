#!/usr/bin/env bash
# A chain of build steps, of which only those run that have changed:
#   examples/ci-build/run.sh
#
#   CI_DIR=DIR      where to work (default: a temporary directory)
#   CI_STEPS=N      how many steps install a package each (default: 20)
#   PANDO=FILE      the program (default: bin/pando)
#
# It works in one new directory and leaves nothing behind, even when it is
# interrupted.
set -euo pipefail
me=ci-build
# shellcheck source=scripts/temp-pool.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/temp-pool.sh"
# shellcheck source=scripts/figures.sh
source "$root/scripts/figures.sh"

: "${CI_DIR:=}" "${CI_STEPS:=20}"
become_root CI_DIR CI_STEPS

# install N: the command that installs a package.
install() {
  # shellcheck disable=SC2016 # the step expands it
  printf 'mkdir -p opt/%d; read -r p < packages/%d; for n in $(seq 100); do echo "$p" > opt/%d/$n; done' "$1" "$1" "$1"
}

# build_file: each step "installs" a package of 100 files, and the last one builds the program.
build_file() {
  local i
  printf 'golden = "app"\nfrom = "base"\n'
  for ((i = 1; i <= CI_STEPS; i++)); do
    printf '\n[[step]]\nname = "package-%d"\ncopy = ["packages/%d"]\nrun = """\n%s\n"""\n' "$i" "$i" "$(install "$i")"
  done
  printf '\n[[step]]\nname = "program"\ncopy = ["src"]\nrun = "cat src/* opt/*/1 > program"\n'
}

# timed WHAT COMMAND...: how long it took, and how many steps ran.
timed() {
  local what=$1 start end ran
  shift
  start=$(date +%s%N)
  "$@" >"$top/out" 2>"$top/err" || die "$what: $(cat "$top/err")"
  end=$(date +%s%N)
  ran=$(grep -c ': running$' "$top/err" || true)
  printf '   %-34s %3d of %d steps ran   %5d ms   %s\n' "$what" "$ran" $((CI_STEPS + 1)) \
    $(((end - start) / 1000000)) "$(cat "$top/out")"
}

# bare: all commands in one clone, without steps.
bare() {
  local i
  for ((i = 1; i <= CI_STEPS; i++)); do install "$i"; echo; done >"$top/commands"
  pando run base -- sh -c "cp -r '$top/work/packages' . && sh -e '$top/commands'" >&2
}

build() { pando build -f "$top/work/pando.toml"; }

# many: eight processes at once that need the same result.
many() {
  local i
  for ((i = 0; i < 8; i++)); do
    pando golden build once --from app --key "$1" -q -- \
      sh -c "echo x >> '$top/ran'; sleep 0.5" >"$top/once-$i" &
  done
  wait
}

example() {
  local middle=$((CI_STEPS / 2)) i
  temp_pool "$CI_DIR"
  pando init >/dev/null
  mkdir -p "$top/base" "$top/work/packages" "$top/work/src"
  echo base >"$top/base/os"
  for ((i = 1; i <= CI_STEPS; i++)); do echo "package $i" >"$top/work/packages/$i"; done
  echo 'first version' >"$top/work/src/main"
  build_file >"$top/work/pando.toml"
  pando golden import base "$top/base" -q >/dev/null

  say '1. A chain of steps'
  timed 'all commands in one clone' bare
  timed 'the first time' build
  timed 'nothing has changed' build
  echo 'second version' >"$top/work/src/main"
  timed 'the program has changed' build
  echo "package $middle, updated" >"$top/work/packages/$middle"
  timed 'a package in the middle has changed' build
  pando clone "$(build 2>/dev/null)" job --mount "$top/job" -q >/dev/null
  grep -q 'second version' "$top/job/program" || die 'the result has an old program'
  grep -q updated "$top/job/opt/$middle/100" || die 'the result has an old package'
  pando destroy job -q >/dev/null

  say '2. Eight processes need the same result at once'
  many key-1
  echo "   the command ran $(wc -l <"$top/ran") time; results: $(sort -u "$top"/once-* | tr '\n' ' ')"

  say '3. A step that fails leaves nothing'
  printf '\n[[step]]\nname = "broken"\nrun = "echo half > half; exit 3"\n' >>"$top/work/pando.toml"
  pando build -f "$top/work/pando.toml" >/dev/null 2>"$top/err" ||
    echo "   exit code $?: $(grep '^pando: build' "$top/err" | sed "s|$top/work/||")"
  [ "$(pando ls -q)" = '' ] || die 'a volume is left'
  finished=1
}

example
