"""Runs a script on several ranks of this machine, for tests: gloo, one thread per rank.

`run_ranks` forks the ranks from the tests' server, under the launcher of `megatron-rft train --nproc`; `torchrun` is
the real torchrun.
"""

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from megatron_rft.launching.ranks import launch
from tests.fork_server import ENVIRONMENT, Forked, ForkedVLLM

EVERYTHING = os.environ.get("MEGATRON_RFT_PARITY") == "all"  # also what takes minutes and is covered by less


def run_ranks(script: str | Path, nproc: int, *args: object, timeout: float = 1200, vllm: bool = False) -> str:
    """The ranks' output. Fails with the end of the output if a rank fails or `timeout` seconds have passed. `vllm`: it
    is imported before they are forked."""
    return finished(
        ForkedVLLM if vllm else Forked, [sys.executable, __file__, str(nproc), str(script), *map(str, args)], timeout
    )


def torchrun(script: str | Path, nproc: int, *args: object, timeout: float = 1200) -> str:
    """The same with torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}", str(script)]
    return finished(subprocess.Popen, [*command, *map(str, args)], timeout)


def finished(start: type[subprocess.Popen], command: list[str], timeout: float) -> str:
    process = start(
        command,
        env=os.environ | ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.terminate()  # both launchers then end their ranks, which have their own process groups
        output, _ = process.communicate(timeout=60)
        raise AssertionError(f"{command}: not done after {timeout} s\n{output[-6000:]}") from None
    assert process.returncode == 0, f"{command} failed\n{output[-6000:]}"
    return output


if __name__ == "__main__":
    with TemporaryDirectory() as notes:
        status = launch([sys.executable, *sys.argv[2:]], int(sys.argv[1]), notes)
    sys.exit(status)
