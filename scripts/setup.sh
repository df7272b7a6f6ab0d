#!/usr/bin/env bash
# Makes .venv from a hashed lock. Nothing is downloaded when the venv's stamp matches the lock.
#   scripts/setup.sh core     what serving needs            (make serve)
#   scripts/setup.sh dev      core + tests and checks       (make test)
# OFFLINE=1 installs from WHEELHOUSE (default ./wheelhouse) only; PYTHON names an interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
kind=${1:-core}
case "$kind" in core) lock=requirements.lock ;; dev) lock=requirements-dev.lock ;; *)
  echo "setup: unknown kind '$kind'; use core or dev" >&2; exit 2 ;; esac
venv=.venv

install_hint() {
  if [ -r /etc/os-release ]; then . /etc/os-release; fi
  case "${ID:-} ${ID_LIKE:-}" in
    *debian* | *ubuntu*) echo "apt-get install -y python3 python3-venv" ;;
    *fedora* | *rhel*) echo "dnf install -y python3.11" ;;
    *arch*) echo "pacman -S python" ;;
    *alpine*) echo "apk add python3 py3-pip" ;;
    *) if [ "$(uname -s)" = Darwin ]; then echo "brew install python@3.12"; else echo "install Python 3.11 or newer from your system's packages"; fi ;;
  esac
}

find_python() {
  if [ -n "${PYTHON:-}" ] && ! command -v "$PYTHON" >/dev/null 2>&1; then
    echo "setup: PYTHON=$PYTHON is no program; leave it out to have one found" >&2
    exit 2
  fi
  for candidate in ${PYTHON:-} python3 python3.13 python3.12 python3.11 python; do
    if command -v "$candidate" >/dev/null 2>&1 && "$candidate" - <<'PY' >/dev/null 2>&1
import sys, venv, ensurepip
sys.exit(not (3, 11) <= sys.version_info[:2])
PY
    then command -v "$candidate"; return 0; fi
  done
  return 1
}

stamp_of() { { cat "$1" pyproject.toml; pwd; } | "$venv/bin/python" -c 'import hashlib,sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())' 2>/dev/null; }
stamped() { [ -x "$venv/bin/python" ] && [ -r "$venv/.stamp-$1" ] && [ "$(cat "$venv/.stamp-$1")" = "$(stamp_of "$2")" ]; }

# A dev venv holds all that the core needs.
if stamped "$kind" "$lock" || { [ "$kind" = core ] && stamped dev requirements-dev.lock; }; then exit 0; fi

python=$(find_python) || {
  echo "setup: Python 3.11 or newer with venv and ensurepip was not found. Install it with:" >&2
  echo "    $(install_hint)" >&2
  exit 1
}
[ -x "$venv/bin/python" ] || { echo "==> making $venv with $("$python" --version)"; "$python" -m venv "$venv"; }
rm -f "$venv"/.stamp-*
source_args=()
if [ "${OFFLINE:-0}" = 1 ]; then
  house=${WHEELHOUSE:-wheelhouse}
  [ -d "$house" ] || {
    echo "setup: OFFLINE=1 needs a wheelhouse at '$house'. On a machine with network run: make wheelhouse" >&2
    exit 1
  }
  source_args=(--no-index --find-links "$house")
fi
echo "==> installing $lock (about 100 MB the first time, hashes checked)"
"$venv/bin/python" -m pip install -qq --disable-pip-version-check --require-hashes --no-deps \
  ${source_args[@]+"${source_args[@]}"} -r "$lock" || {
  echo "setup: pip could not install $lock, see above; without network use OFFLINE=1 and a wheelhouse" >&2
  exit 1
}
"$venv/bin/python" -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation --no-index -e . >&2
stamp_of "$lock" >"$venv/.stamp-$kind"
