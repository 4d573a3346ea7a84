#!/usr/bin/env bash
# NeMo-Run's environment, .venv-nemo, for launch/nemo.py: its versions do not go with those of a run (launch/nemo.lock).
set -euo pipefail
cd "$(dirname "$0")/.."
stamp=.venv-nemo/installed
cmp -s launch/nemo.lock "$stamp" && exit 0
echo "installing NeMo-Run into .venv-nemo (once; a minute)"
[ -x .venv-nemo/bin/python ] || python3 -m venv .venv-nemo
.venv-nemo/bin/python -m pip install -qq --disable-pip-version-check --no-compile -r launch/nemo.lock
.venv-nemo/bin/python -c 'import nemo_run'
cp launch/nemo.lock "$stamp"
