#!/usr/bin/env bash
#SBATCH --job-name=dynamic_ppo_3b --nodes=1 --ntasks-per-node=1
#SBATCH --output=%x-%j.out --open-mode=append --requeue --signal=B:USR1@600
# PPO with a dynamic constraint on Llama-3.2-3B-Instruct: one node of 8 GPUs.
stages=("train examples/dynamic/apps_ppo/dynamic.yaml")
in_job="" folder="$(dirname "$0")"
[ -e "$folder/common.sh" ] || in_job=yes folder="${SLURM_SUBMIT_DIR:?}/launch"
. "$folder/common.sh" || { echo "error: submit from the repository's folder, not from $PWD" >&2 && exit 2; }
