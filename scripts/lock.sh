#!/usr/bin/env bash
# Remakes the two hashed locks from pyproject.toml (needs `uv` on PATH or in $UV).
# tokenizers names huggingface-hub as a dependency but never imports it on our path; it and what only it needs stay out
# of the core, which is installed with --no-deps.
set -euo pipefail
cd "$(dirname "$0")/.."
uv=${UV:-uv}
hub="huggingface-hub hf-xet fsspec filelock tqdm pyyaml packaging"
hub_only="anyio httpcore2 httpx2 httpx2-jsfetch idna truststore typing-extensions"
build=$(mktemp)
trap 'rm -f "$build"' EXIT
echo "setuptools==80.9.0" >"$build"
compile() { # OUTPUT EXCLUDED... -- ARGS...
  local out=$1 skip=()
  shift
  while [ "$1" != "--" ]; do skip+=(--no-emit-package "$1"); shift; done
  shift
  "$uv" pip compile pyproject.toml "$build" "$@" "${skip[@]}" --universal --generate-hashes --python-version 3.11 \
    --no-header --no-annotate --quiet --output-file "$out"
}
compile requirements.lock $hub $hub_only --
compile requirements-dev.lock huggingface-hub hf-xet fsspec -- --extra dev
