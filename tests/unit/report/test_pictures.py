from pathlib import Path

from megatron_rft.report.charts import shown
from megatron_rft.report.groups import grouped
from megatron_rft.report.pictures import draw_run
from megatron_rft.report.runs import RecordedRun, read, smooth
from megatron_rft.tracking.metrics import StepFile

RL_STEP = {
    "reward/mean": 0.5,
    "policy/loss": 0.0,
    "policy/kl": 0.001,
    "policy/grad_norm": 0.4,
    "pipo/xi": -1.0,
    "pipo/phi": -0.1,
    "response/length_mean": 12.0,
    "seconds/step": 2.0,
    "seconds/generation": 1.5,
    "seconds/other": 0.5,
}


def write(run_dir, steps: list[dict]) -> None:
    file = StepFile(run_dir / "metrics.jsonl")
    for step, metrics in enumerate(steps):
        file.write(step, metrics)
    file.close()


def test_a_constant_stays_and_a_line_keeps_its_middle():
    assert smooth([3.0] * 50) == [3.0] * 50
    line = smooth([float(i) for i in range(41)])  # windows of 5
    assert line[20] == 20.0 and line[2] == 2.0 and line[0] == 1.0
    assert smooth([1.0, 5.0]) == [1.0, 5.0]


def test_null_and_missing_leave_gaps():
    records = [{"step": 0, "a": 1.0}, {"step": 1, "a": None}, {"step": 2}, {"step": 3, "a": 2.0}]
    run = RecordedRun(Path("run"), {}, records)
    assert run.of("a") == ([0, 3], [1.0, 2.0])
    (group,) = grouped([run])
    assert group.has("a") and not group.has("b")


def charts_of(run_dir, step: dict) -> list[str]:
    write(run_dir, [step])
    return [chart.title for chart in shown(grouped([read(run_dir)]))]


def test_charts_follow_the_metrics(tmp_path):
    assert charts_of(tmp_path / "rl", RL_STEP) == [
        "Reward", "PIPO's improvement", "KL to the reference", "Response length", "Gradient norm",
    ]  # fmt: skip
    sft = {"policy/loss": 1.0, "policy/grad_norm": 1.0}
    assert charts_of(tmp_path / "sft", sft) == ["Loss", "Gradient norm"]


def test_pictures_of_any_length(tmp_path):
    for steps in (0, 1, 2, 300):
        run = tmp_path / f"run{steps}"
        write(run, [{"evaluation/pass@1": 0.25, "evaluation/pass@1_se": 0.01}, *[RL_STEP] * (steps - 1)][:steps])
        picture = draw_run(run)
        assert picture == run / "curves.png" and picture.read_bytes().startswith(b"\x89PNG")
