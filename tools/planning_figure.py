"""Draws what holds a rank's memory at the peak of each phase of a step, as docs/planning.md shows it.

megatron-rft rehearse RECIPE ... --json counts.json
python tools/planning_figure.py counts.json docs/planning_memory.png [STAGE, from 1]
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

GIB = 1 << 30
ORDER = ("weights", "gradients", "optimizer", "other weights", "activations", "backward")
HIDDEN = ("start", "loading", "between")  # they are not part of a step


def main(counts: str, out: str, number: str = "1") -> None:
    stages = {stage["number"] + 1: stage for stage in json.loads(Path(counts).read_text())}
    peaks = {name: peak for name, peak in stages[int(number)]["found"]["peaks"].items() if name not in HIDDEN}
    shown = {part for peak in peaks.values() for part, size in peak["parts"].items() if size > peak["total"] / 100}
    left = [0.0] * len(peaks)
    figure, axes = plt.subplots(figsize=(9, 0.55 * len(peaks) + 1.6), layout="constrained")
    for part in sorted(shown, key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name)):
        widths = [peak["parts"].get(part, 0) / GIB for peak in peaks.values()]
        axes.barh(list(peaks), widths, left=left, label=part or "rest")
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("GiB at the peak of the phase")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    figure.savefig(out, dpi=100)
    print(out)


if __name__ == "__main__":
    main(*sys.argv[1:])
