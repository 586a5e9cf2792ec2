#!/usr/bin/env bash
# Builds what is given to users, for amd64 and arm64, into a directory (default: dist):
#
#   scripts/dist.sh [DIR]
#
# Of each architecture a tarball, a .deb, an .rpm and a bill of materials (CycloneDX); and SHA256SUMS of all. The same
# commit, built with the same Go and gzip, has the same bytes: no file has a time, a path, a user or a name of the
# machine in it. Without git, PANDO_VERSION (such as v1.2.0) and SOURCE_DATE_EPOCH must be given. Otherwise
# they are those of the commit.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
export LC_ALL=C TZ=UTC
umask 022

NFPM=github.com/goreleaser/nfpm/v2/cmd/nfpm@v2.45.2

die() {
  printf 'dist: %s\n' "$*" >&2
  exit 1
}
go() { scripts/go.sh go "$@"; }

out=${1:-dist}
mkdir -p "$out"
out=$(cd "$out" && pwd)

# --- which version, of when ---

# The length of an abbreviated commit depends on how many commits a clone has, unless it is given.
version=${PANDO_VERSION:-$(git describe --abbrev=12 --always --dirty)} ||
  die 'git does not say which version this is: set PANDO_VERSION=v1.2.0, and SOURCE_DATE_EPOCH to its time in seconds since 1970'
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
[[ $SOURCE_DATE_EPOCH =~ ^[0-9]+$ ]] || die 'set SOURCE_DATE_EPOCH to the time of this version, in seconds since 1970'
case $version in
  *-dirty) echo "dist: files were changed since the last commit: nobody else can build $version" >&2 ;;
esac
day=$(date -u -d "@$SOURCE_DATE_EPOCH" +%Y-%m-%d)

# package_version DESCRIPTION: v1.2.0-rc.1-7-gabc of git becomes 1.2.0~rc.1+7.gabc, which package managers sort between
# 1.2.0~rc.1 and 1.2.0. A commit without a tag is older than any version.
package_version() {
  local v=$1 dirty='' after=''
  case $v in *-dirty) v=${v%-dirty} dirty=.dirty ;; esac
  if [[ $v =~ ^v[0-9] ]]; then
    if [[ $v =~ ^(.*)-([0-9]+)-(g[0-9a-f]+)$ ]]; then
      v=${BASH_REMATCH[1]} after=+${BASH_REMATCH[2]}.${BASH_REMATCH[3]}
    fi
    v=${v#v}
    v=${v//-/'~'}
    [ -n "$after" ] || dirty=${dirty/./+}
  else
    v=0.0.0+git${day//-/}.$v
  fi
  printf '%s\n' "$v$after$dirty"
}
PACKAGE_VERSION=$(package_version "$version")
[[ $PACKAGE_VERSION =~ ^[0-9][0-9A-Za-z.+~]*$ ]] || die "$version cannot be the version of a package"
export PACKAGE_VERSION

# --- what is the same for all architectures ---

tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
trap 'exit 130' HUP INT TERM

share=$tmp/share
mkdir -p "$share"/{bash-completion/completions,zsh/site-functions,fish/vendor_completions.d,doc/pando}
go run ./tools/manpages -version "$PACKAGE_VERSION" -date "$day" "$share/man"
gzip -9n "$share"/man/man*/*

# The hooks for CI, without what measures them.
mkdir -p "$share/pando"
cp -r examples/ci "$share/pando/ci"
rm "$share/pando/ci/run.sh" "$share/pando/ci/README.md"
cp -r contrib/prometheus contrib/grafana "$share/pando/"
rm "$share/pando/prometheus/alerts_test.yml"
chmod -R u=rwX,go=rX "$share/pando"

# The units of the service.
lib=$tmp/lib
mkdir -p "$lib"/{systemd/system,sysusers.d}
cp contrib/systemd/pando.{service,socket} "$lib/systemd/system/"
cp contrib/systemd/pando.sysusers "$lib/sysusers.d/pando.conf"

go build -o "$tmp/host/" ./cmd/pando ./tools/sbom
"$tmp/host/pando" completion bash >"$share/bash-completion/completions/pando"
"$tmp/host/pando" completion zsh >"$share/zsh/site-functions/_pando"
"$tmp/host/pando" completion fish >"$share/fish/vendor_completions.d/pando.fish"

# --- each architecture ---

# sbom ARGUMENT...: asks Go where the sources of modules are.
sbom() { scripts/go.sh "$tmp/host/sbom" "$@"; }

# package FORMAT ARCH: nfpm names the file as FORMAT wants it.
package() {
  (cd "$tree" && ARCH=$2 "$root/scripts/go.sh" go run "$NFPM" package --config "$root/scripts/nfpm.yaml" \
    --packager "$1" --target "$tmp/out/" >"$tmp/nfpm.log" 2>&1) || { cat "$tmp/nfpm.log" >&2; die "nfpm could not make the .$1 for $2"; }
}

mkdir "$tmp/out"
for arch in amd64 arm64; do
  name=pando-$PACKAGE_VERSION-linux-$arch
  tree=$tmp/$arch/$name
  mkdir -p "$tree"
  CGO_ENABLED=0 GOOS=linux GOARCH=$arch GOAMD64=v1 GOARM64=v8.0 GOEXPERIMENT='' GOFLAGS='-trimpath -buildvcs=false -mod=readonly' \
    go build -ldflags "-s -w -buildid= -X main.version=$version" -o "$tree/bin/pando" ./cmd/pando
  cp -r "$share" "$tree/share"
  cp -r "$lib" "$tree/lib"
  cp -r scripts/package "$tmp/$arch/package"
  sbom -version "$PACKAGE_VERSION" -sbom "$tmp/out/$name.cdx.json" -notices "$tmp/notices" "$tree/bin/pando"
  {
    printf 'Pando is licensed under the Apache License 2.0:\n\n'
    cat LICENSE
    printf '\n%s\n\n' "$(printf '=%.0s' {1..78})"
    cat "$tmp/notices"
  } >"$tree/share/doc/pando/copyright"
  find "$tree" -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +

  tar --sort=name --format=gnu --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner \
    --mode=u=rwX,go=rX -C "$tmp/$arch" -cf - "$name" | gzip -9n >"$tmp/out/$name.tar.gz"
  package deb "$arch"
  package rpm "$arch"
done

(cd "$tmp/out" && sha256sum -- * >SHA256SUMS)
# What an earlier version left would not be in SHA256SUMS.
rm -f "$out"/pando[-_]* "$out/SHA256SUMS"
cp "$tmp/out"/* "$out/"
(cd "$out" && du -h --apparent-size -- *)
