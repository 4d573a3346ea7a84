#!/usr/bin/env bash
#SBATCH --job-name=fpa_4b --nodes=1 --ntasks-per-node=1
#SBATCH --output=%x-%j.out --open-mode=append --requeue --signal=B:USR1@600
# Trajectories of Qwen3-4B-Base, then FPA on them: one node of 8 GPUs.
stages=("generate examples/fpa/qwen3_4b_base/generate.yaml" "train examples/fpa/qwen3_4b_base/fpa.yaml")
in_job="" folder="$(dirname "$0")"
[ -e "$folder/common.sh" ] || in_job=yes folder="${SLURM_SUBMIT_DIR:?}/launch"
. "$folder/common.sh" || { echo "error: submit from the repository's folder, not from $PWD" >&2 && exit 2; }
