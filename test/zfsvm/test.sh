#!/usr/bin/env bash
# Runs Go tests in guests with OpenZFS and says how it went, as `make test` does. Each package gets a guest of its
# own, several at a time:
#
#   test/zfsvm/test.sh [PACKAGE[=PATTERN]...]    such as ./internal/driver/zfs; default: those below
#   test/zfsvm/test.sh -run PATTERN PACKAGE
#
# Variables: RUN, a pattern of tests; ZFS=2.1, another OpenZFS (see build.sh);
# AT_ONCE, how many guests run at a time; MEM, the memory of a guest; TIMEOUT, of a
# package, such as 20m; TESTARGS, more flags of test binaries; any PANDO_*, which
# the tests get; PANDO_TEST_DEADLINE, when all must have ended. With -run PATTERN in
# front it prints the events of one package only, as `go test -json` does. The guest has no Go: tests find the program in
# $PANDO_TEST_BINARY, the testdata of their package, and the documentation, and in
# $PANDO_TEST_DISKS the names of three empty disks of 512 MB.
# What the tests said is kept in out/zfs-events.json. With TESTARGS=-update the
# pages that the tests write come back.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$root"

# What ZFS makes a difference to, longest first. Leaves such as internal/linux/mount can be named, too: the guest has
# another kernel.
default=(internal/driver/zfs "test/crash=TestFaultAtEveryStep|TestFaultInInit|Overlay" test/zfs test/model
  internal/linux/zfs internal/front/cli=TestDocumentationIsTrue internal/testing/testfs internal/remote/replicate=ZFS
  "internal/engine=TestResize|TestTransferZFS|TestOverlay$|OverlaysAtOnce|OverlayEphemeral|OverlayUnmounted|OverlayHeld|OldZFS|GoldenOfOverlays|ShowMeasures|RebaseOfMoved|MountForOwner$"
  "internal/observe/doctor=ZFS|Pool|DDT|VolumesWithDedup|CopiesInsideVolume" internal/observe/stack=ZFS internal/observe/syncbench=ZFS
  "internal/observe/iostat=ZFS|Zvol" "internal/observe/proof=ZFS|TestDisk" "internal/observe/diagnose=ZFS|Unified")

go() { scripts/go.sh go "$@"; }
has_tests() { compgen -G "$1/*_test.go" >/dev/null; }
[ $# -gt 0 ] || set -- "${default[@]}"
events_only=''
if [ "$1" = -run ]; then
  RUN=$2 events_only=1
  shift 2
fi
packages=() patterns=()
for p in "$@"; do
  pattern=${RUN:-}
  [ "${p%%=*}" = "$p" ] || pattern=${RUN:-${p#*=}}
  p=${p%%=*} p=${p#./} p=${p%/}
  has_tests "$p" || { echo "test-zfs: there are no tests in $p" >&2; exit 2; }
  packages+=("$p") patterns+=("$pattern")
done

export ZFSVM_FLAVOR=${ZFS:-2.3}
test/zfsvm/build.sh >/dev/null
top=$(mktemp -d "${TMPDIR:-/tmp}/pando-test-zfs.XXXXXX")
trap 'rm -rf "$top"' EXIT
trap 'exit 130' HUP INT TERM # when the guests have ended, which get the signal too

# --- what every guest gets ---

mkdir -p "$top/pando" "$top/bin" "$top/events" out
go build -ldflags '-s -w' -o "$top/bin/pando" ./cmd/pando
go build -ldflags '-s -w' -o "$top/bin/test2json" cmd/test2json
go build -o "$top/testreport" ./tools/testreport
cp -a ./*.md docs "$top/pando/"

cat >"$top/bin/prepare" <<'E'
export PATH=/in/bin:$PATH PANDO_TEST_BINARY=/in/bin/pando PANDO_TEST_ZFS=1
export PANDO_TEST_DISKS='/dev/disk/by-id/virtio-disk0 /dev/disk/by-id/virtio-disk1 /dev/disk/by-id/virtio-disk2'
mount -o remount,size=100% /tmp
state() {
  {
    losetup -a
    awk '$5 != "/" { at = $5; sub(/.* - /, ""); print "mount " at " " $2 }' /proc/self/mountinfo # not how it propagates
    ls -d /proc/spl/kstat/zfs/*/ /dev/zd* /tmp/* /dev/mapper/* 2>/dev/null
  } | sort
}
quote() { printf %s "$1" | sed 's/[\\"]/\\&/g' | tr '\t' ' '; }

# tests PACKAGE FLAG...: runs the tests of a package, and fails it for what they leave behind.
tests() {
  local package=$1
  shift
  state >/run/before
  cd "/in/pando/$package"
  test2json -t -p "pando/$package" ./.test -test.v=test2json "$@"
  cd /
  state >/run/after
  mkdir -p /out
  cp -a /in/pando/docs /out/
  [ -n "$(comm -13 /run/before /run/after)" ] || return 0
  comm -13 /run/before /run/after | while read -r line; do
    printf '{"Action":"output","Package":"pando/%s: what it left behind","Output":"%s\\n"}\n' "$package" "$(quote "$line")"
  done
  printf '{"Action":"fail","Package":"pando/%s: what it left behind"}\n' "$package"
}
E

# --- one guest ---

# left MOST: so many seconds, or what is left until the deadline.
left() {
  local now
  now=$(date +%s)
  if [ -z "${PANDO_TEST_DEADLINE:-}" ] || [ $((PANDO_TEST_DEADLINE - now)) -gt "$1" ]; then
    echo "$1"
  else
    echo $((PANDO_TEST_DEADLINE > now ? PANDO_TEST_DEADLINE - now : 1))
  fi
}

# in_guest PACKAGE PATTERN EVENTS: compiles the tests of a package and runs them in a guest. What the tests say
# stands in their events, also that they failed: an exit status is of the guest.
in_guest() {
  local p=$1 pattern=$2 events=$3 status=0 mine=$3.d words limit timeout
  mkdir -p "$mine/pando/$p"
  # Warnings of vet, which go test gives, come from lint.
  if ! go test -c -vet=off -ldflags '-s -w' -o "$mine/pando/$p/.test" "./$p" >&2; then
    printf '{"Action":"fail","Package":"pando/%s (it does not compile)"}\n' "$p" >"$events"
    return
  fi
  [ ! -d "$p/testdata" ] || cp -a "$p/testdata" "$mine/pando/$p/"
  cp -a "$top/pando/." "$mine/pando/"
  read -ra words <<<"${TESTARGS:-}"
  # The tests end by themselves; the guest's own limit is for a guest that hangs.
  limit=$(left "${LIMIT:-2400}")
  timeout=$((limit > 1380 ? 1200 : limit > 181 ? limit - 180 : 1))
  {
    env | grep '^PANDO_' | sed "s/'/'\\\\''/g; s/=/='/; s/^/export /; s/\$/'/" || true
    echo '. /in/bin/prepare'
    printf '%q ' tests "$p" "-test.timeout=${TIMEOUT:-${timeout}s}" "-test.run=$pattern" "${words[@]}"
  } >"$mine/script"

  test/zfsvm/run.sh -c 1 -m "${MEM:-4G}" -t "$limit" -f "$mine/pando" -f "$top/bin" -f "$mine/script" \
    -d 512M -d 512M -d 512M -o "$mine/out" -- '. ./script; true' >"$events" || status=$?
  [ $status -eq 0 ] || printf '{"Action":"fail","Package":"the guest of %s (exit status %d)"}\n' "$p" $status >>"$events"
  case " ${TESTARGS:-} " in *' -update '*) cp -a "$mine/out/docs/." docs/ ;; esac
  rm -rf "$mine"
}

# all_guests: the events of one package after the other, as they end.
all_guests() {
  local at_once=${AT_ONCE:-$(nproc)} i running=0
  for i in "${!packages[@]}"; do
    if [ "$running" -ge "$at_once" ]; then
      wait -n
      running=$((running - 1))
    fi
    {
      in_guest "${packages[i]}" "${patterns[i]}" "$top/events/$i"
      flock "$top/events" cat "$top/events/$i"
    } &
    running=$((running + 1))
  done
  wait

  # A guest that says nothing has failed, and so has a pattern that matches no test.
  for i in "${!packages[@]}"; do
    grep -qsF '"Test":' "$top/events/$i" ||
      printf '{"Action":"fail","Package":"pando/%s (no test ran)"}\n' "${packages[i]}"
  done
}

if [ -n "$events_only" ]; then
  all_guests
  exit
fi
status=0
all_guests | tee out/zfs-events.json |
  scripts/go.sh go run "$(sed -n 's/^GOTESTSUM=//p' scripts/test.sh)" --format pkgname-and-test-fails --hide-summary skipped,failed,output --raw-command -- cat || status=$?
scripts/changed.sh >"$top/changed"
"$top/testreport" -status "$status" -changed "$top/changed" -flaky test/flaky.txt out/zfs-events.json -- test/zfsvm/test.sh
