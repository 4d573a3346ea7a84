#!/usr/bin/env bash
# What only a GPU can show, with whatever is installed on this machine:  bash tools/gpu_checks.sh [--out FOLDER]
# In the order in which to look at it: gradients against the CPU, vLLM beside the trainer, training, weights to other
# processes, speed and memory. docs/gpu_results.md has the bounds, and what is done by hand before and after. Writes
# FOLDER/gpu_checks.json and FOLDER/gpu_checks.md (default: runs/gpu_checks/) and prints the table. Without a GPU it
# runs the parts that can run, small, and names the others. Ends with 1 when a part failed.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
if [ -z "${PYTHON:-}" ]; then
    [ -x "$root/.venv/bin/python" ] || . "$root/tools/setup_env.sh" gpu # an environment that is there stays as it is
    PYTHON="$root/.venv/bin/python"
fi
PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec "$PYTHON" "$root/tools/gpu_checks.py" "$@"
