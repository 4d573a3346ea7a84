"""Estimates the memory of a run without a GPU: a rank's engine, weights and libraries are in one process. No torch.

The estimates are those of memory.py, plus the resident libraries. A vLLM on a CPU does not sleep: its copy of the
weights stays in memory during training.
"""

from megatron_rft.plan.memory import GIB, MemoryPlan, gib
from megatron_rft.utils.device import machine_bytes

LIBRARIES = {False: 0.5, True: 0.7}  # GiB of a process with a tiny model, without and with vLLM: Python, torch, ...


def resident(m: MemoryPlan) -> int:
    """Return the approximate peak bytes of a rank's process, without checkpoints."""
    return _always(m) + (m.activations + m.engine if m.engines.by_vllm else max(m.activations, m.engine + m.cache))


def at_checkpoint(m: MemoryPlan) -> int:
    """Return the approximate bytes of a rank's process while it makes a checkpoint."""
    return _always(m) + m.engine * m.engines.by_vllm + m.checkpoint


def _always(m: MemoryPlan) -> int:
    return round(LIBRARIES[m.engines.by_vllm] * GIB) + m.state.total + m.awake + m.links + m.host


def lines(m: MemoryPlan, ranks: int, engines: int) -> list[str]:
    """`ranks`: on this machine. `engines`: processes outside of the ranks."""
    most, here = max(resident(m), at_checkpoint(m)), machine_bytes()
    each = m.engines.weights + round(LIBRARIES[m.engines.by_vllm] * GIB)
    total = ranks * most + engines * each
    saving = f", {gib(most)} during a checkpoint" if most > resident(m) else ""
    report = [f"memory without a GPU: about {gib(resident(m))} a rank{saving}; {gib(total)} on this machine"]
    if total > here:
        report.append(
            f"warning: that is more than the machine's {gib(here)}, and the system may kill a rank. Take fewer ranks, "
            "or lower batching.micro_batch_tokens"
        )
    return report
