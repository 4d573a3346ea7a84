#!/usr/bin/env bash
# All tests, from nothing: sets up the environment, checks the style, runs pytest. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/setup_env.sh cpu,test
# For the tests of rollout.engine=vllm, which are skipped without it.
if [ "$(uname -sm)" = "Linux x86_64" ]; then
    (. tools/setup_env.sh cpu,test,vllm) || echo "no vLLM here"
fi
# For tests/slurm, which are skipped without.
timeout 300 tools/one_machine_slurm/install.sh || echo "no Slurm here"
timeout 600 tools/setup_nemo_env.sh || echo "no NeMo-Run here"
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

ruff check .
ruff format --check .
exec python -m pytest "$@"
