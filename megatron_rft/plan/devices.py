"""The rates of devices and links by their data sheets, and the share of them that kernels reach. No torch.

Sources: NVIDIA's data sheets of A100, H100 SXM, H20, H200 SXM and DGX B200 (dense bf16 rates, not sparse; NVLink per
direction, which is half of the sheets' sum); memory as nvidia-smi shows it. Each GPU has one network port: 400 Gbit/s,
as in DGX H100, and 200 Gbit/s beside an A100.
"""

from dataclasses import dataclass

from megatron_rft.config.messages import hint
from megatron_rft.utils.errors import UserError

GIB = 1 << 30
NODE = 8  # GPUs
RESERVED = 3 * GIB // 2  # approximate size of CUDA's context, NCCL's buffers and libraries


@dataclass(frozen=True)
class Device:
    name: str
    flops: float  # bf16, per second
    bandwidth: float  # of its memory, bytes per second
    memory: float  # bytes
    nvlink: float  # bytes per second and direction
    network: float = 50e9  # bytes per second and direction

    @property
    def usable(self) -> float:
        return self.memory - RESERVED


@dataclass(frozen=True)
class Efficiency:
    """Shares of the data sheet that kernels reach, and fixed costs in seconds. They are assumptions."""

    compute: float = 0.65  # of the rate, for large matrix products
    memory: float = 0.8  # of the bandwidth, for all other kernels
    link: float = 0.75
    launch: float = 4e-6  # shortest kernel
    latency: float = 20e-6  # start of a collective


MIB = 1 << 20
DEVICES = {
    "a100": Device("A100", 312e12, 2.039e12, 81920 * MIB, 300e9, 25e9),
    "h100": Device("H100", 989.4e12, 3.35e12, 81559 * MIB, 450e9),
    "h20": Device("H20", 148e12, 4.0e12, 97871 * MIB, 450e9),
    "h200": Device("H200", 989.4e12, 4.8e12, 143771 * MIB, 450e9),
    "b200": Device("B200", 2250e12, 8e12, 183359 * MIB, 900e9),
}


def device(name: str) -> Device:
    if name.lower() not in DEVICES:
        raise UserError(f"--device: there is no device {name!r}.{hint(name.lower(), DEVICES)}")
    return DEVICES[name.lower()]
