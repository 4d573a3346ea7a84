#!/usr/bin/env bash
# A small complete job: a Qwen3-shaped model learns arithmetic by warm start, then by GRPO with PIPO. No GPU, no
# downloads of weights or data; a few minutes on two cores.
#
#   bash examples/quickstart.sh [--nproc N] [--seed S] [--out FOLDER] [--engine auto|vllm|hf] [section.option=value ...]
#
# --engine selects the engine: auto is vLLM if installed (`. tools/setup_env.sh cpu,vllm`), else the built-in engine.
# --nproc is the number of ranks, by default two (data parallel) if there are two cores. The options after the flags
# go to the reinforcement learning (examples/quickstart/pipo.yaml), so `megatron.tensor_model_parallel_size=2` makes the
# two ranks tensor parallel. Started again after a stop, it resumes.
set -euo pipefail
cd "$(dirname "$0")/.."

cores=$(env -u OMP_NUM_THREADS nproc) # nproc would return OMP_NUM_THREADS
nproc=$((cores > 1 ? 2 : 1)) seed=0 out="" engine=auto
while [ $# -gt 0 ]; do
    case "$1" in
    --nproc) nproc="$2" && shift 2 ;;
    --seed) seed="$2" && shift 2 ;;
    --out) out="$2" && shift 2 ;;
    --engine) engine="$2" && shift 2 ;;
    -*) echo "there is no option $1; see the head of $0" >&2 && exit 2 ;;
    *) break ;;
    esac
done
out="${out:-runs/quickstart$([ "$seed" = 0 ] || echo "/seed$seed")}" # where the recipes look for it

. tools/setup_env.sh "cpu$([ "$engine" = vllm ] && echo ,vllm)"
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 PYTHONWARNINGS=ignore

python examples/quickstart/make_model.py "$out/model"
common=(run.seed="$seed" rollout.engine="$engine" --nproc "$nproc")
megatron-rft train examples/quickstart/sft.yaml "${common[@]}" run.output_dir="$out/sft" model.path="$out/model"
megatron-rft train examples/quickstart/pipo.yaml "${common[@]}" run.output_dir="$out/pipo" \
    model.path="$out/sft/export" "$@" | tee "$out/pipo.log"
python examples/quickstart/check_export.py "$out/pipo/export"
grep '^pass@1' "$out/pipo.log" | tail -n 1
