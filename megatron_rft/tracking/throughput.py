"""Measures tokens per second and per device, and model FLOPs utilisation (MFU).

Model FLOPs as in arXiv:2204.02311, appendix B: a token of a sequence of length l costs 2 N in the matrices (N: the
parameters that multiply it, so the experts it is routed to and the output matrix, but not the embedding), and 2 L q l
in causal attention (L layers, q = heads x head size, on average l / 2 keys); backward costs twice as much. Activation
recomputation and forward passes without a backward pass are not counted.
"""

from dataclasses import dataclass

import torch

from megatron_rft.plan.parameters import Sizes
from megatron_rft.records import Batch

# Dense bf16 peak by a part of CUDA's device name, from NVIDIA's and AMD's data sheets; the first match counts.
PEAK_TFLOPS = {
    "GB200": 2500.0,
    "B200": 2250.0,
    "H200": 989.4,
    "GH200": 989.4,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.4,
    "H800": 989.4,
    "H20": 148.0,
    "A100": 311.9,
    "A800": 311.9,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "A40": 149.7,
    "A10G": 70.0,
    "A10": 125.0,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
    "MI300X": 1307.4,
    "MI250X": 383.0,
}


def peak_tflops(device: str | None) -> float | None:
    """Return the peak of a device of that name; None if it is unknown."""
    return next((peak for name, peak in PEAK_TFLOPS.items() if device and name in device), None)


def device_name() -> str | None:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


@dataclass
class Throughput:
    """Counts the tokens and FLOPs of a training step's optimizer steps. `peak`: TFLOP/s of one device, or None."""

    sizes: Sizes
    devices: int
    peak: float | None
    tokens: float = 0.0
    flops: float = 0.0

    def trained(self, batch: Batch, share_prompts: bool = False) -> None:
        """Count a mini-batch of all ranks. A shared prompt counts once, also if its group was split over ranks."""
        prompts, lengths = batch.prompt_lens.double(), batch.lengths.double()
        self.tokens += lengths.sum().item()
        again = torch.zeros(len(batch), dtype=torch.bool)  # whether an earlier sequence has computed the prompt
        if share_prompts:
            numbers = batch.prompt_numbers
            again[1:] = numbers[1:] <= numbers.cummax(0).values[:-1]
        computed = (lengths.sum() - prompts[again].sum()).item()
        pairs = (lengths.square().sum() - prompts[again].square().sum()).item()
        self.flops += 3 * (2 * self.sizes.multiplied * computed + 2 * len(self.sizes.mixture) * self.sizes.q * pairs)

    def take(self, metrics: dict[str, float]) -> dict[str, float]:
        """Return the throughput metrics of the step that `metrics` describes, and reset the counts."""
        found = {}
        if "tokens/generated" in metrics:
            found["tokens/per_second"] = metrics["tokens/generated"] / metrics["seconds/step"]
            found["tokens/per_second_per_device"] = found["tokens/per_second"] / self.devices
        seconds = metrics.get("seconds/training", 0.0) + metrics.get("seconds/verification", 0.0)
        if seconds and self.tokens:
            found["tokens/trained_per_second_per_device"] = self.tokens / seconds / self.devices
            if self.peak:
                found["training/mfu"] = self.flops / (seconds * self.devices * self.peak * 1e12)
        self.tokens = self.flops = 0.0
        return found
