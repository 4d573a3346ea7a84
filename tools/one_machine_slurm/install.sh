#!/usr/bin/env bash
# Slurm and munge from the distribution's packages (Debian, Ubuntu), for up.sh. Needs root. A few seconds; nothing where
# they are there. Their daemons, which nobody has configured, are not started.
set -euo pipefail
PATH="$PATH:/usr/sbin:/sbin"
command -v slurmctld >/dev/null && command -v slurmd >/dev/null && command -v munged >/dev/null && [ -e /usr/include/slurm/spank.h ] &&
    command -v gcc >/dev/null && exit 0
[ "$(id -u)" -eq 0 ] || { echo "installing Slurm takes root" >&2 && exit 1; }
command -v apt-get >/dev/null || { echo "there is no apt-get to install Slurm with" >&2 && exit 1; }
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy" && chmod 755 "$policy"
    trap 'rm -f "$policy"' EXIT
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq || true # an old index may do
apt-get install -y -qq --no-install-recommends slurm-wlm munge gcc libc6-dev libslurm-dev >/dev/null
