#!/usr/bin/env bash
# NeMo-Run's environment, .venv-nemo, for launch/nemo.py: its versions do not go with those of a run (launch/nemo.lock).
set -euo pipefail
cd "$(dirname "$0")/.."
stamp=.venv-nemo/installed
cmp -s launch/nemo.lock "$stamp" && exit 0
exec 9>.setup-nemo.lock
flock 9 2>/dev/null || true # two scripts at once must not install at once
cmp -s launch/nemo.lock "$stamp" && exit 0
echo "installing NeMo-Run into .venv-nemo (once; a minute)"
[ -x .venv-nemo/bin/pip ] || PIP_QUIET=2 python3 -m venv --upgrade-deps .venv-nemo # pip is the last thing in it
export PIP_DEFAULT_TIMEOUT="${PIP_DEFAULT_TIMEOUT:-60}" PIP_RETRIES="${PIP_RETRIES:-10}"
.venv-nemo/bin/python -m pip install -qq --disable-pip-version-check --no-compile -r launch/nemo.lock
.venv-nemo/bin/python -c 'import nemo_run'
cp launch/nemo.lock "$stamp"
