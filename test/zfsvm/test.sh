#!/usr/bin/env bash
# Runs Go tests in a guest with OpenZFS and says how it went, as `make test` does:
#
#   test/zfsvm/test.sh [PACKAGE[=PATTERN]...]    such as ./internal/driver/zfs; default: those below
#
# Variables: RUN, a pattern of tests; ZFS=2.1, another OpenZFS (see build.sh);
# MEM, the guest's memory; TIMEOUT, of a package's tests, such as 20m; LIMIT, in
# seconds, of all of them; TESTARGS, more flags of test binaries; any PANDO_*,
# which the tests get. The guest has no Go: tests find the program in
# $PANDO_TEST_BINARY, the testdata of their package, and the documentation, and in
# $PANDO_TEST_DISKS the names of three empty disks of 512 MB.
# EVENTS=FILE keeps the events of all tests, with their times. With
# TESTARGS=-update the pages that the tests write come back.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$root"

# What ZFS makes a difference to. Leaves such as internal/mount can be named, too:
# the guest has another kernel.
# Last those that count events of the kernel: an emulated processor now and then trips over
# the code that the kernel changes for them.
default=(internal/testfs internal/zfs internal/driver/zfs "internal/doctor=ZFS|Pool|DDT|VolumesWithDedup|CopiesInsideVolume" internal/stack=ZFS
  internal/syncbench=ZFS test/zfs internal/cli=TestDocumentationIsTrue internal/engine=TestTransferZFS test/model
  "test/crash=TestFaultAtEveryStep|TestFaultInInit" "internal/iostat=ZFS|Zvol" "internal/proof=ZFS|TestDisk" "internal/diagnose=ZFS|Unified")

go() { CGO_ENABLED=0 scripts/go.sh go "$@"; }
has_tests() { compgen -G "$1/*_test.go" >/dev/null; }
[ $# -gt 0 ] || set -- "${default[@]}"
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
trap 'exit 130' HUP INT TERM
mkdir "$top/pando" "$top/bin"
go build -buildvcs=false -trimpath -ldflags '-s -w' -o "$top/bin/pando" ./cmd/pando
go build -trimpath -ldflags '-s -w' -o "$top/bin/test2json" cmd/test2json
go build -buildvcs=false -o "$top/testsum" ./tools/testsum
for i in "${!packages[@]}"; do
  p=${packages[i]}
  mkdir -p "$top/pando/$p"
  # Warnings of vet, which go test gives, come from lint.
  if ! go test -c -trimpath -ldflags '-s -w' -o "$top/pando/$p/.test" "./$p"; then
    printf '{"Action":"fail","Package":"pando/%s (it does not compile)"}\n' "$p" >>"$top/events"
    unset 'packages[i]'
    continue
  fi
  [ ! -d "$p/testdata" ] || cp -a "$p/testdata" "$top/pando/$p/"
done
cp -a ./*.md docs "$top/pando/"

{
  env | grep '^PANDO_' | sed "s/'/'\\\\''/g; s/=/='/; s/^/export /; s/\$/'/" || true
  cat <<E
export PATH=/in/bin:\$PATH PANDO_TEST_BINARY=/in/bin/pando PANDO_TEST_ZFS=1
export PANDO_TEST_DISKS='/dev/disk/by-id/virtio-disk0 /dev/disk/by-id/virtio-disk1 /dev/disk/by-id/virtio-disk2'
mount -o remount,size=100% /tmp
state() {
  {
    losetup -a
    awk '\$5 != "/" { print "mount " \$5 " " \$10 }' /proc/self/mountinfo
    ls -d /proc/spl/kstat/zfs/*/ /dev/zd* /tmp/* /dev/mapper/* 2>/dev/null
  } | sort
}
quote() { printf %s "\$1" | sed 's/[\\\\"]/\\\\&/g' | tr '\t' ' '; }
tests() {
  state >/run/before
  cd "/in/pando/\$1"
  test2json -t -p "pando/\$1" ./.test -test.v=test2json -test.timeout=${TIMEOUT:-20m} -test.run="\$2" ${TESTARGS:-}
  cd /
  state >/run/after
  [ -n "\$(comm -13 /run/before /run/after)" ] || return 0
  comm -13 /run/before /run/after | while read -r line; do
    printf '{"Action":"output","Package":"pando/%s: what it left behind","Output":"%s\\\\n"}\n' "\$1" "\$(quote "\$line")"
  done
  printf '{"Action":"fail","Package":"pando/%s: what it left behind"}\n' "\$1"
}
E
  for i in "${!packages[@]}"; do printf 'tests %q %q\n' "${packages[i]}" "${patterns[i]}"; done
  echo 'mkdir -p /out; cp -a /in/pando/docs /out/'
} >"$top/script"

# What the tests say stands in their events, also that they failed: an exit status
# is of the guest.
{
  status=0
  cat "$top/events" 2>/dev/null || true
  test/zfsvm/run.sh -m "${MEM:-4G}" -t "${LIMIT:-2600}" -f "$top/pando" -f "$top/bin" -f "$top/script" -d 512M -d 512M -d 512M -o "$top/out" -- '. ./script; true' || status=$?
  [ $status -eq 0 ] || printf '{"Action":"fail","Package":"the guest (exit status %d)"}\n' $status
  case " ${TESTARGS:-} " in *' -update '*) cp -a "$top/out/docs/." docs/ ;; esac
} | tee "${EVENTS:-/dev/null}" | "$top/testsum" -events
