#!/usr/bin/env bash
#SBATCH --job-name=fpa_7b --nodes=1 --ntasks-per-node=1
#SBATCH --output=%x-%j.out --open-mode=append --requeue --signal=B:USR1@600
# Trajectories of Qwen2.5-Math-7B, then FPA on them: one node of 8 GPUs.
stages=("generate examples/fpa/qwen2.5_math_7b/generate.yaml" "train examples/fpa/qwen2.5_math_7b/fpa.yaml")
in_job="" folder="$(dirname "$0")"
[ -e "$folder/common.sh" ] || in_job=yes folder="${SLURM_SUBMIT_DIR:?}/launch"
. "$folder/common.sh" || { echo "error: submit from the repository's folder, not from $PWD" >&2 && exit 2; }
