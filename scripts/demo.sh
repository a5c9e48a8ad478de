#!/usr/bin/env bash
# Sets up .venv if needed and runs `vllm-dspark demo` with the arguments given.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
bash "$root/scripts/setup_env.sh"
exec "${VLLM_DSPARK_VENV:-$root/.venv}/bin/vllm-dspark" demo "$@"
