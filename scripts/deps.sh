#!/usr/bin/env bash
# Installs, on Debian and Ubuntu, what is missing to build and run Pando:
#   scripts/deps.sh [--try] [run|all|zfsvm|dist]
# run: what `make demo` needs. all: what tests and lint need, too. zfsvm: what
# `make test-zfs` needs to build and to run a guest with OpenZFS. dist: what
# `make test-dist` needs to install packages and to run a program for arm64.
# --try: what cannot be installed is a warning, not an error.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
try=''
if [ "${1:-}" = --try ]; then
  try=1
  shift
fi
what=${1:-all}

again='make deps'
case $what in zfsvm | dist) again="scripts/deps.sh $what" ;; esac
say() { printf 'deps: %s\n' "$*" >&2; }
give_up() {
  say "$*"
  if [ -n "$try" ]; then
    say "going on without; what needs it will say so"
    exit 0
  fi
  exit 1
}

have() { PATH="$PATH:/usr/sbin:/sbin" type -P "$1" >/dev/null; }
packages=()
need() { have "$1" || packages+=("$2"); }

need mkfs.ext4 e2fsprogs
need mkfs.xfs xfsprogs
need git git
need make make
[ -s /etc/ssl/certs/ca-certificates.crt ] || packages+=(ca-certificates)
if [ "$what" = all ]; then
  need mkfs.btrfs btrfs-progs
  need qemu-img qemu-utils
  need setfacl acl
  need setfattr attr
  need zstd zstd
  need sqlite3 sqlite3
  # Debian keeps its programs out of PATH.
  compgen -G '/usr/lib/postgresql/*/bin/pg_amcheck' >/dev/null || need pg_amcheck postgresql
  need shellcheck shellcheck
  need fio fio
  need stress-ng stress-ng
  # The tests of the system's Python: a package for each of its versions.
  /usr/bin/python3 -c 'import test.test_os' 2>/dev/null || packages+=(python3 '^libpython3\.[0-9]+-testsuite$')
  need curl curl
  need strace strace
  need gcc gcc
  need sfdisk fdisk
  need losetup mount
  need groff groff-base
  need dockerd docker.io
  # Newer releases have the client in a package of its own.
  have docker || ! apt-cache show docker-cli >/dev/null 2>&1 || packages+=(docker-cli)
fi
# With the emulation of Debian 12's own qemu, 7.2, a third of the guests crash.
qemu_is_good() {
  local version
  version=$(qemu-system-x86_64 --version 2>/dev/null | sed -n 's/.* version \([0-9]*\)\..*/\1/p')
  [ "${version:-0}" -ge 8 ]
}
backport=()
if [ "$what" = zfsvm ]; then
  for p in apt-get dpkg-deb; do have $p || give_up "missing: $p. The guest is made of packages of Debian 12, on Debian"; done
  [ "$(uname -m)" = x86_64 ] || give_up "this is $(uname -m): the guest is made on x86_64 only"
  need gcc-12 gcc-12
  need strip binutils
  need xz xz-utils
  need zstd zstd
  need ldconfig libc-bin
  need mkfs.btrfs btrfs-progs
  need dmsetup dmsetup
  need findmnt util-linux
  need setfacl acl
  need setfattr attr
  [ -e /usr/share/keyrings/debian-archive-keyring.gpg ] || packages+=(debian-archive-keyring)
  libraries=$(PATH=$PATH:/sbin ldconfig -p)
  for lib in libelf.so.1=libelf1 libkmod.so.2=libkmod2 libtirpc.so.3=libtirpc3 libcrypto.so.3=libssl3 libgcc_s.so.1=libgcc-s1; do
    grep -qF "${lib%=*} " <<<"$libraries" || packages+=("${lib#*=}")
  done
  qemu_is_good || backport+=(qemu-system-x86)
fi
# Debian 12's own qemu-user, 7.2, does not translate what an import needs.
qemu_user_is_good() {
  local version
  version=$(qemu-aarch64-static --version 2>/dev/null | sed -n '1s/.* version \([0-9]*\)\..*/\1/p')
  [ "${version:-0}" -ge 10 ]
}
if [ "$what" = dist ]; then
  for p in apt-get dpkg-deb; do have $p || give_up "missing: $p. The packages are tested on Debian and Ubuntu only"; done
  need mmdebstrap mmdebstrap
  need rpm rpm
  need unshare util-linux
  [ -e /usr/share/keyrings/debian-archive-keyring.gpg ] || packages+=(debian-archive-keyring)
  # On arm64 its own programs run without it.
  if [ "$(uname -m)" != aarch64 ] && ! qemu_user_is_good; then backport+=(qemu-user-static); fi
fi
go=''
"$root/scripts/go.sh" true 2>/dev/null || go=1
if [ ${#packages[@]} -eq 0 ] && [ ${#backport[@]} -eq 0 ] && [ -z "$go" ]; then
  exit 0
fi

list="${packages[*]} ${backport[*]} ${go:+a Go compiler}"
list=$(xargs <<<"$list")
have apt-get || give_up "missing: $list. This is no Debian or Ubuntu: install it with this system's package manager"
sudo=()
if [ "$(id -u)" -ne 0 ]; then
  if ! have sudo; then
    give_up "missing: $list. Installing it needs root, and there is no sudo: run \`$again\` as root"
  elif ! sudo -n true 2>/dev/null && [ ! -t 0 ]; then
    give_up "missing: $list. Installing it needs root, and sudo wants a password that nobody can type here: run \`$again\` as root"
  fi
  sudo=(sudo)
fi
apt() { "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q -y -o DPkg::Lock::Timeout=120 -o Dpkg::Use-Pty=0 "$@" >&2; }

# newest_go [APT-OPTION...]: the newest package of Go that can build this, by itself
# or by downloading a newer toolchain.
newest_go() {
  apt-cache "$@" search --names-only '^golang-1\.[0-9]+-go$' | awk '{ print $1 }' |
    awk -F'[.-]' '$3 >= 21' | sort -V | tail -n 1
}

say "installing: $list"
apt update || say "the package lists could not be brought up to date; going on with those that are there"
if [ -n "$go" ]; then
  pkg=$(newest_go)
  [ -z "$pkg" ] || packages+=("$pkg")
fi
if [ ${#packages[@]} -gt 0 ]; then
  apt install --no-install-recommends "${packages[@]}" || give_up "apt-get could not install: ${packages[*]}"
fi

# Debian 12 has Go 1.19 only, and an old qemu; its backports have newer ones. They
# are used for this one installation, and are not added to the system's package
# sources.
codename=$(sed -n 's/^VERSION_CODENAME=//p' /etc/os-release)
if [ -n "$go" ] && [ -z "$pkg" ] && [ "$codename" = bookworm ]; then
  backport+=(golang)
fi
if [ ${#backport[@]} -gt 0 ] && [ "$codename" != bookworm ]; then
  apt install --no-install-recommends "${backport[@]}" || give_up "apt-get could not install: ${backport[*]}"
elif [ ${#backport[@]} -gt 0 ]; then
  say "${backport[*]}: from bookworm-backports"
  tmp=$(mktemp -d)
  trap 'rm -rf "$tmp"' EXIT
  mkdir -p "$tmp/lists/partial"
  printf 'deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian %s main\n' bookworm bookworm-backports >"$tmp/sources.list"
  chmod -R a+rX "$tmp" # apt fetches as a user of its own
  from=(-o "Dir::Etc::SourceList=$tmp/sources.list" -o Dir::Etc::SourceParts=/dev/null -o "Dir::State::Lists=$tmp/lists" -o "Dir::Cache::pkgcache=" -o "Dir::Cache::srcpkgcache=")
  "${sudo[@]}" chown _apt "$tmp/lists/partial" 2>/dev/null || true
  if apt "${from[@]}" update; then
    for pkg in "${backport[@]}"; do
      if [ "$pkg" = golang ]; then pkg=$(newest_go "${from[@]}"); fi
      [ -z "$pkg" ] || apt "${from[@]}" -t bookworm-backports install --no-install-recommends "$pkg" || true
    done
  fi
fi
if [ "$what" = zfsvm ] && ! qemu_is_good; then
  give_up "there is no qemu-system-x86_64 of version 8 or newer here, which runs the guest: install it"
fi
if [ "$what" = dist ] && [ "$(uname -m)" != aarch64 ] && ! have qemu-aarch64-static; then
  give_up "there is no qemu-aarch64-static here, which runs programs for arm64: install it"
fi

if [ -n "$go" ] && ! "$root/scripts/go.sh" true; then
  give_up "there is no package of Go 1.21 or newer here: install Go from https://go.dev/dl/ into /usr/local/go, then try again"
fi
