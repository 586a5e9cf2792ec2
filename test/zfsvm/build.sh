#!/usr/bin/env bash
# Builds, once, what run.sh boots: a Debian kernel with OpenZFS and a small
# userland. Prints the directory it is in, at once if it is there already.
#
#   ZFSVM_FLAVOR=2.3 test/zfsvm/build.sh    Debian 12's backports: OpenZFS 2.3, Linux 6.12 (default)
#   ZFSVM_FLAVOR=2.1 test/zfsvm/build.sh    Debian 12 itself:      OpenZFS 2.1, Linux 6.1
#
# It is kept in $ZFSVM_DIR, by default ~/.cache/pando/zfsvm, under names with a
# digest of how it is made: a changed recipe is built anew. Packages are
# downloaded and unpacked there, with a configuration of apt's own; nothing is
# installed but what scripts/deps.sh installs.
set -euo pipefail
export LC_ALL=C PATH=$PATH:/usr/sbin:/sbin
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cache=${ZFSVM_DIR:-${XDG_CACHE_HOME:-${HOME:?}/.cache}/pando/zfsvm}
flavor=${ZFSVM_FLAVOR:-2.3}
case $flavor in
  2.3) suite=bookworm-backports ;;
  2.1) suite=bookworm ;;
  *) echo "zfsvm: ZFSVM_FLAVOR=$flavor: there are 2.3 and 2.1" >&2; exit 2 ;;
esac

# Modules in the guest, with what they depend on, and programs of this host that
# are copied into it, with their libraries, where they are installed.
modules=(virtio_pci virtio_blk virtio_console loop overlay xfs btrfs nbd zram brd dm-mod dm-thin-pool dm-snapshot
  dm-flakey dm-log-writes dm-delay dm-crypt zfs)
programs=(bash mount umount findmnt lsblk blkid losetup fstrim fsfreeze unshare nsenter mkfs.ext4 e2fsck
  resize2fs debugfs mkfs.xfs xfs_repair xfs_io xfs_admin mkfs.btrfs btrfs dmsetup blockdev wipefs strace
  tar filefrag getfattr setfattr getfacl setfacl git sqlite3 prlimit gzip zstd
  sleep dd timeout stat date cp mv ln rm ls touch chmod chown mkdir mkfifo mknod df du sync truncate sort comm cat
  head tail od sha256sum)

say() { echo "zfsvm: [$SECONDS s] $*" >&2; }

# --- Debian's packages ---

# mirror RELEASE DEFAULT: where this machine's own apt gets it from.
mirror() {
  local uri
  # shellcheck disable=SC2016 # apt's
  uri=$(apt-get indextargets --format '$(REPO_URI) $(RELEASE)' | awk -v r="$1" '$2 == r && !n++ { print $1 }')
  echo "${uri:-$2}"
}

# private apt-get|apt-cache ARGUMENT...: with package sources of its own.
private() {
  "$1" -qq -o Dir::Etc::SourceList=/dev/null -o Dir::Etc::SourceParts="$work/apt/etc" -o Dir::State::Lists="$work/apt/lists" \
    -o Dir::Cache="$work/apt/cache" -o APT::Sandbox::User= -o Acquire::Retries=3 "${@:2}"
}

sources() {
  mkdir -p "$work"/apt/{etc,lists/partial,cache/archives/partial}
  cat >"$work/apt/etc/zfsvm.sources" <<E
Types: deb
URIs: $(mirror bookworm http://deb.debian.org/debian)
Suites: bookworm bookworm-backports
Components: main contrib
Architectures: amd64
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
E
  private apt-get update >&2
}

# version PACKAGE: the newest of it in the suite.
version() { private apt-cache madison "$1" | awk -F ' *[|] *' -v suite=" $suite/" 'index($3, suite) && !n++ { print $2 }'; }

# depends PACKAGE=VERSION PATTERN: the names among its dependencies that match.
depends() { private apt-cache show "$1" | sed -n 's/^Depends: //p' | head -n 1 | tr -s ', |' '\n' | grep -xE "$2" | sort -u; }

# --- kernel, modules and OpenZFS (minutes) ---

build_base() {
  local image release headers common kbuild zfs libs obj src tree m
  mkdir -p "$work"/{debs,kernel,user,mod/lib/modules,base}
  sources
  image=$(depends "linux-image-cloud-amd64=$(version linux-image-cloud-amd64)" 'linux-image-[0-9].*')
  release=${image#linux-image-} headers=linux-headers-${image#linux-image-}
  common=$(depends "$headers" 'linux-headers-.*-common')
  kbuild=$(depends "$headers" 'linux-kbuild-.*')
  zfs=$(version zfs-dkms)
  mapfile -t libs < <(depends "zfsutils-linux=$zfs" 'lib(zfs|zpool|nvpair|uutil)[0-9]+linux')
  say "downloading Linux $release and OpenZFS $zfs"
  (cd "$work/debs" && private apt-get download "$image" "$headers" "$common" "$kbuild" \
    zfs-dkms="$zfs" zfsutils-linux="$zfs" "${libs[@]/%/=$zfs}" busybox-static udev kmod) >&2
  for m in "$work"/debs/{linux,zfs-dkms}*.deb; do dpkg-deb -x "$m" "$work/kernel"; done
  for m in "$work"/debs/{zfsutils,lib,busybox,udev,kmod}*.deb; do dpkg-deb -x "$m" "$work/user"; done

  # The headers name /usr/src. Their vmlinux is for BTF, and without it no module
  # has to go through pahole.
  obj=$work/kernel/usr/src/$headers src=$work/kernel/usr/src/$common
  echo "include $src/Makefile" >"$obj/Makefile"
  rm -f "$obj/vmlinux"
  say 'compiling OpenZFS'
  (
    cd "$work"/kernel/usr/src/zfs-*/
    export KCFLAGS=-g0
    # Without hooks for tracing the module loads three times as fast.
    { ./configure --disable-dependency-tracking --with-config=kernel --with-linux="$src" --with-linux-obj="$obj" &&
      make -j"$(nproc)" CC_FLAGS_FTRACE=; } >"$work/log" 2>&1
  ) || { tail -n 30 "$work/log" >&2; return 1; }

  say 'packing'
  tree=$work/kernel/lib/modules/$release
  mkdir -p "$tree/extra"
  find "$tree" -name '*.ko.xz' -print0 | xargs -0 -r -P"$(nproc)" -n 32 xz -d
  find "$work"/kernel/usr/src/zfs-*/module -name '*.ko' | while read -r m; do strip --strip-debug -o "$tree/extra/${m##*/}" "$m"; done
  ln -s "$tree" "$work/mod/lib/modules/$release"
  "$work/user/bin/busybox" depmod -b "$work/mod" "$release"
  mkdir -p "$work/base/lib/modules/$release"
  (cd "$tree" && with_dependencies "${modules[@]}" <modules.dep |
    xargs cp --parents -t "$work/base/lib/modules/$release" modules.order modules.builtin modules.builtin.modinfo)
  "$work/user/bin/busybox" depmod -b "$work/base" "$release"
  cp "$work"/kernel/boot/vmlinuz-* "$work/base/vmlinuz"
  mkdir "$work/base/user"
  rm -rf "$work"/user/usr/{share,include}
  cp -a "$work"/user/. "$work/base/user"
  printf 'Linux %s\nOpenZFS %s\n' "$release" "$zfs" >"$work/base/versions"
  tar -C "$work/base" -I 'zstd -10 -T0' -cf "$work/base.tar.zst" .
  mv "$work/base.tar.zst" "$base"
}

# with_dependencies MODULE...: reads modules.dep, prints files.
with_dependencies() {
  awk -v want="$*" '
    { sub(":", "", $1); n = $1; sub(".*/", "", n); sub("\\.ko$", "", n); gsub("-", "_", n); line[n] = $0 }
    END {
      k = split(want, w, " ")
      for (i = 1; i <= k; i++) { gsub("-", "_", w[i]); m = split(line[w[i]], x, " "); for (j = 1; j <= m; j++) out[x[j]] = 1 }
      for (f in out) print f
    }'
}

# --- what is booted (seconds) ---

build_guest() {
  local root=$work/root user=$work/root/user p f
  mkdir -p "$root"/{bin,usr,lib/udev,lib/x86_64-linux-gnu,lib64,etc/zfs,proc,sys,dev,run,tmp,root,mnt,in,out,var/tmp} "$work/guest"
  tar -C "$root" -I zstd -xf "$base"
  mv "$root/versions" "$work/guest/versions"
  unpack_kernel "$root/vmlinuz" "$work/guest/kernel"
  rm "$root/vmlinuz"
  ln -s bin "$root/sbin"
  ln -s ../bin ../lib ../lib64 "$root/usr/"
  ln -s ../bin "$root/usr/sbin"

  local -x LD_LIBRARY_PATH=$user/lib/x86_64-linux-gnu:$user/usr/lib/x86_64-linux-gnu
  cp "$user/bin/busybox" "$root/bin/"
  for p in $("$root/bin/busybox" --list); do [ "$p" = busybox ] || ln -s busybox "$root/bin/$p"; done
  for p in zpool zfs zdb zstream mount.zfs zgenhostid; do put "$(find "$user" -path "*/sbin/$p")" "/bin/$p"; done
  put "$user/bin/udevadm" /bin/udevadm
  ln -s udevadm "$root/bin/udevd"
  put "$user/bin/kmod" /bin/kmod
  for p in modprobe rmmod lsmod insmod depmod; do ln -sf kmod "$root/bin/$p"; done
  # kmod wants more files than busybox makes.
  "$root/bin/depmod" -b "$root" "$(basename "$root"/lib/modules/*)"
  mkdir "$root/lib/udev/rules.d"
  for p in zvol_id scsi_id; do put "$(find "$user" -path "*/udev/$p")" "/lib/udev/$p"; done
  for p in 50-udev-default 60-block 60-persistent-storage 60-zvol 64-btrfs 90-zfs; do
    cp "$(find "$user" -name "$p.rules")" "$root/lib/udev/rules.d/"
  done
  for p in 55-dm 60-persistent-storage-dm 95-dm-notify; do
    f=/lib/udev/rules.d/$p.rules
    [ ! -e "$f" ] || cp "$f" "$root/lib/udev/rules.d/"
  done
  host_programs | while read -r p f; do put "$f" "/bin/$p"; done
  # The programs of this host, and not what busybox has of the same name.
  ln -sf bash "$root/bin/sh"
  put "$(ldconfig -p | awk '/libgcc_s.so.1 .*x86-64/ { print $NF; exit }')" /lib/x86_64-linux-gnu/libgcc_s.so.1 # threads load it when they end
  rm -r "$user"

  ln -s /proc/mounts "$root/etc/mtab"
  printf '\x0c\xb1\xba\x00' >"$root/etc/hostid"
  printf 'root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n' >"$root/etc/passwd"
  printf 'root:x:0:\ndisk:x:6:\nnogroup:x:65534:\n' >"$root/etc/group"
  echo '127.0.0.1 localhost' >"$root/etc/hosts"
  cp "$here/init" "$root/init"
  chmod +x "$root/init"
  (cd "$root" && find . | "$root/bin/busybox" cpio -o -H newc -R 0:0) >"$work/guest/initrd" 2>/dev/null
  mv "$work/guest" "$guest"
}

# put FILE PATH: copies a program into the guest, and the libraries it is linked with.
put() {
  local lib dir
  rm -f "$root$2"
  cp -L "$1" "$root$2"
  { ldd "$1" || true; } 2>/dev/null | grep -oE '/[^ ]+\.so[^ ]*' | while read -r lib; do
    dir=/lib/x86_64-linux-gnu
    case $lib in */ld-linux*) dir=/lib64 ;; esac
    [ -e "$root$dir/${lib##*/}" ] || cp -L "$lib" "$root$dir/"
  done || true
}

host_programs() {
  local p f
  for p in "${programs[@]}"; do
    if f=$(type -P "$p"); then echo "$p $(readlink -f "$f")"; fi
  done
}

# unpack_kernel VMLINUZ KERNEL: qemu starts an ELF file without BIOS and without
# decompressing, about a second sooner.
unpack_kernel() {
  local magic offset
  for magic in $'zstd -dcq:\x28\xb5\x2f\xfd' $'xz -dc --single-stream:\xfd7zXZ'; do
    offset=$(grep -aboF "${magic#*:}" "$1" | head -n 1 | cut -d: -f1) || true
    [ -n "$offset" ] || continue
    # What follows in the file makes them complain.
    # shellcheck disable=SC2086 # words
    tail -c +$((offset + 1)) "$1" | ${magic%%:*} >"$2" 2>/dev/null || true
    if [ "$(head -c 4 "$2" | tail -c 3)" = ELF ]; then return; fi
  done
  cp "$1" "$2"
}

# --- once, by one at a time ---

digest() { sha256sum | head -c 12; }
base_id=$({ echo "$suite ${modules[*]}"; declare -f sources version depends private build_base with_dependencies; } | digest)
guest_id=$({ echo "$base_id"; declare -f build_guest put unpack_kernel; cat "$here/init"
  host_programs | while read -r p f; do stat -c "$p %n %s %Y" "$f"; done; } | digest)
base=$cache/base-$flavor-$base_id.tar.zst guest=$cache/guest-$flavor-$guest_id

finished() { [ -e "$guest/initrd" ]; }

main() {
  if ! finished; then
    "$here/../../scripts/deps.sh" zfsvm
    mkdir -p "$cache"
    exec 9>"$cache/lock-$flavor"
    flock -n 9 || { say 'waiting for another build'; flock 9; }
  fi
  if ! finished; then
    work=$cache/work-$flavor
    rm -rf "$work" # of a build that was killed
    trap 'rm -rf "$work"' EXIT
    trap 'exit 130' HUP INT TERM
    mkdir "$work"
    [ -s "$base" ] || build_base
    build_guest
    # What other versions of this recipe have made, and nobody has used for long.
    find "$cache" -mindepth 1 -maxdepth 1 \( -name 'base-*' -mtime +30 -o -name 'guest-*' -mtime +1 \) -exec rm -rf {} +
    say "built: $(paste -sd, "$guest/versions")"
  fi
  touch -c "$base" "$guest"
  echo "$guest"
}
main && exit # as a whole: the file may be edited while this runs
