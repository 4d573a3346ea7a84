#!/usr/bin/env bash
# A real Slurm cluster on this machine, for tests: virtual nodes n1, n2 ... with pretend GPUs, all under FOLDER and on
# 127.0.0.1, without systemd or cgroups. Needs root (install.sh installs the packages).
#
#     up.sh FOLDER [NODES [PORT]]        default: 4 nodes; ports PORT to PORT + NODES, default 16817
#     . FOLDER/env.sh                    SLURM_CONF, and PATH with a sacct that asks the controller
#     down.sh FOLDER                     ends exactly these daemons
#
# Each node has 4 cores and 8 GPUs. Partitions: batch (default), and low, whose jobs those of high put back into the
# queue after their signal and five minutes. pyxis_stand_in.c takes the place of pyxis.
# The time limits are long, because a busy machine must not lose a node or a job.
set -euo pipefail
folder="$(mkdir -p "$1" && cd "$1" && pwd)" nodes="${2:-4}" port="${3:-16817}"
here="$(cd "$(dirname "$0")" && pwd)" host="$(hostname -s)"
mkdir -p "$folder"/{munge,state,devices,bin}
chmod 755 "$folder" "$folder/munge"

# Names, all of one address: a step calls its srun back, and one address per node would hang.
{
    echo "# BEGIN one_machine_slurm $folder"
    for n in $(seq "$nodes"); do echo "127.0.0.1 n$n"; done
    echo "# END one_machine_slurm $folder"
} >>/etc/hosts

head -c 1024 /dev/urandom >"$folder/munge/key" && chmod 400 "$folder/munge/key"
munged --key-file="$folder/munge/key" --socket="$folder/munge/socket" --pid-file="$folder/munge/munged.pid" \
    --log-file="$folder/munge/log" --seed-file="$folder/munge/seed"

cat >"$folder/slurm.conf" <<CONF
ClusterName=test
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
SlurmUser=root
SlurmdUser=root
AuthInfo=socket=$folder/munge/socket
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool.%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.%n.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
GresTypes=gpu
EnforcePartLimits=ALL
KillWait=120
MinJobAge=3600
SlurmdTimeout=30
MessageTimeout=60
TCPTimeout=30
BatchStartTimeout=300
UnkillableStepTimeout=600
ReturnToService=2
SchedulerParameters=batch_sched_delay=0,bf_interval=1
SlurmctldParameters=preempt_send_user_signal
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
CONF
for gpu in $(seq 0 7); do ln -sfn /dev/null "$folder/devices/gpu$gpu"; done # a GPU is a device file
echo "Name=gpu File=$folder/devices/gpu[0-7]" >"$folder/gres.conf"
# With a host name of its own for each node where that is allowed.
if unshare --uts true 2>/dev/null; then hostname=; else hostname="NodeHostname=$host"; fi
for n in $(seq "$nodes"); do
    mkdir -p "$folder/spool.n$n"
    echo "NodeName=n$n $hostname NodeAddr=127.0.0.1 Port=$((port + n)) CPUs=4 RealMemory=16000 Gres=gpu:8"
done >>"$folder/slurm.conf"
cat >>"$folder/slurm.conf" <<CONF
PartitionName=batch Nodes=ALL Default=YES PriorityTier=5 PreemptMode=OFF
PartitionName=low Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE GraceTime=300
PartitionName=high Nodes=ALL PriorityTier=9 PreemptMode=OFF
CONF
gcc -shared -fPIC -O1 -o "$folder/pyxis.so" "$here/pyxis_stand_in.c"
echo "required $folder/pyxis.so" >"$folder/plugstack.conf"
install -m 755 "$here/sacct" "$folder/bin/sacct"
printf 'export SLURM_CONF=%q PATH=%q:"$PATH"\n' "$folder/slurm.conf" "$folder/bin" >"$folder/env.sh"

export SLURM_CONF="$folder/slurm.conf"
slurmctld
for n in $(seq "$nodes"); do bash "$here/node.sh" "$folder" "$n"; done
for _ in $(seq 900); do
    idle="$(sinfo -h -N -p batch -t idle -o %T 2>/dev/null | grep -cx idle)" || true
    [ "$idle" -lt "$nodes" ] || exit 0
    sleep 0.1
done
echo "only $idle of $nodes nodes came up; the logs are in $folder" >&2
exit 1
