#!/usr/bin/env bash
# Builds a small Debian guest for QEMU out of two packages, which it downloads and
# does not install:
#   examples/vm/guest.sh DIR [FILES]
# DIR must not exist, and then has kernel, initrd and disk.qcow2. The disk is an
# ext4 of 1 GiB with busybox, an init (guest-init) and the directory FILES.
#   examples/vm/guest.sh --download
# only downloads the packages. What is needed of them stays in ~/.cache/pando/vm.
set -euo pipefail
export LC_ALL=C PATH=$PATH:/usr/sbin:/sbin
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
die() {
  echo "guest.sh: $*" >&2
  exit 1
}
[ $# -ge 1 ] || die 'usage: guest.sh DIR [FILES]'
[ "$(uname -m)" = x86_64 ] || die "the guest is made on x86_64 only, and this is $(uname -m)"
cache=${XDG_CACHE_HOME:-${HOME:?}/.cache}/pando/vm
# In the order in which they are loaded.
modules=(virtio_ring virtio virtio_pci_modern_dev virtio_pci_legacy_dev virtio_pci virtio_blk)

# kernel_package: the one that the newest kernel for virtual machines is in.
kernel_package() { apt-cache depends linux-image-cloud-amd64 2>/dev/null | awk '$1 == "Depends:" { print $2; exit }'; }

download() {
  local package
  package=$(kernel_package)
  [ -n "$package" ] && (cd "$work" && apt-get -qq -o APT::Sandbox::User= download "$package" busybox-static)
}

# fill_cache: complete or not at all, because the last step is a rename.
fill_cache() {
  local package m
  mkdir -p "${cache%/*}"
  work=$(mktemp -d "$cache.XXXXXX")
  trap 'rm -rf "$work"' EXIT
  # The lists of packages may be missing, or older than the packages.
  if ! download 2>"$work/log"; then
    apt-get -qq update >/dev/null 2>&1 || true
    download 2>"$work/log" ||
      die "cannot download linux-image-cloud-amd64 and busybox-static with apt-get: $(tail -n 1 "$work/log")"
  fi
  for package in "$work"/*.deb; do dpkg-deb -x "$package" "$work/x"; done
  mkdir "$work/new"
  cp "$work"/x/boot/vmlinuz-* "$work/new/kernel"
  cp "$work/x/bin/busybox" "$work/new"
  for m in "${modules[@]}"; do find "$work/x/lib/modules" -name "$m.ko" -exec cp {} "$work/new" \;; done
  mv -T "$work/new" "$cache" 2>/dev/null || [ -e "$cache/kernel" ] # another may have been faster
}

[ -e "$cache/kernel" ] || fill_cache
[ "$1" != --download ] || exit 0

mkdir "$1"
dir=$(cd "$1" && pwd) files=${2:-}
work=$dir/work
trap 'rm -rf "$work"' EXIT

# initrd: loads the driver of the disk, mounts it, and starts its init.
initrd() {
  local root=$work/initrd m
  mkdir -p "$root"/{bin,dev,disk,lib}
  cp "$cache/busybox" "$root/bin"
  cp "$cache"/*.ko "$root/lib"
  {
    echo '#!/bin/busybox sh'
    echo '/bin/busybox --install -s /bin'
    echo 'mount -t devtmpfs dev /dev'
    for m in "${modules[@]}"; do echo "insmod /lib/$m.ko"; done
    echo 'mount -t ext4 /dev/vda /disk && exec switch_root /disk /sbin/init'
  } >"$root/init"
  chmod +x "$root/init"
  (cd "$root" && find . | bin/busybox cpio -o -H newc -R 0:0 2>/dev/null) >"$dir/initrd"
}

disk() {
  local root=$work/disk
  mkdir -p "$root"/{bin,dev,proc,sbin,tmp}
  cp "$cache/busybox" "$root/bin"
  ln -s busybox "$root/bin/sh"
  install -m 755 "$here/guest-init" "$root/sbin/init"
  echo none >"$root/number"
  [ -z "$files" ] || cp -a "$files" "$root/files"
  truncate -s 1G "$work/disk.raw"
  mkfs.ext4 -q -E root_owner=0:0 -d "$root" "$work/disk.raw"
  qemu-img convert -f raw -O qcow2 "$work/disk.raw" "$dir/disk.qcow2"
}

mkdir "$work"
cp "$cache/kernel" "$dir/kernel"
initrd
disk
