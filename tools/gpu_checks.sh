#!/usr/bin/env bash
# What only a GPU can show, with whatever is installed on this machine:  bash tools/gpu_checks.sh [--out FOLDER]
# Writes FOLDER/gpu_checks.json and FOLDER/gpu_checks.md (default: runs/gpu_checks/) and prints the table. Without a GPU it
# runs the parts that can run, small, and names the others. Ends with 1 when a part failed.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
if [ -z "${PYTHON:-}" ]; then
    [ -x "$root/.venv/bin/python" ] || . "$root/tools/setup_env.sh" gpu # an environment that is there stays as it is
    PYTHON="$root/.venv/bin/python"
fi
PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec "$PYTHON" "$root/tools/gpu_checks.py" "$@"
