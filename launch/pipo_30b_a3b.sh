#!/usr/bin/env bash
#SBATCH --job-name=pipo_30b_a3b --nodes=4 --ntasks-per-node=1
#SBATCH --output=%x-%j.out --open-mode=append --requeue --signal=B:USR1@600
# GRPO with PIPO on Qwen3-30B-A3B: four nodes of 8 GPUs.
stages=("train examples/pipo/qwen3_30b_a3b/grpo_pipo.yaml")
in_job="" folder="$(dirname "$0")"
[ -e "$folder/common.sh" ] || in_job=yes folder="${SLURM_SUBMIT_DIR:?}/launch"
. "$folder/common.sh" || { echo "error: submit from the repository's folder, not from $PWD" >&2 && exit 2; }
