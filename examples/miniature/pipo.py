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
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from examples.miniature import study  # noqa: E402
from examples.pipo import online  # noqa: E402

RECIPES = study.EXAMPLES / "pipo" / "tiny"
RATES = {"ppo": (1e-4, 2e-4, 4e-4), "sdpo": (5e-5, 1e-4, 2e-4, 4e-4)}
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


def main() -> None:
    args = study.parser(__doc__, "runs/miniature/pipo", REGIMES).parse_intermixed_args()
    shared = [*study.model_options(args.regime, RECIPES, args.out), *REGIMES[args.regime]]
    study.main(args, arms(args.regime), shared, online.draw)


if __name__ == "__main__":
    main()
