#!/usr/bin/env bash
# The CUDA stack on a machine that need not have a GPU:
#
#     bash tools/gpu_stack.sh FOLDER [pytest arguments]
#
# Installs requirements-gpu.lock into FOLDER/venv (9 GB; Transformer Engine's extension is built once, which can take 40
# minutes), pretends a CUDA machine where there is none (tools/cuda_without_gpu), and runs
#   1. tests/gpu_stack: Transformer Engine's layers and vLLM's CUDA build, control flow alone; with FP8's recipe of a
#      pretended Blackwell too;
#   2. tests/unit/megatron, tests/parity and the quick tests of whole runs, with torch's layers on "cuda" and NCCL, with
#      real numbers and the same bounds as on the CPU.
# With pytest arguments it runs those instead, with torch's layers. No part of CI.
set -euo pipefail
[ $# -gt 0 ] || { sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0" && exit 2; }
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
mkdir -p "$1" && folder="$(cd "$1" && pwd)"
shift
# settings of pip that offer CPU builds are not for this environment
unset PIP_FIND_LINKS PIP_EXTRA_INDEX_URL PIP_CONSTRAINT PIP_NO_INDEX
export PIP_CONFIG_FILE=/dev/null
[ -x "$folder/venv/bin/pip" ] || python3 -m venv "$folder/venv"
. "$folder/venv/bin/activate"
. "$root/tools/setup_env.sh" gpu,test

if ! python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "no GPU here: on a pretended one, on which Transformer Engine's and vLLM's kernels do nothing"
    bash "$root/tools/cuda_without_gpu/build.sh" "$folder/machine"
    . "$folder/machine/env.sh"
fi
cd "$root"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
python -m pip list 2>/dev/null | grep -iE '^(torch|vllm|megatron-core|transformer.engine|transformer.engine.torch|numpy) '
python --version
export PRETEND_COMPUTE=1
without_te() { PRETEND_WITHOUT_TE=1 PRETEND_DEVICES=8 python -m pytest -q "$@"; }
if [ $# -gt 0 ]; then
    without_te "$@"
    exit
fi

# What is left out: hosts without CUDA (test_cpu, gloo), exact memory (buckets are padded otherwise where communication
# overlaps), vLLM's generation and engines in processes of their own, which get weights by CUDA IPC.
quick=(test_overlap test_offload_trainer test_checkpoints test_mixed_rewards test_kill_and_resume test_constraint)
status=0
python -m pytest -q tests/gpu_stack || status=1
[ -z "${PRETEND_LIBRARY:-}" ] || PRETEND_CC=100 python -m pytest -q tests/gpu_stack -k mxfp8 || status=1
without_te tests/unit/megatron --ignore=tests/unit/megatron/test_cpu.py || status=1
without_te tests/parity -k "not vllm and not gloo and not memory and not smollm2" || status=1
without_te -m "not slow" -k "not process" $(printf 'tests/integration/%s.py ' "${quick[@]}") || status=1
exit "$status"
