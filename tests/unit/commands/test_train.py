"""What is set before a run imports torch."""

import os
import subprocess
import sys

RUN = """
import os
from megatron_rft.commands.train import work
from megatron_rft.utils.end_with_parent import children

def run():
    from torch._inductor.async_compile import AsyncCompile

    AsyncCompile.warm_pool()  # what importing this does where there is triton
    print("children", children(os.getpid()), flush=True)
    return 0

work("run", run)
"""


def test_torch_starts_no_processes_that_compile(tmp_path):
    """Stop signals would end them, and then the next compilation would end the run."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("TORCHINDUCTOR_COMPILE_THREADS", None)
    done = subprocess.run([sys.executable, "-c", RUN], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "children []" in done.stdout, done.stdout + done.stderr
