#!/usr/bin/env bash
# down.sh FOLDER: ends the jobs and the daemons of a cluster that up.sh made there, by their pid files, and takes its
# names out of /etc/hosts.
folder="$(cd "$1" && pwd)" || exit 1
export SLURM_CONF="$folder/slurm.conf"

stop() { # COMMAND PIDFILE
    local pid
    pid="$(cat "$2" 2>/dev/null)" && [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = "$1" ] || return 0
    kill "$pid"
    for _ in $(seq 50); do
        grep -qs '^State:.[^Z]' "/proc/$pid/status" || return 0
        sleep 0.1
    done
    kill -9 "$pid"
}

timeout 10 squeue -h -o %A 2>/dev/null | sort -u | xargs -r timeout 10 scancel 2>/dev/null
for _ in $(seq 150); do
    [ -n "$(timeout 5 squeue -h 2>/dev/null)" ] || break
    sleep 0.1
done
for file in "$folder"/slurmd.*.pid; do stop slurmd "$file"; done
stop slurmctld "$folder/slurmctld.pid"
stop munged "$folder/munge/munged.pid"
# /etc/hosts may be mounted: written, not replaced
if grep -qsFx "# BEGIN one_machine_slurm $folder" /etc/hosts; then
    names="$(awk -v of="one_machine_slurm $folder" '$0 == "# BEGIN " of {skip=1} !skip; $0 == "# END " of {skip=0}' /etc/hosts)"
    printf '%s\n' "$names" >/etc/hosts
fi
