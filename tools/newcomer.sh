#!/usr/bin/env bash
# The path of a newcomer, as printed: a fresh clone, `make demo`, then the commands of the tutorial,
# taken from the page itself and run one block after the other. A log of it all is kept.
#
#   bash tools/newcomer.sh [FOLDER]     FOLDER: where the clone goes; default: a temporary folder
#
# What the tutorial runs until Ctrl-C is left to you. Exit 0: every command worked.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
place=${1:-$(mktemp -d)}
mkdir -p "$place"
place=$(cd "$place" && pwd)
log=$place/newcomer.log
clone=$place/shardmill
unset PYTHONPATH MYPYPATH VIRTUAL_ENV

say() { printf '\n== %s\n' "$*"; }

path() {
  say "git clone"
  git clone --quiet "$here" "$clone"
  cd "$clone"
  git log -1 --oneline
  say "make demo"
  make demo
  say "the tutorial, from docs/tutorial.md"
  # One shell for all of it, as a reader has; -x prints each command before its output.
  .venv/bin/python tests/docs_blocks.py docs/tutorial.md > "$place/tutorial.sh"
  grep -c . "$place/tutorial.sh" | sed 's/$/ lines of commands/'
  bash -exo pipefail "$place/tutorial.sh"
  say "done"
}

began=$SECONDS
# Not `path || ...`: there bash would go on after a command that failed.
set +e
(
  set -e
  path
) 2>&1 | tee "$log"
status=${PIPESTATUS[0]}
echo "exit $status after $((SECONDS - began)) s; log: $log"
exit "$status"
