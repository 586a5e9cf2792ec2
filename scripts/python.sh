#!/usr/bin/env bash
# Runs a command in a Python environment with what clients/python/requirements.txt lists:
#   scripts/python.sh python -m pytest
# The first run with these requirements makes the environment, in PANDO_PYTHON_DIR or else below ~/.cache/pando.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
requirements=$root/clients/python/requirements.txt

# Distributions keep the modules that make environments in packages of their own, for their own Python only.
python=''
for candidate in python3 /usr/bin/python3; do
  if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
    python=$(type -P "$candidate")
    break
  fi
done
if [ -z "$python" ]; then
  echo "python.sh: there is no Python 3.10 or newer with venv here: run \`make deps\`" >&2
  exit 1
fi

sum=$({ cat "$requirements" && "$python" -VV && echo "$python"; } | sha256sum | cut -c1-16)
dir=${PANDO_PYTHON_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/pando}/python-$sum
if [ ! -e "$dir/complete" ]; then
  mkdir -p "$dir"
  # Another checkout may be making it.
  exec 9>"$dir/lock"
  flock 9
  if [ ! -e "$dir/complete" ]; then
    "$python" -m venv --clear "$dir/venv" >&2
    "$dir/venv/bin/python" -m pip install --quiet --disable-pip-version-check -r "$requirements" >&2
    touch "$dir/complete"
  fi
  exec 9>&-
fi

export PATH="$dir/venv/bin:$PATH" VIRTUAL_ENV="$dir/venv" PYTHONDONTWRITEBYTECODE=1
exec "$@"
