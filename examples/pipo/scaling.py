"""Draws figure 3a of the PIPO paper: eta(p) for some group sizes, and its limits at both ends."""

from pathlib import Path

import torch
from matplotlib.figure import Figure

from megatron_rft.objectives.analysis import boundary_scaling, scaling


def draw(sizes: tuple[int, ...], path: Path) -> Path:
    success = torch.linspace(-9, 9, 600, dtype=torch.float64).sigmoid()  # close to 0 and 1 as well
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    for size in sizes:
        (line,) = axes.plot(success, scaling(success, size), label=f"G = {size}")
        axes.plot(success, boundary_scaling(success, size), ":", color=line.get_color(), linewidth=1)
    limit = (success * (1 - success)) ** -0.5
    axes.plot(success, limit, "k--", linewidth=1, label=r"$G \to \infty$: $1/\sqrt{p(1-p)}$")
    axes.set(xlabel="success rate p", ylabel=r"gradient scaling $\eta(p)$", yscale="log", ylim=(1, 300))
    axes.legend(title="dotted: the limit at the ends", frameon=False)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
    return path
