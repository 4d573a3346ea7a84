"""PIPO in miniature: every base algorithm with and without it, from the same warm start, each at its own best rate.

    python examples/miniature/pipo.py [--regime few_prompts] [--only grpo grpo_pipo] [--seeds 0 1 2 3 4]

A model of 0.2 M parameters learns arithmetic from careless demonstrations, then 30 steps of reinforcement learning
(examples/pipo/tiny). The regimes are those in which a reward may fall, where the paper expects PIPO to help:

    plain        32 problems a step
    few_prompts  8 problems a step: the mean reward is a small sample
    noisy        one reward in ten is inverted; the accuracy is not
    off_policy   four epochs over each batch

`--regime smollm2 --seeds 0 1 2` is GRPO of SmolLM2-135M-Instruct (examples/smollm2): ten steps at one rate, since a run
takes minutes.

OUT/REGIME/stability.md has for each arm what figure 3b of the paper shows: spikes of the gradient norm and how far the
reward falls, beside eta(p) at the steps' success rates.
"""

import sys
from pathlib import Path
from statistics import fmean, median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from examples.drawing import smooth  # noqa: E402
from examples.miniature import study  # noqa: E402
from examples.pipo import online  # noqa: E402
from megatron_rft.report.groups import grouped  # noqa: E402
from megatron_rft.report.runs import RecordedRun, read  # noqa: E402

RECIPES = study.EXAMPLES / "pipo" / "tiny"
RATES = {"ppo": (1e-4, 2e-4, 4e-4)}
OTHERS = (5e-5, 1e-4, 2e-4, 4e-4, 8e-4)
FLIPPED = Path(__file__).with_name("flipped.py")
REGIMES = {
    "plain": [],
    "few_prompts": ["rollout.prompts_per_step=8", "algorithm.mini_batch_prompts=4"],
    "noisy": ["reward.kind=own", f"reward.function={FLIPPED}:flipped", "reward.maximum=1.0"],
    "off_policy": ["algorithm.epochs=4"],
    "smollm2": ["run.steps=10", "data.validation=null", "evaluation.every=null"],
}
KEYS = ("optimizer.lr", "pipo.learning_rate")  # alpha_PI is alpha_std in the paper
UNFIT = {"few_prompts": {"ppo"}, "noisy": {"sdpo"}, "off_policy": {"sdpo"}}  # no groups; a teacher that reads rewards


def arms(regime: str) -> list[study.Arm]:
    if regime == "smollm2":
        recipe, rates = study.SMOLLM2 / "grpo_pipo.yaml", (2e-5,)
        base = study.Arm("grpo", recipe, rates, ("pipo=null",))
        return [base, study.Arm("grpo_pipo", recipe, rates, (), "grpo", KEYS)]
    found = []
    for name in ("ppo", "grpo", "gspo", "dapo", "sdpo"):
        if name not in UNFIT.get(regime, ()):
            rates = RATES.get(name, OTHERS)
            if regime == "off_policy":  # four epochs take four times the optimizer steps
                rates = (rates[0] / 4, rates[0] / 2, *rates)
            found.append(study.Arm(name, RECIPES / f"{name}.yaml", rates))
            found.append(study.Arm(f"{name}_pipo", RECIPES / f"{name}_pipo.yaml", rates, (), name, KEYS))
    return found


def stability(folders: list[Path]) -> str:
    """Markdown: for each arm the means over its runs, whose reward is 0 or 1."""
    lines = [
        "| arm | success rate p: lowest, mean, highest | eta(p), mean | gradient norm, median | largest / median "
        "| largest fall of the reward |",
        "|---|---|---|---|---|---|",
    ]
    for group in grouped([read(folder) for folder in folders]):
        rows = list(zip(*map(steadiness, group.runs), strict=True))
        low, mean, high, scale, norm, spike, fall = map(fmean, rows)
        cells = [f"{low:.2f}, {mean:.2f}, {high:.2f}", f"{scale:.2f}", f"{norm:.3f}", f"{spike:.1f}", f"{fall:.3f}"]
        lines.append("| " + " | ".join([group.name, *cells]) + " |")
    return "\n".join(lines) + "\n"


def steadiness(run: RecordedRun) -> tuple[float, ...]:
    """(lowest, mean and highest success rate of a step, mean eta, median gradient norm, largest gradient norm over the
    median, largest fall of the smoothed reward below its highest value so far). eta is nan without groups."""
    import torch

    from examples.pipo.scaling import scaling

    size = run.options["rollout.group_size"]
    rewards, norms = (run.of(name)[1] for name in ("reward/mean", "policy/grad_norm"))
    inside = torch.tensor([reward for reward in rewards if 0 < reward < 1])
    scale = float(scaling(inside, size).mean()) if size > 1 and len(inside) else float("nan")
    smoothed = smooth(rewards)
    fall = max(max(smoothed[: i + 1]) - value for i, value in enumerate(smoothed))
    middle = median(norms)
    return min(rewards), fmean(rewards), max(rewards), scale, middle, max(norms) / middle, fall


def draw(folders: list[Path], path: Path) -> Path:
    text = stability(folders)
    path.with_name("stability.md").write_text(text)
    print(text)
    return online.draw(folders, path)


def main() -> None:
    args = study.parser(__doc__, "runs/miniature/pipo", REGIMES).parse_intermixed_args()
    shared = [*study.model_options(args.regime, RECIPES, args.out), *REGIMES[args.regime]]
    study.main(args, arms(args.regime), shared, draw)


if __name__ == "__main__":
    main()
