#!/usr/bin/env bash
# The path of a newcomer, on a machine as new as tools/as_new.sh can make it: a fresh clone,
# `make demo` with all that it installs, then the commands of the tutorial, taken from the page
# itself and run one block after the other. A log is kept.
#
#   bash tools/newcomer.sh [FOLDER]     FOLDER: where the log goes; default: a temporary folder
#
# Commands of the tutorial that run until Ctrl-C are left out. Exit 0: every command worked.
set -euo pipefail
say() { printf '\n== %s\n' "$*"; }

if [ "${1:-}" = --in-clone ]; then
  git log -1 --oneline
  say "make demo"
  make demo
  say "the tutorial, from docs/tutorial.md"
  # One shell for all of it, as a reader has; -x prints each command before its output.
  commands=$(.venv/bin/python tests/docs_blocks.py docs/tutorial.md)
  grep -c . <<<"$commands" | sed 's/$/ lines of commands/'
  bash -exo pipefail <(printf '%s\n' "$commands")
  say "done"
  exit
fi

tools=$(cd "$(dirname "$0")" && pwd)
place=${1:-$(mktemp -d)}
mkdir -p "$place"
log=$(cd "$place" && pwd)/newcomer.log
began=$SECONDS status=0
bash "$tools/as_new.sh" bash tools/newcomer.sh --in-clone 2>&1 | tee "$log" || status=${PIPESTATUS[0]}
echo "exit $status after $((SECONDS - began)) s; log: $log"
exit "$status"
