# Common code of the scripts in launch/. Run a script, which checks the recipe and submits itself, or use sbatch:
#
#     launch/pipo_8b.sh --account=me --partition=gpu --gpus-per-node=8 [sbatch options] [section.option=value ...]
#     sbatch --account=me ... launch/pipo_8b.sh [section.option=value ...]       # from the repository's folder
#
# Environment (docs/cluster.md):
#     SBATCH_ACCOUNT, SBATCH_PARTITION, SBATCH_TIMELIMIT ...   sbatch's own
#     LAUNCH_SETUP    shell code that sets up `python` on every node; default: . .venv/bin/activate
#     LAUNCH_IMAGE    container image, for pyxis; the repository is mounted under its own path
#     LAUNCH_MOUNTS   more mounts, FROM:TO,...
#     LAUNCH_SERVER   on nodes of their own, which end with the training: `vllm`, the servers that sample for it, or shell
#                     code, such as a server of a reward model; SERVER_HOST in a key becomes the name of the first of these
#                     nodes, as in $LAUNCH_SERVER_HOST of the training, and the code sees $LAUNCH_SERVER_NODES
#     LAUNCH_SERVER_PORT      where the code answers on each of those nodes: the training waits for it
#     LAUNCH_SERVER_OPTIONS   sbatch options of those nodes: "--nodes=1 --gpus-per-node=4"
#     LAUNCH_NPROC    ranks per node, where there are no GPUs; default: as many as the node's GPUs in the job
#     LAUNCH_GPU_GIB  memory of a GPU, for the check before the queue; default: 80
#
# The script that sources this has the array `stages`, of "train RECIPE" or "generate RECIPE". Plain keys go to `train` (and
# to its vLLM servers); generate:section.option=value goes to `generate`, serve:section.option=value to the servers.
set -uo pipefail

# The repository.
if [ -n "$in_job" ]; then here="$SLURM_SUBMIT_DIR"; else here="$(cd "$(dirname "$0")/.." && pwd)"; fi

die() {
    echo "error: $*" >&2
    exit 2
}

# ---- in the job

run_job() {
    cd "$here" || exit 2
    . launch/requeue.sh
    export LAUNCH_ROOT="$PWD" PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
    local nproc="${LAUNCH_NPROC:-${SLURM_GPUS_ON_NODE:-}}" number
    job="$PWD/runs/slurm/$SLURM_JOB_ID"
    trap 'requeue_if_due 75; exit 75' USR1 TERM # in a stage its nodes save first; before it there is nothing to save
    [ -n "$nproc" ] || die "this job has no GPUs: sbatch --gpus-per-node=8, or LAUNCH_NPROC=8 for 8 ranks per node without"
    [ "${SLURM_CPUS_ON_NODE:-$nproc}" -ge "$nproc" ] ||
        echo "warning: $nproc ranks share $SLURM_CPUS_ON_NODE CPUs of a node: sbatch --exclusive or --cpus-per-task" >&2
    [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] || rm -rf "$job" # of another cluster, or another year
    [ -z "${SLURM_HET_SIZE:-}" ] || start_server "$@"
    for number in "${!stages[@]}"; do
        job="$PWD/runs/slurm/$SLURM_JOB_ID/stage_$number"
        [ -e "$job/finished" ] || run_stage "$nproc" ${stages[number]} "${@//SERVER_HOST/${server_host:-SERVER_HOST}}" \
            "${server_keys[@]}"
    done
}

# The second part of a heterogeneous job, on its own nodes.
start_server() { # KEY...
    export LAUNCH_SERVER_NODES="$SLURM_JOB_NODELIST_HET_GROUP_1"
    server_hosts=($(scontrol show hostnames "$LAUNCH_SERVER_NODES"))
    server_host="${server_hosts[0]}"
    export LAUNCH_SERVER_HOST="$server_host"
    step=(--het-group=0 "${step[@]}")
    [ -n "${LAUNCH_SERVER:-}" ] || die "this job has nodes for servers, and LAUNCH_SERVER does not say which"
    if [ "$LAUNCH_SERVER" = vllm ]; then start_vllm "$@"; else start_code; fi
}

start_code() {
    local host
    srun_servers "$in_server"
    [ -n "${LAUNCH_SERVER_PORT:-}" ] || return 0
    for host in "${server_hosts[@]}"; do
        wait_for_server "LAUNCH_SERVER ended before it answered at $host:$LAUNCH_SERVER_PORT" \
            "(exec 3<>/dev/tcp/$host/$LAUNCH_SERVER_PORT) 2>/dev/null"
    done
}

# Starts the recipe's vLLM servers. Each node writes its URLs to a file, which the training reads.
start_vllm() { # KEY...
    local keys=() out="$PWD/runs/slurm/$SLURM_JOB_ID/servers_${SLURM_RESTART_COUNT:-0}"
    mkdir -p "$out" || die "cannot write $out"
    export MEGATRON_RFT_TOKEN="${MEGATRON_RFT_TOKEN:-$(head -c 24 /dev/urandom | od -An -tx1 | tr -d ' \n')}" # srun passes it on
    keys_for serve "$@"
    srun_servers "$in_step" bash serve "${stages[-1]#* }" --out "$out" "${keys[@]}"
    wait_for_server "the vLLM servers did not start: the reason is above, their logs are in $out" \
        "[ \"\$(ls '$out' | grep -c 'urls\$')\" -eq ${#server_hosts[@]} ]"
    server_keys=("train:rollout.placement=server" "train:rollout.servers=[$(cat "$out"/*.urls | paste -sd,)]")
}

srun_servers() { # CODE ARGUMENT...: runs once on each server node until the training ends
    command srun --het-group=1 --ntasks-per-node=1 --kill-on-bad-exit=1 --cpu-bind=none "${container[@]}" bash -c "$@" &
    server=$!
    trap 'kill "$server" 2>/dev/null' EXIT
}

wait_for_server() { # MESSAGE CONDITION
    until eval "$2"; do
        kill -0 "$server" 2>/dev/null || die "$1"
        sleep 1
    done
}

run_stage() { # NPROC COMMAND RECIPE KEY...
    local nproc="$1" command="$2" recipe="$3" status keys=()
    shift 3
    keys_for "$command" "$@"
    echo "start ${SLURM_RESTART_COUNT:-0}: $command $recipe, $SLURM_NNODES nodes of $nproc ranks"
    mkdir -p "$job" || die "cannot write $job"
    srun_with_stop "${step[@]}" bash -c "$in_step" bash "$command" "$recipe" --nproc "$nproc" --job "$job" "${keys[@]}"
    status=$?
    # An srun that is terminated, as when a node is lost, returns 0 if its nodes have not told it their status in time.
    [ "$status" -ne 0 ] || try_again 90 all_finished || status=143
    [ "$status" -ne 0 ] || { touch "$job/finished" && return; }
    requeue_if_due "$status"
    exit "$status"
}

# Whether every node has written that it has finished; other nodes' files can come a minute late from a network disk.
all_finished() {
    [ "$(grep -ls '"status": 0' "$job/start_${SLURM_RESTART_COUNT:-0}"/node_*.json | wc -l)" -ge "$SLURM_NNODES" ]
}

keys_for() { # COMMAND KEY...; leaves those of COMMAND in `keys`
    local command="$1" key
    shift
    for key in "$@"; do
        case "$key" in
        train:* | generate:* | serve:*) [ "${key%%:*}" != "$command" ] || keys+=("${key#*:}") ;;
        *) [ "$command" = generate ] || keys+=("$key") ;;
        esac
    done
}

in_step='cd "$LAUNCH_ROOT" && eval "$LAUNCH_SETUP" && exec python -m megatron_rft "$@"'
in_server='cd "$LAUNCH_ROOT" && eval "$LAUNCH_SETUP" && eval "$LAUNCH_SERVER"'
server_keys=()
container=()
[ -z "${LAUNCH_IMAGE:-}" ] || container=(
    --container-image="$LAUNCH_IMAGE" --container-workdir="$here"
    --container-mounts="$here:$here${LAUNCH_MOUNTS:+,$LAUNCH_MOUNTS}"
)
step=(--ntasks-per-node=1 --kill-on-bad-exit=1 --cpu-bind=none "${container[@]}")
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || step+=(--cpus-per-task="$SLURM_CPUS_PER_TASK") # srun does not inherit it

# ---- on the login node

# Arguments of the form section.option=value, section=null and section={...} go to the recipe, all others to sbatch.
submit() {
    local form='^((train|generate|serve):)?[a-z_]+((\.[A-Za-z0-9_+-]+)+=|=(null|\{.*\})$)'
    local keys=() options=() shared=() argument stage sooner=
    cd "$here" || exit 2
    if [[ " $* " =~ \ (-h|--help)\  ]]; then
        sed -n '/^#/!q; s/^# \{0,1\}//p' launch/common.sh
        exit 0
    fi
    for argument in "$@"; do
        if [[ "$argument" =~ $form ]]; then
            keys+=("$argument")
        else
            options+=("$argument")
        fi
    done
    command -v sbatch >/dev/null || die "there is no sbatch here: this is no login node of a Slurm cluster"
    given account -A SBATCH_ACCOUNT || die "no account: --account=NAME, or export SBATCH_ACCOUNT=NAME"
    given partition -p SBATCH_PARTITION || die "no partition: --partition=NAME, or export SBATCH_PARTITION=NAME"
    if [ "${LAUNCH_SERVER:-}" = vllm ]; then
        check_stage serve "${stages[-1]#* }" "${keys[@]}" serve:rollout.placement=server >/dev/null
        server_keys=(train:rollout.placement=server "train:rollout.servers=[http://SERVER_HOST:8000]")
    fi
    for stage in "${stages[@]}"; do check_stage $stage "${keys[@]}" "${server_keys[@]}"; done
    mkdir -p runs/slurm 2>/dev/null && [ -w runs/slurm ] || die "$PWD/runs/slurm cannot be written: the job keeps its notes there"
    [ -z "${LAUNCH_IMAGE:-}" ] || warn_of_what_is_not_mounted "${keys[@]}"
    sooner_signal
    if [ -n "${LAUNCH_SERVER:-}" ]; then # a heterogeneous job, each part with its options
        shared=($(grep -oE ' (--(account|partition|time|qos|reservation)[= ]|-[Aptq] ?)[^ ]+' <<<" ${options[*]}"))
        options+=(: "${shared[@]}" ${LAUNCH_SERVER_OPTIONS:---nodes=1})
    fi
    exec sbatch ${sooner:+"$sooner"} "${options[@]}" "launch/$(basename "$0")" "${keys[@]}"
}

# Files written to a container's own file system are lost when the job ends.
warn_of_what_is_not_mounted() { # KEY...
    local key mount found mounts="${LAUNCH_MOUNTS:-}"
    for key in "$@"; do
        [[ "$key" = *run.output_dir=/* ]] || continue
        found=
        for mount in "$here" ${mounts//,/ }; do
            mount="${mount#*:}" && mount="${mount%%:*}"
            [[ "${key#*=}/" != "${mount%/}"/* ]] || found=yes
        done
        [ -n "$found" ] || echo "warning: ${key#*=} is in none of LAUNCH_MOUNTS: unless this cluster mounts it into every" \
            "container, the run is lost with the container" >&2
    done
}

# The scripts get their signal ten minutes before the limit; with a limit that is hardly longer it comes at once.
sooner_signal() {
    local limit="${SBATCH_TIMELIMIT:-}"
    [[ " ${options[*]} " =~ \ (--time[=\ ]|-t\ ?)([^\ ]+)\  ]] && limit="${BASH_REMATCH[2]}"
    [[ "$limit" =~ ^(0+:)?0*([0-9]{1,2})(:[0-9]+)?$ ]] && [ "${BASH_REMATCH[2]}" -le 20 ] || return 0
    sooner="--signal=B:USR1@$((BASH_REMATCH[2] * 15))"
}

given() { # OPTION LETTER VARIABLE: whether sbatch gets this option
    [ -n "${!3:-}" ] || [[ " ${options[*]} " =~ \ (--$1[=\ ]|$2) ]]
}

# Checks the recipe with the job's number of ranks, if this machine has the environment.
check_stage() { # COMMAND RECIPE KEY...
    local command="$1" recipe="$2" gpus nodes told keys=() memory=() planned=()
    case "$command" in
    train | generate) planned=(--for "$command") ;;
    serve) ;;
    *) die "stages: \"$command $recipe\": a stage is \"train RECIPE\" or \"generate RECIPE\"" ;;
    esac
    [ -e "$recipe" ] || die "there is no recipe $recipe. There are: $(ls examples/*/*/*.yaml | tr '\n' ' ')"
    shift 2
    keys_for "$command" "$@"
    gpus="${LAUNCH_NPROC:-$(number_of gpus-per-node)}" && gpus="${gpus:-$(gpus_of_gres)}"
    [ -n "$gpus" ] || [[ " ${options[*]} ${!SBATCH_G*}" =~ gpus|GPUS|gres|GRES|\ -G ]] ||
        die "no GPUs: --gpus-per-node=8, or LAUNCH_NPROC=8 for 8 ranks per node without"
    nodes="$(number_of nodes N)"
    nodes="${nodes:-$(sed -nE 's/^#SBATCH.* (--nodes[= ]|-N ?)([0-9]+).*/\2/p' "launch/$(basename "$0")")}"
    nodes="${nodes:-1}"
    [ -n "$gpus" ] && [ -z "${LAUNCH_IMAGE:-}" ] || return 0
    told="$( (set +u && eval "$LAUNCH_SETUP" && python -c 'import megatron_rft.commands.main') 2>&1 >/dev/null)" || {
        echo "not checked: $command $recipe, for lack of an environment here (${told##*$'\n'})" >&2
        return 0
    }
    [ -n "${LAUNCH_NPROC:-}" ] || memory=(--gpu-gib "${LAUNCH_GPU_GIB:-80}")
    (set +u && eval "$LAUNCH_SETUP" &&
        exec python -m megatron_rft plan "$recipe" "${planned[@]}" "${memory[@]}" --nproc $((nodes * gpus)) --gpus-per-node "$gpus" \
            "${keys[@]}") || exit 2
}

number_of() { # OPTION [LETTER]: the N of --OPTION=[type:]N, --OPTION N or -LETTER N
    local letter="${2:-none}"
    [[ " ${options[*]} " =~ \ (--$1[=\ ]|-$letter\ ?)([^\ ]*[:=])?([0-9]+)\  ]] && echo "${BASH_REMATCH[3]}"
    return 0
}

gpus_of_gres() { # the N of --gres=gpu:N or gpu:TYPE:N, beside which other resources may be asked for
    [[ " ${options[*]} " =~ \ --gres[=\ ]([^\ ]*,)?gpu(:[^\ :,]+)?:([0-9]+)[,\ ] ]] && echo "${BASH_REMATCH[3]}"
    return 0
}

if [ -z "${LAUNCH_SETUP:-}" ]; then
    export LAUNCH_SETUP=:
    [ -n "${LAUNCH_IMAGE:-}" ] || [ ! -e "$here/.venv/bin/activate" ] || printf -v LAUNCH_SETUP '. %q' "$here/.venv/bin/activate"
fi
if [ -n "$in_job" ]; then run_job "$@"; else submit "$@"; fi
