"""Writes rest.c, in which every other symbol of CUDA's libraries answers 0 (success), and aliases.txt.

    python symbols.py SITE_PACKAGES      in a folder that has the hand-written *.c

PRETEND_TRACE=1 makes each of those say its name on its first call: what the next one that matters is called.
"""

import re
import subprocess
import sys
from pathlib import Path

LIBRARIES = {
    "nvidia/cu13/lib/libcudart.so.13": r"(__)?cuda",
    "nvidia/cu13/lib/libcublas.so.13": r"cublas",
    "nvidia/cu13/lib/libcublasLt.so.13": r"cublasLt",
    "nvidia/nccl/lib/libnccl.so.2": r"p?nccl",
}
NVML = """nvmlInit nvmlInit_v2 nvmlInitWithFlags nvmlShutdown nvmlDeviceGetPciInfo_v3 nvmlDeviceGetPciInfo
nvmlDeviceGetTopologyCommonAncestor nvmlDeviceGetNvLinkState nvmlDeviceGetUtilizationRates nvmlDeviceGetTemperature
nvmlDeviceGetPowerUsage nvmlDeviceGetComputeRunningProcesses_v3 nvmlDeviceGetMigMode"""
HEAD = """#include <stdio.h>
#include <stdlib.h>
static void told(const char *name) {
  static int trace = -1;
  if (trace < 0) trace = getenv("PRETEND_TRACE") != 0;
  if (trace) fprintf(stderr, "pretended: %s\\n", name);
}
"""
ANSWER = """__attribute__((visibility("default"))) long {0}(void) {{
  static int called;
  if (!called) {{ called = 1; told("{0}"); }}
  return 0;
}}
"""


def exported(library: Path) -> set[str]:
    listed = subprocess.check_output(["nm", "-D", "--defined-only", library], text=True)
    return {line.split()[-1].split("@")[0] for line in listed.splitlines()}


def main(site: Path) -> None:
    source = "".join(Path(name).read_text() for name in ("runtime.c", "driver.c", "libraries.c", "nccl.c"))
    written = set(re.findall(r"\b((?:__)?(?:cuda|cublas|nccl|nvml|nvrtc|cu)[A-Za-z0-9_]+)\(", source))
    names = {n for path, start in LIBRARIES.items() for n in exported(site / path) if re.match(start, n)}
    header = (site / "nvidia/cu13/include/cuda.h").read_text()
    wrapped = r"(?:__CUDA_API_PTDS\(|__CUDA_API_PTSZ\()?"
    alias = dict(re.findall(rf"#define\s+(cu[A-Z]\w+)\s+{wrapped}(cu[A-Z]\w+)\)?", header))
    names |= set(re.findall(r"CUresult CUDAAPI (cu[A-Z]\w+)\(", header)) | set(alias.values()) | set(NVML.split())
    # what cuGetProcAddress is asked for are the names without a version
    same = {name: version for name, version in alias.items() if version in written and name not in written}
    others = sorted(names - written - same.keys())
    Path("rest.c").write_text(HEAD + "".join(map(ANSWER.format, others)))
    Path("aliases.txt").write_text("".join(f"-Wl,--defsym={name}={version}\n" for name, version in same.items()))
    print(f"{len(written)} functions by hand, {len(others)} that answer 0, {len(same)} aliases")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
