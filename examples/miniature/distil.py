"""Distillation beside GRPO in miniature: a student of 1 M parameters and a teacher of 3 M, from the same warm start.

    python examples/miniature/distil.py [--seeds 0 1 2 3 4]

The teacher learns arithmetic from right worked answers, the student from careless ones, as in the quickstart. Then the
student learns for 60 steps, from the teacher's distribution over its own samples (examples/quickstart/distil.yaml), or
by GRPO from the verifier's reward. What is tested: the student ends within two points of its teacher, and reaches an
accuracy sooner than GRPO does.

OUT/quickstart/levels.md has the steps and the seconds, without evaluations, that each arm needs until the mean reward
of five steps (256 responses each, temperature 1) reaches a level; the last is two points below the teacher.
"""

import sys
from itertools import accumulate
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from examples.miniature import study  # noqa: E402
from examples.pipo import online  # noqa: E402
from examples.quickstart import arithmetic  # noqa: E402
from megatron_rft.report.groups import grouped  # noqa: E402
from megatron_rft.report.runs import RecordedRun, read  # noqa: E402

RECIPES = study.EXAMPLES / "quickstart"
SIZES = {"student": {}, "teacher": {"hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 5}}
WIDTH = 5  # steps of the mean
LEVELS = (0.6, 0.7, 0.8)


def warm_start(name: str, out: Path) -> Path:
    """Train the student or the teacher from random weights. Returns its run's folder."""
    if not (model := out / f"{name}_model").exists():
        arithmetic.write_model_folder(model, **SIZES[name])
    data = ["data.train.split=train"] if name == "teacher" else []
    return study.train(RECIPES / "sft.yaml", out / name, f"model.path={model}", *data)


def until(run: RecordedRun, level: float) -> tuple[int, float] | None:
    """The steps and seconds until the mean reward of the last five steps is at `level`, or None."""
    steps, rewards = run.of("reward/mean")
    whole, evaluations = (dict(zip(*run.of(f"seconds/{name}"), strict=True)) for name in ("step", "evaluation"))
    seconds = list(accumulate(whole[step] - evaluations.get(step, 0.0) for step in steps))
    for i in range(WIDTH, len(steps) + 1):
        if fmean(rewards[i - WIDTH : i]) >= level:
            return steps[i - 1], seconds[i - 1]
    return None


def levels(folders: list[Path], teacher: float) -> str:
    """Markdown: for each arm and level the means over the runs that reached it."""
    lines = ["| arm | accuracy | runs that reach it | steps | seconds |", "|---|---|---|---|---|"]
    for group in grouped([read(folder) for folder in folders]):
        for level in (*LEVELS, teacher - 0.02):
            found = [reached for run in group.runs if (reached := until(run, level))]
            means = [f"{fmean(column):.0f}" for column in zip(*found, strict=True)] or ["–", "–"]
            cells = [group.name, f"{level:.2f}", f"{len(found)} of {len(group.runs)}", *means]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    args = study.parser(__doc__, "runs/miniature/distil", ["quickstart"]).parse_intermixed_args()
    teacher, student = (warm_start(name, args.out) for name in ("teacher", "student"))
    accuracy = study.final(teacher)

    def draw(folders: list[Path], path: Path) -> Path:
        text = f"teacher: {accuracy:.3f}, student before: {study.final(student):.3f}\n\n{levels(folders, accuracy)}"
        path.with_name("levels.md").write_text(text)
        print(text)
        return online.draw(folders, path)

    shared = [f"model.path={student / 'export'}", "checkpoint.every=0"]
    grpo = study.Arm("grpo", RECIPES / "pipo.yaml", (1e-4, 2e-4, 4e-4), ("pipo=null",))
    distil = study.Arm(
        "distil",
        RECIPES / "distil.yaml",
        (1e-4, 3e-4, 1e-3),
        (f"algorithm.teacher={teacher / 'export'}",),
        against="grpo",
    )
    study.main(args, [grpo, distil], shared, draw)


if __name__ == "__main__":
    main()
