#!/usr/bin/env bash
# Slurm and munge from the distribution's packages (Debian, Ubuntu), for up.sh; sshd and rsync, for a login node that is
# reached by ssh. Needs root. A few seconds; nothing where they are there. Their daemons, which nobody has configured, are
# not started.
set -euo pipefail
PATH="$PATH:/usr/sbin:/sbin"
command -v slurmctld slurmd munged gcc sshd rsync | wc -l | grep -qx 6 && [ -e /usr/include/slurm/spank.h ] && exit 0
[ "$(id -u)" -eq 0 ] || { echo "installing Slurm takes root" >&2 && exit 1; }
command -v apt-get >/dev/null || { echo "there is no apt-get to install Slurm with" >&2 && exit 1; }
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy" && chmod 755 "$policy"
    trap 'rm -f "$policy"' EXIT
fi
export DEBIAN_FRONTEND=noninteractive
wait=(-o DPkg::Lock::Timeout=120) # for another installation
apt-get "${wait[@]}" update -qq || true # an old index may do
apt-get "${wait[@]}" install -y -qq --no-install-recommends slurm-wlm munge gcc libc6-dev libslurm-dev \
    openssh-server openssh-client rsync >/dev/null
