#!/usr/bin/env bash
# Sets up .venv if needed, then lint, types, spelling and the tests that need no GPU.
#
# Every step runs even if an earlier one failed; the exit code is non-zero if any did. Arguments go to
# pytest (for example: scripts/test.sh tests/unit -k config).
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
bash "$root/scripts/setup_env.sh"
bin="$(realpath -m "${VLLM_DSPARK_VENV:-$root/.venv}")/bin"
cd "$root"
failed=()

step() {
  echo "== $*"
  "$bin/$1" "${@:2}" || failed+=("$1 ${2:-}")
}

step ruff check .
step ruff format --check .
step mypy
step typos
# Most tests start servers, whose processes load one after the other: two tests at a time use two
# cores. What one file shares, such as a server, stays in one process; the longest files come first.
step pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=10 "$@"

if ((${#failed[@]})); then
  printf 'failed: %s\n' "${failed[@]}" >&2
  exit 1
fi
