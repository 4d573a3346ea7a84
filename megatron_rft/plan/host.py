"""Memory of a run without a GPU, where a rank's engine, weights and libraries are all in one process. No torch.

Estimated as memory.py does, with the resident libraries added. A vLLM on a CPU does not sleep: its copy of the weights
stays through training.
"""

from megatron_rft.plan.memory import GIB, Memory, gib
from megatron_rft.utils.host_memory import machine_bytes

LIBRARIES = {False: 0.5, True: 0.7}  # GiB of a process with a tiny model, without and with vLLM: Python, torch, ...


def resident(m: Memory, vllm: bool) -> int:
    """Bytes of a rank's process at their most, about, without the gathering of a checkpoint."""
    phase = m.activations + m.engine if vllm else max(m.activations, m.engine + m.cache)
    return round(LIBRARIES[vllm] * GIB) + m.state.total + m.awake + m.links + m.host + phase


def lines(m: Memory, vllm: bool, ranks: int, engines: int, weights: int) -> list[str]:
    """`ranks` on this machine; `engines`: processes outside of them, each with so many bytes of `weights`."""
    each = resident(m, vllm)
    total, here = ranks * each + engines * (weights + round(LIBRARIES[vllm] * GIB)), machine_bytes()
    found = [f"memory without a GPU: about {gib(each)} a rank, {gib(total)} on this machine"]
    if here and total > here:
        found.append(
            f"warning: that is more than the machine's {gib(here)}, and the system may kill a rank. Take fewer ranks "
            "(--nproc), or lower batching.micro_batch_tokens"
        )
    return found
