#!/usr/bin/env bash
# Starts a guest with OpenZFS, runs a command in it, and exits with its status:
#
#   test/zfsvm/run.sh [OPTION...] -- COMMAND     COMMAND is a script for bash
#   test/zfsvm/run.sh [OPTION...] -i             a shell, until `exit`
#
#   -f FILE    brings FILE, or a directory, to the guest's /in, where COMMAND runs as root
#   -o DIR     puts what COMMAND leaves in the guest's /out into DIR
#   -d SIZE    adds an empty disk, /dev/disk/by-id/virtio-disk0, -disk1 and so on
#   -m SIZE    memory (default 4G); the guest's /tmp is in it
#   -c N       processors (default: all of this host)
#   -t SECONDS ends the guest then (default 900)
#   -k ARGS    for the command line of the kernel
#
# What COMMAND prints comes on standard output, while it runs. The guest's console
# is shown when the guest dies, and is left in $ZFSVM_LOG if that is set. Exit
# status 124: out of time. 125: the guest died. What is built comes from build.sh,
# and its ZFSVM_FLAVOR and ZFSVM_DIR apply.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
memory=4G processors=$(nproc) limit=900 out='' shell='' more='' disks=() files=()
usage() { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" >&2; exit 2; }
while getopts f:o:d:m:c:t:k:i option; do
  case $option in
    f) files+=("$OPTARG") ;;
    o) out=$OPTARG ;;
    d) disks+=("$OPTARG") ;;
    m) memory=$OPTARG ;;
    c) processors=$OPTARG ;;
    t) limit=$OPTARG ;;
    k) more=$OPTARG ;;
    i) shell=1 limit=0 ;;
    *) usage ;;
  esac
done
shift $((OPTIND - 1))
[ -n "$shell" ] || [ $# -gt 0 ] || usage
guest=$("$here/build.sh")

top=$(mktemp -d "${TMPDIR:-/tmp}/pando-zfsvm.XXXXXX")
qemu=''
# shellcheck disable=SC2317 # by a trap
clean_up() {
  trap '' HUP INT TERM
  if [ -n "$qemu" ]; then kill "$qemu" && wait "$qemu"; fi 2>/dev/null
  rm -rf "$top"
}
trap clean_up EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM
log=${ZFSVM_LOG:-$top/console}

printf '%s\n' "$*" >"$top/.command"
tar -C "$top" -cf "$top/in" .command
for f in "${files[@]}"; do tar -C "$(dirname "$f")" -rhf "$top/in" "$(basename "$f")"; done
truncate -s %1M "$top/in" # whole sectors
truncate -s 1G "$top/out"

arguments=()
disk() { # NAME: a file in $top
  arguments+=(-drive "if=none,id=$1,file=$top/$1,format=raw,cache=unsafe,discard=unmap" -device "virtio-blk-pci,drive=$1,serial=$1")
}
disk in
disk out
for i in "${!disks[@]}"; do
  truncate -s "${disks[i]}" "$top/disk$i"
  disk "disk$i"
done
cat=''
if [ -n "$shell" ]; then
  more+=' zfsvm.shell'
  arguments+=(-chardev "stdio,id=out,signal=off" -device "virtconsole,chardev=out")
else
  # By a pipe: a port of qemu's standard output would be unplugged when standard
  # input is at its end.
  mkfifo "$top/output"
  cat "$top/output" &
  cat=$!
  exec 3>"$top/output"
  arguments+=(-chardev "file,id=out,path=$top/output" -device "virtserialport,chardev=out,name=out")
fi

# Nehalem: on older ones ZFS has no fast checksums. rdrand: or the first pool
# waits for randomness. The death signal: this script may be killed.
set -- setpriv --pdeathsig TERM timeout --foreground -k 5 "$limit" qemu-system-x86_64 -nodefaults -no-user-config -display none -no-reboot \
  -machine q35 -accel "${ZFSVM_ACCEL:-tcg,thread=multi}" -cpu "${ZFSVM_CPU:-Nehalem,+rdrand}" -smp "$processors" -m "$memory" \
  -kernel "$guest/kernel" -initrd "$guest/initrd" -append "console=ttyS0 panic=-1 oops=panic mitigations=off $more" \
  -serial "file:$log" -device virtio-serial-pci "${arguments[@]}" \
  -chardev "file,id=status,path=$top/status" -device virtserialport,chardev=status,name=status
ended=0
if [ -n "$shell" ]; then
  [ ! -t 0 ] || terminal=$(stty -g)
  [ ! -t 0 ] || stty raw -echo
  "$@" || ended=$?
  [ ! -t 0 ] || stty "$terminal"
else
  "$@" 3>&- </dev/null &
  qemu=$!
  wait "$qemu" || ended=$?
  qemu=''
  exec 3>&-
  wait "$cat"
fi

status=$(cat "$top/status" 2>/dev/null || true)
if ! [[ $status =~ ^[0-9]+$ ]]; then
  status=125
  [ "$ended" -ne 124 ] || status=124
  {
    if [ "$status" -eq 124 ]; then echo "zfsvm: the guest was ended after $limit s. The end of its console:"; else
      echo "zfsvm: the guest died (qemu's exit status is $ended). The end of its console:"; fi
    tail -n 60 "$log"
  } >&2
elif [ -n "$out" ]; then
  mkdir -p "$out"
  tar -C "$out" -xf "$top/out"
fi
exit "$status"
