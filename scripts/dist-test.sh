#!/usr/bin/env bash
# Builds what `make dist` builds, and tests it:
#
#   scripts/dist-test.sh [DIR]      DIR: packages that are built already, which are not built again
#
# - a second build, elsewhere, with other settings and nothing in Go's cache, has the same bytes;
# - the same files are in the tarball, the .deb and the .rpm;
# - in a clean Debian 12 apt installs the .deb, pando works there, and after the removal nothing is left;
# - the .rpm is installed into an empty root, verified and removed;
# - the program for arm64 runs under qemu-user, as far as that translates system calls.
#
# As root. Mounts are made in namespaces that end with it; what it writes is in one temporary directory.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
root=$PWD

RELEASE=bookworm
MIRROR=http://deb.debian.org/debian

unset PANDO_VERSION SOURCE_DATE_EPOCH PANDO_POOL

failed=0
good() { printf 'ok    %s\n' "$1"; }
bad() {
  printf 'FAIL  %s\n' "$1"
  failed=$((failed + 1))
}
# check NAME COMMAND...: shows what the command printed if it fails.
check() {
  local name=$1 out began=$SECONDS
  shift
  if out=$("$@" 2>&1); then
    good "$name ($((SECONDS - began)) s)"
  else
    bad "$name (exit status $?)"
    printf '      %s\n' "${out//$'\n'/$'\n'      }"
  fi
}
die() {
  printf 'dist-test: %s\n' "$*" >&2
  exit 1
}
[ "$(id -u)" -eq 0 ] || die 'this makes a Debian to install packages in: run it as root'
for program in mmdebstrap rpm unshare dpkg-deb; do
  type -P "$program" >/dev/null || die "$program is missing: run scripts/deps.sh dist"
done

tmp=$(mktemp -d "${TMPDIR:-/tmp}/pando-dist-test.XXXXXX") || exit
trap 'rm -rf --one-file-system "$tmp"' EXIT
trap 'exit 130' HUP INT TERM

# --- two builds ---

# copy_source DIR: all files of the project, also those that are not committed yet, without git.
copy_source() {
  mkdir -p "$1"
  git ls-files -co --exclude-standard -z | while IFS= read -r -d '' f; do [ ! -e "$f" ] || printf '%s\0' "$f"; done |
    tar --null -T - -cf - | tar -C "$1" -xf -
}

build_again() {
  local version epoch modules
  version=$(git describe --abbrev=12 --always --dirty) epoch=$(git log -1 --format=%ct) || return
  modules=$(scripts/go.sh go env GOMODCACHE) || return
  umask 077
  copy_source "$tmp/some where/else" || return
  mkdir -p "$tmp/home" "$tmp/temporary"
  env -i PATH="$PATH" HOME="$tmp/home" TMPDIR="$tmp/temporary" GOMODCACHE="$modules" GOCACHE="$tmp/cache" \
    GOPROXY="${GOPROXY:-}" HTTPS_PROXY="${HTTPS_PROXY:-}" https_proxy="${https_proxy:-}" \
    TZ=Pacific/Auckland LANG=de_DE.UTF-8 USER=somebody HOSTNAME=elsewhere \
    PANDO_VERSION="$version" SOURCE_DATE_EPOCH="$epoch" \
    "$tmp/some where/else/scripts/dist.sh" "$tmp/two"
}

same_bytes() {
  diff -r "$built" "$tmp/two" || return
  [ "$(find "$tmp/two" -type f | wc -l)" -eq 9 ] || { echo "there should be 9 files"; ls "$tmp/two"; return 1; }
}

if [ $# -gt 0 ]; then
  built=$(cd "$1" && pwd) || exit
else
  built=$tmp/one
  check 'make dist' scripts/dist.sh "$built"
  check 'make dist elsewhere, without git and with an empty cache of Go' build_again
  check 'both have the same bytes' same_bytes
  rm -rf "$tmp/cache" "$tmp/two" "$tmp/some where"
fi
[ -e "$built/SHA256SUMS" ] || die "there are no packages in $built"

# --- what is in them ---

# file ARCH FORMAT: the file of this format.
file() {
  local machine=x86_64
  [ "$1" = amd64 ] || machine=aarch64
  case $2 in
    tar) echo "$built"/pando-*-linux-"$1".tar.gz ;;
    sbom) echo "$built"/pando-*-linux-"$1".cdx.json ;;
    deb) echo "$built"/pando_*_"$1".deb ;;
    rpm) echo "$built"/pando-*."$machine".rpm ;;
  esac
}

# The names and modes of all files, below the prefix. Only zsh looks for completions in different places.
in_tar() { tar tvzf "$1" | awk '$1 !~ /^d/ { sub(/^[^\/]*\//, "", $6); print $1, $6 }'; }
in_deb() { dpkg-deb -c "$1" | awk '$1 !~ /^d/ { sub(/^\.\/usr\//, "", $6); sub("vendor-completions/_", "site-functions/_", $6); print $1, $6 }'; }
in_rpm() { rpm -qp --nosignature --qf '[%{FILEMODES:perms} %{FILENAMES}\n]' "$1" | awk '$1 !~ /^d/ { sub(/^\/usr\//, "", $2); print $1, $2 }'; }

same_files() {
  local arch=$1
  in_tar "$(file "$arch" tar)" | sort >"$tmp/files.tar"
  in_deb "$(file "$arch" deb)" | sort >"$tmp/files.deb"
  in_rpm "$(file "$arch" rpm)" | sort >"$tmp/files.rpm"
  diff "$tmp/files.tar" "$tmp/files.deb" || return
  diff "$tmp/files.tar" "$tmp/files.rpm" || return
  local f
  for f in '-rwxr-xr-x bin/pando' '-rw-r--r-- share/man/man1/pando-golden-import.1.gz' \
    '-rw-r--r-- share/man/man7/pando-exit-codes.7.gz' '-rw-r--r-- share/doc/pando/copyright' \
    '-rw-r--r-- share/bash-completion/completions/pando' '-rw-r--r-- share/zsh/site-functions/_pando' \
    '-rw-r--r-- share/fish/vendor_completions.d/pando.fish' \
    '-rwxr-xr-x share/pando/ci/pando-ci' '-rwxr-xr-x share/pando/ci/github/job-started.sh' \
    '-rwxr-xr-x share/pando/ci/gitlab/prepare' '-rwxr-xr-x share/pando/ci/buildkite/pre-exit' \
    '-rwxr-xr-x share/pando/ci/shell/job.sh' '-rw-r--r-- share/pando/ci/example.conf' \
    '-rw-r--r-- share/pando/prometheus/alerts.yml' '-rw-r--r-- share/pando/prometheus/prometheus.yml' \
    '-rw-r--r-- share/pando/grafana/pando.json' \
    '-rw-r--r-- lib/systemd/system/pando.service' '-rw-r--r-- lib/systemd/system/pando.socket' \
    '-rw-r--r-- lib/sysusers.d/pando.conf'; do
    grep -qxF -- "$f" "$tmp/files.tar" || { echo "missing: $f"; return 1; }
  done
}

# program ARCH: unpacks the tarball, and checks that its program is a static one of the right kind with all modules
# in the bill.
program() {
  local arch=$1 info
  mkdir -p "$tmp/$arch"
  tar xzf "$(file "$arch" tar)" -C "$tmp/$arch" --strip-components=1 || return
  info=$(scripts/go.sh go version -m "$tmp/$arch/bin/pando") || return
  for setting in "GOARCH=$arch" CGO_ENABLED=0 -trimpath=true; do
    grep -qF -- "$setting" <<<"$info" || { echo "not built with $setting"; return 1; }
  done
  if grep -qaF "$root" "$tmp/$arch/bin/pando"; then
    echo "the program has $root in it"
    return 1
  fi
  local missing=0 module version
  while read -r module version; do
    grep -qF "\"purl\": \"pkg:golang/$module@$version\"" "$(file "$arch" sbom)" || { echo "not in the bill: $module $version"; missing=1; }
    grep -qF "$module $version" "$tmp/$arch/share/doc/pando/copyright" || { echo "no license of $module $version"; missing=1; }
  done < <(awk '$1 == "dep" { print $2, $3 }' <<<"$info")
  return $missing
}

check 'checksums' env -C "$built" sha256sum -c --quiet SHA256SUMS
for arch in amd64 arm64; do
  check "$arch: the same files in the tarball, the .deb and the .rpm" same_files "$arch"
  check "$arch: program, bill of materials and licenses" program "$arch"
done
case $(uname -m) in
  x86_64) native=amd64 ;;
  aarch64) native=arm64 ;;
  *) native=none ;;
esac

# --- a clean Debian ---

clean_debian() {
  mmdebstrap --quiet --mode=root --variant=minbase --skip=cleanup/apt/lists "$RELEASE" "$tmp/debian" "$MIRROR" &&
    cp "$(file "$native" deb)" "$tmp/debian/root/pando.deb" &&
    cp scripts/dist-test-debian.sh "$tmp/debian/root/test.sh"
}

# in_debian STEP: runs a step of scripts/dist-test-debian.sh. Whatever it mounts and starts ends with it.
in_debian() {
  # shellcheck disable=SC2016
  unshare --mount --propagation private --pid --fork --kill-child -- bash -ec '
    mount --bind /dev "$1/dev"
    mount -t proc proc "$1/proc"
    mount -t sysfs sysfs "$1/sys"
    exec chroot "$1" env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 DEBIAN_FRONTEND=noninteractive \
      bash /root/test.sh "$2"' - "$tmp/debian" "$1"
}

if [ "$native" = none ]; then
  echo "SKIPPED: there are no packages for $(uname -m)"
else
  check "a clean Debian $RELEASE" clean_debian
  check 'apt installs the .deb with what it depends on, and removes it' in_debian apt
  check 'dpkg installs it, completions load, each command has its manual page' in_debian install
  check 'init, import, clone, run, destroy and deinit work there' in_debian use
  check 'dpkg removes it, and nothing is left' in_debian remove
  rm -rf --one-file-system "$tmp/debian"
fi

# --- the .rpm ---

rpm_in_empty_root() {
  local r=$tmp/rpm package
  package=$(file "$native" rpm)
  mkdir -p "$r"
  # The root is empty: there is nothing that it could depend on, and no shell for the scripts.
  rpm --root "$r" --nosignature -i --nodeps --noscripts "$package" || return
  rpm -qp --nosignature --scripts "$package" | grep -F 'systemd-sysusers pando.conf' || return
  rpm --root "$r" -V --nodeps pando || return
  "$r/usr/bin/pando" version || return
  rpm --root "$r" -e --nodeps --noscripts pando || return
  if find "$r" -path "$r/var/lib/rpm" -prune -o -iname '*pando*' -print | grep .; then
    echo 'this is left'
    return 1
  fi
}
rpm_depends() {
  [ "$(rpm -qp --nosignature --requires "$1" | grep -v '^rpmlib' | xargs)" = 'e2fsprogs xfsprogs' ]
}
if [ "$native" != none ]; then
  check 'rpm installs, verifies and removes the .rpm' rpm_in_empty_root
  for arch in amd64 arm64; do check "$arch: the .rpm depends on e2fsprogs and xfsprogs" rpm_depends "$(file "$arch" rpm)"; done
fi

# --- arm64 ---

# From version 10 on, qemu-user translates what most verbs need on plain pools. Debian 12 has that in its backports;
# its own 7.2 does not know openat2. No version knows fsopen and mount_setattr, with which pando mounts, nor the
# ioctls that make subvolumes. statx has no mount IDs there, without which pando destroys no volume. So mounts,
# `pando run`, destroy and the other drivers are not tested on arm64. The program for this machine opens the pool that
# the one for arm64 has made, checks it and removes it.
arm64() {
  local p=$tmp/pool
  arm() { "$qemu" "$tmp/arm64/bin/pando" --pool "$p" "$@"; }
  here() { "$tmp/$native/bin/pando" --pool "$p" "$@"; }
  set -e
  arm version | grep -F linux/arm64
  arm clone --help | grep -F -- --ephemeral
  arm init --driver plain
  arm deinit
  [ ! -e "$p" ]
  [ "${version%%.*}" -ge 10 ] || return 0

  mkdir -p "$tmp/web"
  echo hello >"$tmp/web/page"
  arm init -q --driver plain
  [ "$(arm golden import -q web "$tmp/web")" = web@1 ]
  arm clone web job --count 3
  arm snapshot job-1 first
  [ "$(arm ls -q | xargs)" = 'job-1 job-2 job-3' ]
  [ "$(cat "$p"/data/objects/*.tree/page | uniq -c | xargs)" = '5 hello' ]
  arm show job-1@first
  arm fsck

  [ "$(here ls -q | xargs)" = 'job-1 job-2 job-3' ]
  here fsck
  here destroy job-1@first 'job-*'
  here deinit --force
  [ ! -e "$p" ]
}
qemu=$(type -P qemu-aarch64-static || type -P qemu-aarch64)
if [ "$native" = arm64 ]; then
  echo 'qemu-user is not needed: this is arm64'
elif [ -z "$qemu" ]; then
  bad 'qemu-aarch64-static is missing: run scripts/deps.sh dist'
else
  version=$("$qemu" --version | sed -n '1s/.* version \([0-9.]*\).*/\1/p')
  what='version, help, init, import, clone, snapshot, ls, show, fsck and deinit of a plain pool'
  [ "${version%%.*}" -ge 10 ] || what='version, help and init only: the rest needs version 10'
  # In a shell of its own: set -e does not reach into a function that is part of a condition.
  export tmp qemu version native
  export -f arm64
  check "arm64 under qemu-user $version: $what" bash -c arm64
fi

[ "$failed" -eq 0 ] || die "failed: $failed"
