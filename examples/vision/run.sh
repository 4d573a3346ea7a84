#!/usr/bin/env bash
# A tiny Qwen2.5-VL learns the colour of a square in pictures that a script draws: from random weights by a short warm
# start, which teaches the answers' words and nothing about pictures, then by GRPO with PIPO. It then answers for blank
# pictures. No GPU, no downloads; about two minutes on two cores.
#
#   bash examples/vision/run.sh [--nproc N] [--seed S] [--out FOLDER] [section.option=value ...]
#
# The options after the flags go to grpo.yaml. Started again after a stop, it resumes.
set -euo pipefail
cd "$(dirname "$0")/../.."

nproc=1 seed=0 out=runs/vision
while [ $# -gt 0 ]; do
    case "$1" in
    --nproc) nproc="$2" && shift 2 ;;
    --seed) seed="$2" && shift 2 ;;
    --out) out="$2" && shift 2 ;;
    -*) echo "there is no option $1; see the head of $0" >&2 && exit 2 ;;
    *) break ;;
    esac
done

. tools/setup_env.sh cpu
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 PYTHONWARNINGS=ignore

[ -f "$out/blanked.jsonl" ] || python examples/vision/make.py "$out"
common=(run.seed="$seed" data.test="$out/test.jsonl" --nproc "$nproc")
megatron-rft train examples/vision/sft.yaml "${common[@]}" model.path="$out/model" data.train="$out/shuffled.jsonl" \
    run.output_dir="$out/sft$seed"
megatron-rft train examples/vision/grpo.yaml "${common[@]}" model.path="$out/sft$seed/export" \
    data.train="$out/train.jsonl" data.validation.path="$out/validation.jsonl" run.output_dir="$out/grpo$seed" "$@" |
    tee "$out/grpo$seed.log"
echo "blank pictures:"
megatron-rft evaluate examples/vision/grpo.yaml --model "$out/grpo$seed/export" data.train="$out/train.jsonl" \
    data.test="$out/blanked.jsonl" data.validation=null evaluation.every=0 --out "$out/blank$seed" | grep pass@1
grep '^pass@1' "$out/grpo$seed.log" | tail -n 1
