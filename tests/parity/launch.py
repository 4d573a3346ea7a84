"""Runs a script on several ranks of this machine, for tests: real torchrun, gloo, one thread per rank."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EVERYTHING = os.environ.get("MEGATRON_RFT_PARITY") == "all"  # also what takes minutes and is covered by less


def torchrun(script: str | Path, nproc: int, *args: str, timeout: float = 1200) -> str:
    """What the ranks printed. Fails with the end of it when a rank fails, or when `timeout` seconds have passed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}", str(script)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [*command, *map(str, args)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun then ends its workers, which have process groups of their own
        output, _ = process.communicate(timeout=60)
        raise AssertionError(f"{script} on {nproc} ranks: not done after {timeout} s\n{output[-6000:]}") from None
    assert process.returncode == 0, f"{script} on {nproc} ranks failed\n{output[-6000:]}"
    return output
