"""The figure of offline runs, from logs of any method."""

import json

import pytest
import yaml

from examples.figures import main
from examples.fpa.dynamics import OfflineRun, ahead_of, draw, sweep
from megatron_rft.report.runs import read


def run(folder, name, future, seed=0, **options):
    folder.mkdir()
    algorithm = {"name": name} | ({"extrapolation": 2.0} if future else {}) | options
    (folder / "recipe.yaml").write_text(
        yaml.safe_dump({"trainer": "offline", "algorithm": algorithm, "run": {"seed": seed}})
    )
    lines = []
    for step in range(1, 30):
        line = {"step": step, "policy/grad_norm": 1.0 / step}
        for side in ("correct", "incorrect"):
            line |= {f"dynamics/log_ratio_{side}": -step, f"dynamics/weight_{side}": 1 / step}
            if future:
                line |= {f"dynamics/future_weight_{side}": 0.5 / step, f"dynamics/future_ratio_{side}": 0.5}
        if step % 10 == 0:
            line |= {"evaluation/pass@1": step / 100, "evaluation/pass@1_se": 0.01, "dynamics/grad_norm_correct": 1.0}
        lines.append(json.dumps(line))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_one_figure_of_all_runs(tmp_path, capsys):
    folders = [run(tmp_path / "fpa", "fpa", True), run(tmp_path / "dpo", "dpo", False)]
    assert draw(folders, tmp_path / "figure.png").stat().st_size > 10_000
    main(["dynamics", *map(str, folders), "--out", str(tmp_path / "again.svg")])
    text = (tmp_path / "again.svg").read_text()
    assert "again.svg" in capsys.readouterr().out and "<svg" in text


@pytest.mark.parametrize(
    "name,options,weights,extrapolation",
    [
        ("fpa", {}, ("future_weight_correct", "future_weight_incorrect"), 2.0),
        ("fpa", {"fpa_on": "correct"}, ("future_weight_correct", "weight_incorrect"), None),
        ("fpa", {"fpa_on": "incorrect"}, ("weight_correct", "future_weight_incorrect"), None),
        ("off_rl", {}, ("weight_correct", "weight_incorrect"), 0.0),
        ("off_rl", {"kl_coefficient": 0.1}, ("weight_correct", "weight_incorrect"), None),
        ("kto", {}, ("weight_correct", "weight_incorrect"), None),
    ],
)
def test_what_a_run_weights_by_and_where_it_stands_over_lambda(tmp_path, name, options, weights, extrapolation):
    found = OfflineRun.of(read(run(tmp_path / "run", name, name == "fpa", **options)), name)
    assert tuple(found.weight(side) for side in ("correct", "incorrect")) == weights
    assert found.extrapolation == extrapolation


def refusal(capsys, *arguments) -> str:
    with pytest.raises(SystemExit) as caught:
        main(["dynamics", *map(str, arguments)])
    assert caught.value.code == 2
    return capsys.readouterr().err


def test_what_cannot_be_drawn(tmp_path, capsys):
    assert "is not the folder of a run" in refusal(capsys, tmp_path)
    offline = run(tmp_path / "dpo", "dpo", False)
    assert "docx" in refusal(capsys, offline, "--out", tmp_path / "x.docx")
    assert "No such file" in refusal(capsys, offline, "--out", tmp_path / "no" / "x.png")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    (tmp_path / "recipe.yaml").write_text("algorithm: {name: grpo}\n")
    assert f"no offline run is among {tmp_path}" in refusal(capsys, tmp_path, "--out", tmp_path / "x.png")
    assert not (tmp_path / "x.png").exists()


def test_accuracy_over_lambda_by_hand(tmp_path):
    """Off-RL once, FPA with two seeds, of which the second was tested."""
    folders = [run(tmp_path / "off_rl", "off_rl", False)]
    for seed, tested in enumerate(((0.3,), (0.3, 0.5))):
        (tmp_path / f"seed{seed}").mkdir()
        folders.append(run(tmp_path / f"seed{seed}/fpa", "fpa", True, seed))
        for step, value in enumerate(tested):
            result = folders[-1] / f"evaluation/test_step_{step:06d}/results.json"
            result.parent.mkdir(parents=True)
            result.write_text(json.dumps([{"pass_at_1": value, "standard_error": 0.02}]))
    measured = {"a": (0.2, 0.03), "b": (0.6, 0.04)}
    benchmarks = [{"name": name, "pass_at_1": p, "standard_error": e} for name, (p, e) in measured.items()]
    (folders[0] / "evaluation/export").mkdir(parents=True, exist_ok=True)
    (folders[0] / "evaluation/export/results.json").write_text(json.dumps(benchmarks))
    found = sweep([OfflineRun.of(read(folder), "fpa") for folder in folders])
    assert found["held-out, best"] == [(0.0, 0.2, 0.01), (2.0, 0.2, 0.0)] and found["test"] == [(2.0, 0.5, 0.02)]
    assert found["benchmarks"] == [(0.0, pytest.approx(0.4), pytest.approx(0.025))]  # sqrt(0.03^2 + 0.04^2) / 2
    text = draw(folders, tmp_path / "figure.svg").read_text()
    assert text.count("FPA, correct") == 1  # seeds share a line of the legend


def test_how_far_fpa_is_ahead_of_off_rl(tmp_path):
    runs = [OfflineRun.of(read(run(tmp_path / name, name, name == "fpa")), name) for name in ("off_rl", "fpa")]
    assert ahead_of(*runs) == [(step, 0.5) for step in range(1, 30)] and not ahead_of(runs[0], runs[0])
