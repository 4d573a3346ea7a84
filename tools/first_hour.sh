#!/usr/bin/env bash
# The first hour on a borrowed GPU without a network, in eight parts of at most ten minutes:
#
#     tools/first_hour.sh pack N       here: downloads what part N needs into build/first_hour/N, below 60 MB
#     tools/first_hour.sh N            there: takes build/first_hour/N, runs part N's checks, adds to runs/first_hour.jsonl
#     tools/first_hour.sh report       tables of docs/gpu_results.md from the lines that were measured on a GPU
#
# The other machine has Python 3.12 with torch 2.11 for CUDA 13, transformers 5.17 and a CUDA compiler. What parts 1 to 5
# bring (Transformer Engine) and 6 to 8 (vLLM) stays in FIRST_HOUR_STATE, by default a folder of its temporary files, as
# long as that machine does. `--limit SECONDS` shortens a part, for example while parts only bring files; `--results FILE`
# names another file of results. A part that fails, or lacks something, does not stop the next.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
for python in ${PYTHON:-"${VIRTUAL_ENV:-$root/.venv}/bin/python" python3}; do
    "$python" -c 'import torch' 2>/dev/null && break
done
cd "$root" && exec "$python" tools/first_hour.py "$@"
