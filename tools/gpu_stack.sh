#!/usr/bin/env bash
# The CUDA stack on a machine that need not have a GPU:
#
#     bash tools/gpu_stack.sh FOLDER [PART ...]
#
# Installs requirements-gpu.lock into FOLDER/venv (9 GB; Transformer Engine's extension is built once, which can take 40
# minutes), pretends a CUDA machine where there is none (tools/cuda_without_gpu), and runs the parts, without names all:
#   layers   Transformer Engine's layers in bf16 and Hopper's FP8 recipes: control flow alone
#   mxfp8    the same with the FP8 recipe of a pretended Blackwell
#   vllm     vLLM's CUDA build: options, start, weights, sleep and wake: control flow alone
#   unit     tests/unit/megatron with torch's layers on "cuda" and NCCL: real numbers and the CPU's bounds
#   parity   tests/parity in the same way
#   runs     tests of whole runs with the hf engine in the same way
#   PATH     these tests in the same way
# A part that fails, or takes longer than PART_LIMIT seconds (7200), does not stop the others. FOLDER/summary.txt has
# the date, the versions and how each part ended. No part of CI.
set -euo pipefail
usage() { sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0" && exit 2; }
[ $# -gt 0 ] || usage
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
mkdir -p "$1" && folder="$(cd "$1" && pwd)"
shift
[ $# -gt 0 ] || set -- layers mxfp8 vllm unit parity runs

# Sets the environment and the tests of a part. What is left out: hosts without CUDA (cpu/, gloo), exact memory
# (buckets are padded otherwise where communication overlaps), vLLM's generation and engines in processes of their own,
# which get weights by CUDA IPC.
choose() {
    settings=(PRETEND_WITHOUT_TE=1 PRETEND_DEVICES=8)
    case "$1" in
    layers) settings=() tests=(tests/gpu_stack/test_transformer_engine.py) ;;
    mxfp8) settings=(PRETEND_CC=100) tests=(tests/gpu_stack/test_transformer_engine.py -k mxfp8) ;;
    vllm) settings=() tests=(tests/gpu_stack/test_vllm.py) ;;
    unit) tests=(tests/unit/megatron --ignore=tests/unit/megatron/cpu) ;;
    parity) tests=(tests/parity -k "not vllm and not gloo and not memory and not smollm2") ;;
    runs) tests=(tests/integration/test_{overlap,offload_trainer,checkpoints,mixed_rewards,kill_and_resume}.py
        tests/integration/test_{constraint,online_algorithms,offline,own_code,alarms}.py
        -k "not process and not during_generation and not staleness_1") ;;
    */*) tests=("$1") ;;
    *) usage ;;
    esac
}
for part in "$@"; do choose "$part"; done

# settings of pip that offer CPU builds are not for this environment
unset PIP_FIND_LINKS PIP_EXTRA_INDEX_URL PIP_CONSTRAINT PIP_NO_INDEX
export PIP_CONFIG_FILE=/dev/null
[ -x "$folder/venv/bin/pip" ] || python3 -m venv "$folder/venv"
. "$folder/venv/bin/activate"
. "$root/tools/setup_env.sh" gpu,test
cd "$root"
versions='^(torch|vllm|megatron-core|transformer.engine|transformer.engine.torch|numpy) '
{ date -u +%F && python --version && python -m pip list 2>/dev/null | grep -iE "$versions"; } | tee "$folder/summary.txt"

if ! python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "no GPU here: on a pretended one, on which Transformer Engine's and vLLM's kernels do nothing" |
        tee -a "$folder/summary.txt"
    bash tools/cuda_without_gpu/build.sh "$folder/machine"
    . "$folder/machine/env.sh"
fi
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
export PRETEND_COMPUTE=1
status=0
for part in "$@"; do
    choose "$part"
    log="$folder/${part//\//_}.log"
    env "${settings[@]}" timeout -k 60 "${PART_LIMIT:-7200}" python -m pytest -q "${tests[@]}" 2>&1 | tee "$log" || status=1
    ended="$(grep -E '^[0-9]+ (passed|failed|error|skipped)' "$log" | tail -n 1)" || ended="no result"
    echo "$part: $ended" >>"$folder/summary.txt"
done
cat "$folder/summary.txt"
exit "$status"
