#!/usr/bin/env bash
# What only a GPU can show, with whatever is installed on this machine:  bash tools/gpu_checks.sh [--out FOLDER]
# It installs nothing: a part whose packages are not here is named and left out.
# In the order in which to look at it: gradients against the CPU, vLLM beside the trainer, training, weights to other
# processes, speed and memory. docs/gpu_results.md has the bounds, and what is done by hand before and after. Writes
# FOLDER/gpu_checks.json and FOLDER/gpu_checks.md (default: runs/gpu_checks/) and prints the table. Without a GPU it
# runs the parts that can run, small, and names the others. Ends with 1 when a part failed.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
for python in ${PYTHON:-"${VIRTUAL_ENV:-$root/.venv}/bin/python" python3}; do
    "$python" -c 'import torch' 2>/dev/null && PYTHON="$python" && break
done
[ -n "${PYTHON:-}" ] || {
    echo "no Python with torch is found: \`. tools/setup_env.sh gpu\` makes an environment, or name one: PYTHON=PATH" >&2
    exit 2
}
PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec "$PYTHON" "$root/tools/gpu_checks.py" "$@"
