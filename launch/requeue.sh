# For a batch script, with $job: the job's folder of notes (megatron_rft/launching/job.py). Shared by launch/*.sh and nemo.py.

# Writes the file that tells this start's nodes to save and end.
ask_to_stop() {
    echo "the queue wants the nodes back: a checkpoint is written after the step under way"
    mkdir -p "$job/start_${SLURM_RESTART_COUNT:-0}" && touch "$job/start_${SLURM_RESTART_COUNT:-0}/stop"
}

# Runs `srun ...` in the background: bash delays a trap until a foreground command ends.
srun_with_stop() {
    trap ask_to_stop USR1 TERM
    command srun "$@" &
    while kill -0 $! 2>/dev/null; do wait $!; done # a trapped signal ends a wait early
    wait $! && return 0
    local status=$?
    # srun kills all nodes when one fails: their last written status counts, not the signal.
    ! grep -qs '"status": 2' "$job/start_${SLURM_RESTART_COUNT:-0}"/node_*.json || status=2
    return "$status"
}

# Runs a command once a second until it succeeds: a busy controller of Slurm does not answer every request.
try_again() { # TIMES COMMAND ARGUMENT...
    local try
    for try in $(seq "$1"); do
        "${@:2}" && return 0
        sleep 1
    done
    return 1
}

# Excludes nodes on which two starts hung. Slurm changes a job's list only while the job is pending.
exclude_nodes() {
    [ -s "$job/exclude" ] || return 0
    local nodes="$(cat "$job/exclude")"
    try_again 10 scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="$nodes" 2>/dev/null && echo "excluded from now on: $nodes" ||
        echo "warning: $nodes could not be excluded: scontrol update JobId=$SLURM_JOB_ID ExcNodeList=..." >&2
}

# Whether the job has been neither cancelled nor ended by Slurm. While a signal is on its way to it, it is SIGNALING.
is_running() {
    local shown
    shown="$(try_again 10 scontrol show job -o "$SLURM_JOB_ID")"
    [[ "${shown%%$'\n'*}" =~ JobState=(RUNNING|SIGNALING) ]]
}

# requeue_if_due STATUS: the exit status of the step. 75 requests another start. With 128 or more a process was killed
# before it could write a status, and the next start decides. A cancelled job is not requeued.
requeue_if_due() {
    [ "$1" -eq 75 ] || [ "$1" -ge 128 ] || return 0
    is_running || return 0
    trap - USR1 TERM
    echo "back into the queue, after start ${SLURM_RESTART_COUNT:-0} (status $1)"
    try_again 10 scontrol requeue "$SLURM_JOB_ID" && exclude_nodes && sleep 120 # Slurm ends this script
}
