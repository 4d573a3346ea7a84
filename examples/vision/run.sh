#!/usr/bin/env bash
# A tiny Qwen2.5-VL learns the colour of a square in pictures that a script draws: from random weights by a short warm
# start, which teaches the answers' words and nothing about pictures, then by GRPO with PIPO. It then answers for blank
# pictures. No GPU, no downloads; about two minutes on two cores.
#
#   bash examples/vision/run.sh [--nproc N] [--seed S] [--out FOLDER] [--blank] [section.option=value ...]
#
# --blank trains on blank pictures, from which nothing can be learnt. The options after the flags go to grpo.yaml.
# Started again after a stop, it resumes.
set -euo pipefail
cd "$(dirname "$0")/../.."

nproc=1 seed=0 out=runs/vision rows=
while [ $# -gt 0 ]; do
    case "$1" in
    --nproc) nproc="$2" && shift 2 ;;
    --seed) seed="$2" && shift 2 ;;
    --out) out="$2" && shift 2 ;;
    --blank) rows=blank_ && shift ;;
    -*) echo "there is no option $1; see the head of $0" >&2 && exit 2 ;;
    *) break ;;
    esac
done

. tools/setup_env.sh cpu
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 PYTHONWARNINGS=ignore

[ -f "$out/blank_test.jsonl" ] || python examples/vision/make.py "$out"
common=(run.seed="$seed" --nproc "$nproc")
megatron-rft train examples/vision/sft.yaml "${common[@]}" model.path="$out/model" data.train="$out/shuffled.jsonl" \
    data.test="$out/test.jsonl" run.output_dir="$out/sft$seed"
run="$out/${rows}grpo$seed"
megatron-rft train examples/vision/grpo.yaml "${common[@]}" model.path="$out/sft$seed/export" \
    data.train="$out/${rows}train.jsonl" data.validation.path="$out/${rows}validation.jsonl" \
    data.test="$out/${rows}test.jsonl" run.output_dir="$run" "$@" | tee "$run.log"
echo "blank pictures:"
megatron-rft evaluate examples/vision/grpo.yaml --model "$run/export" data.train="$out/train.jsonl" \
    data.test="$out/blank_test.jsonl" data.validation=null evaluation.every=0 --out "$out/${rows}blank$seed" | grep '^| '
grep '^pass@1' "$run.log" | tail -n 1
