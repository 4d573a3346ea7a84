#!/usr/bin/env bash
# node.sh FOLDER N: starts the daemon of node nN of a cluster that up.sh made, with a host name of its own where allowed.
set -euo pipefail
export SLURM_CONF="$1/slurm.conf"
if unshare --uts true 2>/dev/null; then exec unshare --uts sh -c "hostname n$2 && exec slurmd -N n$2"; fi
exec slurmd -N "n$2"
