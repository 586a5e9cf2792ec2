#!/usr/bin/env bash
# Prints the path of axe.min.js, with which test/web checks that the web page is accessible. It is a package of npm,
# which the first run fetches into PANDO_AXE_DIR or else below ~/.cache/pando.
set -euo pipefail

version=4.14.1
sha256=29348999450cdf2849a8e70b7912fc2da85a849da39c0d0d5394f51d4a9ed95c
dir=${PANDO_AXE_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/pando}/axe-core-$version
if [ ! -e "$dir/axe.min.js" ]; then
  if ! type -P npm >/dev/null; then
    echo "axe.sh: there is no npm, which fetches axe-core $version: run \`make deps\`" >&2
    exit 1
  fi
  mkdir -p "$dir"
  tmp=$(mktemp -d "$dir/XXXXXX")
  trap 'rm -rf "$tmp"' EXIT
  (cd "$tmp" && npm pack --silent "axe-core@$version" >/dev/null && tar -xzf ./*.tgz)
  echo "$sha256  $tmp/package/axe.min.js" | sha256sum --check --quiet >&2
  mv "$tmp/package/axe.min.js" "$dir/axe.min.js"
fi
echo "$dir/axe.min.js"
