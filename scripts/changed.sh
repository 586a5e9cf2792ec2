#!/usr/bin/env bash
# Prints the files that differ from the newest landed commit, one a line:
#
#   scripts/changed.sh [--base]     that commit itself, or nothing if there is none
#
# .ci/landed names commits that have landed, one a line: the newest ancestor of HEAD among them counts. Files that are
# not committed count, too. Where there is no such commit, or no git, it prints "everything".
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# landed: the newest landed ancestor.
landed() {
  local commit best='' far=0 n
  [ -f .ci/landed ] || return 0
  while read -r commit _; do
    case $commit in '' | '#'*) continue ;; esac
    git merge-base --is-ancestor "$commit" HEAD 2>/dev/null || continue
    n=$(git rev-list --count "$commit..HEAD")
    if [ -z "$best" ] || [ "$n" -lt "$far" ]; then best=$commit far=$n; fi
  done <.ci/landed
  printf '%s\n' "$best"
}

base=$(landed)
if [ "${1:-}" = --base ]; then
  printf '%s\n' "$base"
  exit
fi
if [ -z "$base" ]; then
  echo everything
  exit
fi
files=$({
  git diff --no-renames --name-only "$base" --
  git ls-files -o --exclude-standard
} | sort -u)

# A commit that only moves the mark up to what stands before it would hide that from the gate.
if [ -z "$files" ] || [ "$files" = .ci/landed ]; then
  echo everything
else
  printf '%s\n' "$files"
fi
