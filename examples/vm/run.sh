#!/usr/bin/env bash
# Ten virtual machines, each with a disk of its own, from one qcow2:
#   examples/vm/run.sh
#
#   VM_IMAGE=FILE    a qcow2, with kernel and initrd beside it (default: made by guest.sh)
#   VM_SOURCE=DIR    files on the disk that guest.sh makes (default: the Go distribution)
#   VM_COUNT=N       how many guests (default: 10)
#   VM_AT_ONCE=N     how many run at a time (default: 2)
#   VM_ACCEL=NAME    kvm, which is faster, or tcg for emulation (default: tcg)
#   VM_DIR=DIR       where to work (default: a temporary directory)
#   PANDO=FILE       the program (default: bin/pando)
#
# It works in one new directory and leaves nothing behind, even when it is
# interrupted. It needs qemu-system-x86_64, qemu-img and debugfs on x86_64, and
# downloads two of Debian's packages when it first makes a guest.
set -euo pipefail
me=vm
# shellcheck source=scripts/temp-pool.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/temp-pool.sh"
# shellcheck source=scripts/figures.sh
source "$root/scripts/figures.sh"

: "${VM_DIR:=}" "${VM_IMAGE:=}" "${VM_SOURCE:=}" "${VM_COUNT:=10}" "${VM_AT_ONCE:=2}" "${VM_ACCEL:=tcg}"
if [ -z "$VM_IMAGE$VM_SOURCE" ]; then
  VM_SOURCE=$(cd "$root" && scripts/go.sh go env GOROOT) || die 'no Go distribution for the disk: set VM_SOURCE=DIR'
fi
become_root VM_DIR VM_IMAGE VM_SOURCE VM_COUNT VM_AT_ONCE VM_ACCEL
export PATH=$PATH:/usr/sbin:/sbin
for p in qemu-system-x86_64 qemu-img debugfs; do
  type -P $p >/dev/null || die "there is no $p: run \`make deps\`"
done
copies=2 # of the ways that copy everything: more would only take longer

# --- guests ---

# boot DISK FORMAT NUMBER: tries twice: of a hundred guests in emulation, one hung on a busy host.
boot() { boot_once "$@" 100 || boot_once "$@" 300; }

# boot_once DISK FORMAT NUMBER SECONDS: starts the guest on its disk, and waits until it has written
# its number there and powered off. It stays in the process group that clean_up ends.
boot_once() {
  local console=$top/console/${1##*/}
  if timeout --foreground "$4" qemu-system-x86_64 -nodefaults -no-user-config -display none -no-reboot -machine q35 \
    -accel "$VM_ACCEL" -cpu Nehalem -m 128M \
    -kernel "$guest/kernel" -initrd "$guest/initrd" -append "console=ttyS0 quiet panic=-1 guest=$3" \
    -serial "file:$console" -drive "if=virtio,format=$2,file=$1" </dev/null &&
    grep -q "^guest $3: written" "$console"; then
    return
  fi
  tail -n 5 "$console" >&2
  return 1
}
export -f boot boot_once

# boot_all WAY FORMAT COUNT: a few at a time.
boot_all() {
  # shellcheck disable=SC2016 # the inner shell expands it
  seq "$3" | xargs -P "$VM_AT_ONCE" -I {} bash -c 'boot "$1-$3" "$2" "$3"' bash "$1" "$2" {}
}

# --- ways to a disk of one's own: WAY COUNT ---

cloned() { pando clone vm clone --count "$1" --mount -q >/dev/null; }

each() { # COUNT COMMAND...: runs it with the path of each disk
  local i
  for ((i = 1; i <= $1; i++)); do "${@:2}" "$scratch/$way-$i" >/dev/null || return; done
}
reflinked() { each "$1" cp --reflink=always "$image"; }
backed() { each "$1" qemu-img create -q -f qcow2 -F qcow2 -b "$image"; }
copied() { each "$1" cp --reflink=never "$image"; }
converted() { each "$1" qemu-img convert -f qcow2 -O raw "$image"; }

# disks LABEL WAY FORMAT COUNT: makes the disks by the function WAY, runs a guest on each, and prints a row: how
# long it took until the disks were there, and the bytes that they take when the guests have written.
disks() {
  local before took_disks prefix=$scratch/$2
  way=$2
  [ "$way" != cloned ] || prefix=$pool/mnt/clone
  before=$(used)
  wait_for "$way" "$4" || die "$1: it failed"
  took_disks=$took
  wait_for boot_all "$prefix" "$3" "$4" || die "$1: a guest failed"
  awk -v label="$1" -v n="$4" -v us="$took_disks" -v bytes=$(($(used) - before)) '
    BEGIN { printf "   %-26s %8d %9.3f s %9.3f s %12.1f MiB\n", label, n, us / 1e6, us / n / 1e6, bytes / n / 1048576 }'
  [ "$way" = cloned ] || rm -f "$prefix"-*
}

# number DISK: what the guest has written there, read from the host.
number() { debugfs -R 'cat /number' "$1" 2>/dev/null; }

# --- the example ---

example() {
  temp_pool "$VM_DIR"
  mkdir "$top/console"
  export top VM_ACCEL guest=$top/guest
  pando init >/dev/null
  scratch=$pool/data/scratch
  mkdir "$scratch"

  say '1. A disk in a qcow2, and a golden of it'
  if [ -n "$VM_IMAGE" ]; then
    guest=$(dirname "$VM_IMAGE")
  else
    wait_for "$root/examples/vm/guest.sh" "$guest" "$VM_SOURCE" || die 'the guest could not be built'
    VM_IMAGE=$guest/disk.qcow2
  fi
  image=$scratch/$me.qcow2 # on the pool's filesystem, so that the bytes can be compared
  cp "$VM_IMAGE" "$image"
  qemu-img info "$image" | grep -E '^(virtual|disk) size' | sed 's/^/   /'
  run pando golden import vm "$VM_IMAGE" --fs none

  say "2. Disks for $VM_COUNT guests, $VM_AT_ONCE at a time ($VM_ACCEL); the time until the disks are there"
  printf '   %-26s %8s %11s %11s %16s\n' '' disks all each 'bytes each'
  disks 'pando clone' cloned raw "$VM_COUNT"
  disks 'cp --reflink=always' reflinked qcow2 "$VM_COUNT"
  disks 'qcow2 backing files' backed qcow2 "$VM_COUNT"
  disks cp copied qcow2 $copies
  disks 'qemu-img convert' converted raw $copies

  say '3. What the guests have written, read on the host'
  local i found=()
  for ((i = 1; i <= VM_COUNT; i++)); do
    found+=("$(number "$pool/mnt/clone-$i")")
    [ "${found[i - 1]}" = "$i" ] || die "the disk of guest $i belongs to '${found[i - 1]}'"
  done
  echo "   numbers on the disks: ${found[*]}"
  run pando clone vm unused --mount
  [ "$(number "$pool/mnt/unused")" = none ] || die 'a guest has changed the golden'
  run qemu-img compare -f qcow2 -F raw "$VM_IMAGE" "$pool/mnt/unused"

  say '4. One of the disks as the next golden, and as a qcow2 to take away'
  run pando umount clone-1
  run pando golden publish vm clone-1
  run pando export clone-1 "$top/clone-1.qcow2"
  run qemu-img check "$top/clone-1.qcow2"
  pando destroy 'clone-*' unused -q >/dev/null
  finished=1
}

example
