"""The dynamic constraint in miniature: none, static and dynamic, in the reward and in the loss, each at its best rate.

    python examples/miniature/dynamic.py [--regime dapo] [--only none static dynamic_reward]

A model of 0.2 M parameters learns careless arithmetic, and to refine; then 50 steps of PPO or DAPO (the regimes) on
examples/dynamic/tiny. The rates reach those at which runs without a constraint collapse. `no_filter` learns all
refinements. `--regime smollm2 --seeds 0 1 2` is GRPO of SmolLM2-135M-Instruct (examples/smollm2): ten steps, one rate.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from examples.dynamic import constraints  # noqa: E402
from examples.miniature import study  # noqa: E402

RECIPES = study.EXAMPLES / "dynamic" / "tiny"
REGIMES = {"ppo": RECIPES, "dapo": RECIPES / "dapo", "smollm2": study.SMOLLM2}
RATES = {"ppo": (1.5e-4, 3e-4, 6e-4), "dapo": (1e-4, 2e-4, 6e-4), "smollm2": (2e-5,)}
REFINE = (f"constraint.template={RECIPES / 'refine.txt'}", "constraint.per=responses")
KINDS = {
    "none": ("none", (), None),
    "static": ("static", (), "none"),
    "dynamic_reward": ("dynamic", (*REFINE, "constraint.mode=reward"), "static"),
    "dynamic_loss": ("dynamic", (*REFINE, "constraint.mode=loss"), "static"),
    "no_filter": ("dynamic", (*REFINE, "constraint.mode=loss", "constraint.filter=false"), "dynamic_loss"),
}
SMOLLM2 = {
    "none": ("dynamic", ("constraint=null",), None),
    "static": ("dynamic", ("constraint={kind: static, eta: 0.01, share: null, kl_every: 2}",), "none"),
    "dynamic_reward": ("dynamic", ("constraint={kl_every: 2, mode: reward}",), "static"),
}


def arms(regime: str) -> list[study.Arm]:
    folder, kinds = REGIMES[regime], SMOLLM2 if regime == "smollm2" else KINDS
    return [
        study.Arm(name, folder / f"{recipe}.yaml", RATES[regime], options, against)
        for name, (recipe, options, against) in kinds.items()
    ]


def main() -> None:
    args = study.parser(__doc__, "runs/miniature/dynamic", REGIMES).parse_intermixed_args()
    study.main(args, arms(args.regime), study.model_options(args.regime, RECIPES, args.out), constraints.draw)


if __name__ == "__main__":
    main()
