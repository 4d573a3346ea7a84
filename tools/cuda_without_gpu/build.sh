#!/usr/bin/env bash
# Builds the pretended CUDA machine into FOLDER from the CUDA headers of the environment that is active:
#     bash tools/cuda_without_gpu/build.sh FOLDER
# and writes FOLDER/env.sh, to be sourced in front of a program that is to see the machine.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
mkdir -p "$1" && cd "$1" && folder="$PWD"
site="$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
cp "$here"/*.c "$here"/*.h .
python "$here/symbols.py" "$site"
for name in machine runtime driver libraries nccl rest; do
    gcc -O1 -w -fPIC -fno-builtin -I"$site/nvidia/cu13/include" -DCUDA_ENABLE_DEPRECATED -c "$name.c" -o "$name.o"
done
mapfile -t aliases <aliases.txt
gcc -shared -o libpretended.so machine.o runtime.o driver.o libraries.o nccl.o rest.o "${aliases[@]}" -ldl -lpthread
for name in libcuda.so.1 libcuda.so libnvidia-ml.so.1 libcudart.so.13; do ln -sf libpretended.so "$name"; done
mkdir -p messages
cat >env.sh <<END
export LD_PRELOAD=$folder/libpretended.so LD_LIBRARY_PATH=$folder\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}
export PYTHONPATH=$here/site\${PYTHONPATH:+:\$PYTHONPATH} PRETEND_LIBRARY=$folder/libpretended.so
export VLLM_CUDART_SO_PATH=$folder/libcudart.so.13 TRITON_LIBCUDA_PATH=$folder PYTORCH_NVML_BASED_CUDA_CHECK=1
export PRETEND_MESSAGES=$folder/messages TORCHDYNAMO_DISABLE=1
END
