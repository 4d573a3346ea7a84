#!/usr/bin/env bash
# node.sh FOLDER N [own]: starts the daemon of node nN of a cluster that up.sh made; own: with a host name of its own.
set -euo pipefail
export SLURM_CONF="$1/slurm.conf"
if [ "${3:-}" = own ]; then exec unshare --uts sh -c "hostname n$2 && exec slurmd -N n$2"; else exec slurmd -N "n$2"; fi
