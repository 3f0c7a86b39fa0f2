#!/usr/bin/env bash
# Run a command in a fresh clone of this repository, as on a machine where nothing ran before.
#
#   bash tools/as_new.sh [--with-venv] COMMAND [ARGUMENT...]
#
# Always new and empty: HOME, the XDG folders, TMPDIR, and the environment but for a short list.
# Where private namespaces are permitted (root on Linux) /tmp, /var/tmp, /dev/shm and the process
# table are new, too, the clone is mounted over the repository, and a process that the command leaves
# behind is an error. Elsewhere a notice says what is not checked.
#
# The clone has what is committed, and the changes of tracked files. With --with-venv it has the
# .venv of the repository; without namespaces the command then runs in the repository itself.
set -euo pipefail

# Second part, inside the namespaces: mount the new folders, run the command, look for processes.
if [ "${1:-}" = --inside ]; then
  fresh=$2 root=$3 venv=$4 data=$5
  shift 5
  mkdir -m 1777 "$fresh/tmp" "$fresh/var-tmp"
  show() { # SOURCE PLACE: also where PLACE is below a folder that is replaced
    local place=$2
    case $2 in
      /tmp/*) place=$fresh/tmp${2#/tmp} ;;
      /var/tmp/*) place=$fresh/var-tmp${2#/var/tmp} ;;
    esac
    mkdir -p "$place"
    mount --rbind "$1" "$place"
  }
  [ -z "$venv" ] || { mkdir "$fresh/clone/.venv" && mount --rbind "$venv" "$fresh/clone/.venv"; }
  [ ! -d "$data" ] || show "$data" "$data"
  show "$fresh/home" "$fresh/home"
  show "$fresh/clone" "$root"
  mount --rbind "$fresh/tmp" /tmp
  mount --rbind "$fresh/var-tmp" /var/tmp
  mount -t tmpfs -o mode=1777 tmpfs /dev/shm
  cd "$root"
  status=0
  "$@" || status=$?
  # what is about to end gets time for it
  for ((second = ${AS_NEW_PATIENCE:-30}; second >= 0; second--)); do
    left=
    for process in /proc/[0-9]*; do # all of the new process table
      [ "$process" != /proc/$$ ] || continue
      # the state, not the command line, says what is dead: that is empty for a moment during exec
      { read -r stat <"$process/stat"; } 2>/dev/null || continue
      case ${stat##*) } in Z* | X*) continue ;; esac
      words=$(tr '\0' ' ' 2>/dev/null <"$process/cmdline" | cut -c 1-300) || true
      left+="left behind: process ${process#/proc/}: ${words:-${stat%%)*})}"$'\n'
    done
    [ -n "$left" ] && [ "$second" -gt 0 ] || break
    sleep 1
  done
  printf %s "$left" >&2
  [ -z "$left" ] || [ "$status" -ne 0 ] || status=1
  exit "$status"
fi

root=$(cd "$(dirname "$0")/.." && pwd -P)
venv=
if [ "${1:-}" = --with-venv ]; then
  venv=$(cd "$root/.venv" && pwd -P)
  shift
fi
fresh=$(mktemp -d /var/tmp/as-new.XXXXXX)
trap 'rm -rf --one-file-system "$fresh"' EXIT
mkdir "$fresh/home" "$fresh/t"
if [ -e "$root/.git" ]; then
  git clone --quiet "$root" "$fresh/clone"
  git -C "$root" diff --binary HEAD | git -C "$fresh/clone" apply --allow-empty
else # unpacked, not cloned: all but what tools have made
  mkdir "$fresh/clone"
  tar -C "$root" -cf - --exclude=./.venv --exclude=./.venv-peers --exclude=__pycache__ \
    --exclude='./.*_cache' --exclude=./.hypothesis --exclude=./demo --exclude=./site . |
    tar -C "$fresh/clone" -xf -
fi
if [ -n "$venv" ]; then # not older than what it was installed from
  for name in pyproject.toml constraints.txt; do touch -r "$root/$name" "$fresh/clone/$name"; done
fi

# What a new machine has: a path, a language, and the settings of its network and of pip.
kept=()
while IFS= read -r name; do
  case $name in
    PATH | LANG | LC_* | TERM | TZ | USER | LOGNAME | SHELL | CI) ;;
    PIP_* | SSL_CERT_* | REQUESTS_CA_BUNDLE | CURL_CA_BUNDLE | *_proxy | *_PROXY | PYENV_*) ;;
    SHARDMILL_*) ;;
    *) continue ;;
  esac
  kept+=("$name=${!name}")
done < <(compgen -e)
for config in "$HOME/.config/pip/pip.conf" "$HOME/.pip/pip.conf"; do
  if [ -f "$config" ] && [ -z "${PIP_CONFIG_FILE:-}" ]; then kept+=("PIP_CONFIG_FILE=$config"); fi
done
if [ -d "$HOME/.pyenv" ]; then kept+=("PYENV_ROOT=${PYENV_ROOT:-$HOME/.pyenv}"); fi
new=(env -i "${kept[@]}" "HOME=$fresh/home")

private=(unshare --mount --pid --fork --kill-child --mount-proc)
if [ "$(id -u)" -eq 0 ] && "${private[@]}" true 2>/dev/null; then
  "${private[@]}" bash "$root/tools/as_new.sh" --inside \
    "$fresh" "$root" "$venv" "${SHARDMILL_REAL_DATA:-}" "${new[@]}" SHARDMILL_OWN_MACHINE=1 "$@"
else
  echo "as_new.sh: private namespaces are not permitted here: leftovers in /tmp, /var/tmp and" \
    "/dev/shm are neither hidden nor looked for, and no clone is mounted over the repository" >&2
  if [ -n "$venv" ]; then cd "$root"; else cd "$fresh/clone"; fi
  "${new[@]}" "TMPDIR=$fresh/t" "$@"
fi
