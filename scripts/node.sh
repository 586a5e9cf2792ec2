#!/usr/bin/env bash
# Runs a command with what internal/front/mcp/testdata/conformance/package.json lists first in PATH, and a Node of its own:
#   scripts/node.sh conformance list
# The first run with these packages installs them, in PANDO_NODE_DIR or else below ~/.cache/pando. It needs npm.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
packages=$root/internal/front/mcp/testdata/conformance

sum=$(sha256sum "$packages/package.json" "$packages/package-lock.json" | cut -d ' ' -f 1 | sha256sum | cut -c1-16)
dir=${PANDO_NODE_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/pando}/node-$sum
if [ ! -e "$dir/complete" ]; then
  if ! type -P npm >/dev/null; then
    echo "node.sh: there is no npm here: run \`make deps\`" >&2
    exit 1
  fi
  mkdir -p "$dir"
  # Another checkout may be installing them.
  exec 9>"$dir/lock"
  flock 9
  if [ ! -e "$dir/complete" ]; then
    cp "$packages/package.json" "$packages/package-lock.json" "$dir/"
    npm ci --prefix "$dir" --no-audit --no-fund --silent >&2
    touch "$dir/complete"
  fi
  exec 9>&-
fi

export PATH="$dir/node_modules/.bin:$PATH"
exec "$@"
