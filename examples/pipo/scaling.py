"""Draws figure 3a of the PIPO paper: eta(p), the factor by which group-relative normalisation scales the gradient of a
problem (pipo.txt Theorem 6.2), for some group sizes, and its limits at both ends.
"""

import math
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor


def scaling(success: Tensor, group_size: int) -> Tensor:
    """eta(p), with E[gradient of GRPO | not all rewards equal] = eta(p) grad p for a reward of 0 or 1.

        eta(p) = sum_k sqrt(k (G - k)) C(G, k) p^k (1-p)^(G-k)  /  (G p (1-p) (1 - p^G - (1-p)^G)),   k = 1 .. G-1

    Computed as E[sqrt(k (G - k))] / (G p (1-p)) over the number k of right responses, given that 0 < k < G. The
    probabilities are normalised in logarithms: nothing cancels near p = 0 and 1, and no binomial overflows.

    Args:
        success: [N] probabilities that a response is right, strictly between 0 and 1.
        group_size: G, at least 2.

    Returns:
        [N] float64.
    """
    if group_size < 2:
        raise ValueError(f"group_size: {group_size}; responses are compared within a group of 2 or more")
    p = success.double()
    if not bool(((p > 0) & (p < 1)).all()):
        raise ValueError("success: probabilities must be strictly between 0 and 1: at the ends eta is infinite")
    k = torch.arange(1, group_size, dtype=torch.float64)
    binomials = math.lgamma(group_size + 1) - torch.lgamma(k + 1) - torch.lgamma(group_size - k + 1)
    logs = binomials + k * p.log().unsqueeze(1) + (group_size - k) * torch.log1p(-p).unsqueeze(1)
    spread = (k * (group_size - k)).sqrt()
    return (logs.softmax(1) * spread).sum(1) / (group_size * p * (1 - p))


def boundary_scaling(success: Tensor, group_size: int) -> Tensor:
    """The limit of eta(p) at p = 0 and 1: sqrt(G - 1) / (G p (1-p)) (pipo.txt Corollary 6.3). [N] -> [N] float64"""
    p = success.double()
    return math.sqrt(group_size - 1) / (group_size * p * (1 - p))


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
