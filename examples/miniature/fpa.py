"""FPA in miniature: the offline methods on one set of trajectories, each at its own best rate.

    python examples/miniature/fpa.py [--regime long|entangled] [--only off_rl fpa] [--seeds 0 1 2 3 4]

A small model is warm-started on imperfect worked answers and answers 640 problems eight times; every method learns from
these answers. Seeds are those of the data's order. The regimes:

    short      1.5 passes from a model that is right in 45% of its answers, the best checkpoint (the paper's table 1)
    long       600 steps from one with a shorter warm start, without early stopping: where Off-RL falls back (figure 3)
    entangled  as short, from one that makes its mistakes in the last step: right and wrong trajectories differ in two
               tokens

`--regime smollm2 --seeds 0 1 2` is SmolLM2-135M-Instruct (examples/smollm2) on its own answers, one pass at one rate.

`entanglement` in OUT/rates.json is the share of a wrong trajectory's tokens that stand in a right one to the same
problem as well: where it is high, penalising the wrong one also penalises the right one.
"""

import json
import random
import sys
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from examples.fpa import dynamics  # noqa: E402
from examples.miniature import study  # noqa: E402
from examples.quickstart import arithmetic  # noqa: E402

RECIPES = study.EXAMPLES / "fpa" / "miniature"
MODEL = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
SHORT = (5e-5, 1e-4, 3e-4, 1e-3)
RATES = {"short": SHORT, "long": (*SHORT, 3e-3, 1e-2), "entangled": SHORT, "smollm2": (1e-5,)}
LATE_SLIPS = 0.6  # of the demonstrations of `entangled`
METHODS = {  # tables 1 and 2, figure 5
    "sft": "{name: rft}",
    "dpo": "{name: dpo}",
    "rpo": "{name: rpo}",
    "kto": "{name: kto}",
    "a_star_po": "{name: a_star_po}",
    "off_rl": "{name: off_rl, part_norms_every: 10}",
    "off_rl_kl": "{name: off_rl, kl_coefficient: 0.04, kl_aggregation: sequence_sum}",
    "fpa": "{name: fpa, part_norms_every: 10}",
    "fpa_correct": "{name: fpa, fpa_on: correct}",
    "fpa_incorrect": "{name: fpa, fpa_on: incorrect}",
    "fpa_lambda_0.5": "{name: fpa, extrapolation: 0.5}",
    "fpa_lambda_2": "{name: fpa, extrapolation: 2.0}",
    "fpa_lambda_5": "{name: fpa, extrapolation: 5.0}",
    "fpa_lambda_10": "{name: fpa, extrapolation: 10.0}",
}
EPOCHS = {"short": 5.0, "long": 3.0, "entangled": 5.0}  # of the warm start
REGIMES = {
    "short": [],
    "long": ["run.steps=600", "run.epochs=null", "evaluation.every=50", "evaluation.patience=null"],
    "entangled": [],
    "smollm2": [],
}


def arms(regime: str) -> list[study.Arm]:
    """The arms; each is compared with Off-RL."""
    recipe = study.SMOLLM2 / "fpa.yaml" if regime == "smollm2" else RECIPES / "common.yaml"
    return [
        study.Arm(name, recipe, RATES[regime], (f"algorithm={how}",), None if name == "off_rl" else "off_rl")
        for name, how in METHODS.items()
    ]


def start(out: Path, regime: str) -> tuple[list[str], Path]:
    """Options of every run, and the store of trajectories."""
    store = out / f"{regime}_trajectories"
    if regime == "smollm2":
        places = study.smollm2(out)
        model, recipe = places["model"], study.SMOLLM2 / "trajectories.yaml"
        options = [f"data.train.path={places['train']}"]
        shared = [f"data.test={places['test']}"]
    else:
        model, recipe, options, shared = warm_start(out, regime), RECIPES / "generate.yaml", [], []
    study.train(recipe, store, f"model.path={model}", *options, command="generate", done="index.json")
    return [f"model.path={model}", f"data.train={store}", *shared], store


def warm_start(out: Path, regime: str) -> Path:
    if not (out / "model").exists():
        arithmetic.write_model_folder(out / "model", **MODEL)
    options = [f"model.path={out / 'model'}", f"run.epochs={EPOCHS[regime]}", "optimizer.lr=5e-3", "data.test=null"]
    if regime == "entangled":
        rows = late_slips(arithmetic.rows("train"), random.Random(0))
        demonstrations = out / "late_slips.jsonl"
        demonstrations.write_text("".join(json.dumps(row) + "\n" for row in rows))
        options.append(f"data.train={demonstrations}")
    return study.train(study.EXAMPLES / "quickstart/sft.yaml", out / f"{regime}_warm", *options) / "export"


def late_slips(rows: list[dict], rng: random.Random) -> list[dict]:
    """Make the last step of a share LATE_SLIPS of the worked answers wrong, by 1 or 2."""
    found = []
    for row in rows:
        work, _, value = row["answer"].rpartition("\n#### ")
        if rng.random() < LATE_SLIPS:
            wrong = arithmetic.slipped(int(value), rng)
            row = row | {"answer": f"{work.removesuffix(value)}{wrong}\n#### {wrong}"}
        found.append(row)
    return found


def entanglement(store: Path) -> float:
    """Mean over problems with both kinds, and over their wrong trajectories, of the share of tokens (with their places)
    that some right trajectory has too."""
    import pyarrow.parquet as parquet

    problems: dict[int, dict[bool, list[list[int]]]] = {}
    for shard in sorted((store / "shards").glob("*.parquet")):
        for row in parquet.read_table(shard, columns=["problem", "response_ids", "reward"]).to_pylist():
            problems.setdefault(row["problem"], {True: [], False: []})[row["reward"] > 0].append(row["response_ids"])
    mixed = [sides for sides in problems.values() if sides[True] and sides[False]]
    return fmean(fmean(_shared(wrong, sides[True]) for wrong in sides[False]) for sides in mixed)


def _shared(wrong: list[int], right: list[list[int]]) -> float:
    known = {place for tokens in right for place in enumerate(tokens)}
    return fmean(place in known for place in enumerate(wrong))


def main() -> None:
    args = study.parser(__doc__, "runs/miniature/fpa", REGIMES).parse_intermixed_args()
    shared, store = start(args.out, args.regime)
    study.note(args.out / args.regime / "rates.json", "entanglement", entanglement(store))
    study.main(args, arms(args.regime), [*shared, *REGIMES[args.regime]], dynamics.draw)


if __name__ == "__main__":
    main()
