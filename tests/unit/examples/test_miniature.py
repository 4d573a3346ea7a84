"""The studies in miniature: their arms, the search and the intervals, on folders as runs leave them."""

import json
import random

import pytest

from examples.miniature import dynamic, fpa, pipo, study
from examples.miniature.flipped import flipped
from megatron_rft.config import load
from megatron_rft.records import Prompt

STUDIES = {
    **{f"pipo {regime}": (pipo.arms(regime), options) for regime, options in pipo.REGIMES.items()},
    **{f"dynamic {regime}": (dynamic.arms(regime), []) for regime in dynamic.REGIMES},
    **{f"fpa {regime}": (fpa.arms(regime), options) for regime, options in fpa.REGIMES.items()},
}


@pytest.mark.parametrize("name", STUDIES)
def test_every_arm_has_a_recipe_that_loads(name, tmp_path):
    arms, options = STUDIES[name]
    names = {arm.name for arm in arms}
    for arm in arms:
        assert arm.against is None or arm.against in names
        given = [
            "model.path=m",
            "data.train=examples/quickstart/arithmetic.py:rows",
            f"run.output_dir={tmp_path}",
            *options,
            *arm.at(arm.rates[-1]),
        ]
        recipe = load(arm.recipe, given)
        assert recipe.optimizer.lr == arm.rates[-1]
        assert recipe.pipo is None or recipe.pipo.learning_rate == arm.rates[-1]


def finished(folder, accuracy: float) -> None:
    for step, value in ((0, 0.1), (30, accuracy)):
        result = folder / f"evaluation/test_step_{step:06d}/results.json"
        result.parent.mkdir(parents=True)
        result.write_text(json.dumps([{"pass_at_1": value}]))
    (folder / "export").mkdir()


@pytest.fixture
def made(tmp_path):
    """Two arms with two rates; the better rate is 2 for the base and 1 for the other. No run is missing."""
    arms = [study.Arm("base", tmp_path, (1, 2)), study.Arm("more", tmp_path, (1, 2), against="base")]
    made = study.Study(tmp_path, arms, seeds=(0, 1, 2), search_seeds=(100,))
    for arm, rate, accuracy in ((0, 1, 0.3), (0, 2, 0.5), (1, 1, 0.6), (1, 2, 0.2)):
        for seed in (0, 1, 2, 100):
            lift = {0: 0.0, 1: 0.1, 2: 0.2}.get(seed, 0.0) * (arm + 1)
            finished(made.folder(arms[arm], rate, seed), accuracy + lift)
    return made


def test_each_arm_gets_its_own_best_rate_and_the_difference_is_paired(made):
    text = made.run()
    rows = {line.split(" | ")[0].strip("| "): line.split(" | ")[1:] for line in text.splitlines()}
    assert json.loads((made.out / "rates.json").read_text())["base"] == {"1": 0.3, "2": 0.5}
    assert rows["base"][:4] == ["2", "0.600", "0.100", "0.500"]  # 0.5, 0.6, 0.7
    # 0.6, 0.8, 1.0 - 0.5, 0.6, 0.7 = 0.1, 0.2, 0.3: mean 0.2, std 0.1, 4.303 * 0.1 / sqrt(3)
    assert rows["more"][:2] == ["1", "0.800"] and rows["more"][4] == "+0.200 ± 0.248"
    assert (made.out / "table.md").read_text() == text


def test_one_rate_for_all_arms_needs_no_search_and_replaces_no_table(made, capsys):
    before = made.run()
    parser = study.parser("", "out", [made.out.name])
    args = parser.parse_args(["--out", str(made.out.parent), "--rates", "1", "--seeds", "0", "1"])
    study.main(args, made.arms, [], lambda folders, path: (len(folders), path.parent.name))
    table = (made.out / "rates_1" / "table.md").read_text()
    assert "| base | 1 | 0.350 |" in table and "| more | 1 | 0.700 |" in table  # 0.3, 0.4; 0.6, 0.8
    assert (made.out / "table.md").read_text() == before
    assert "(4, 'rates_1')" in capsys.readouterr().out


def test_other_overrides_do_not_get_the_results_of_finished_runs(tmp_path):
    study.check_overrides(tmp_path, ["a.b=1"])
    study.check_overrides(tmp_path, ["a.b=1"])
    with pytest.raises(SystemExit, match=r"runs with other overrides \(a.b=1\)"):
        study.check_overrides(tmp_path, [])


def test_the_interval_by_hand():
    mean, half = study.interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert mean == 3.0 and half == pytest.approx(2.776 * 1.5811388 / 5**0.5, rel=1e-6)
    assert study.interval([1.0])[1] == float("inf")


def test_spikes_and_falls_of_runs_by_hand(tmp_path):
    folders = [tmp_path / f"seed_{seed}" for seed in (0, 1)]
    for seed, folder in enumerate(folders):
        folder.mkdir()
        recipe = {"run": {"name": "grpo", "seed": seed}, "rollout": {"group_size": 2}}
        (folder / "recipe.yaml").write_text(json.dumps(recipe))
        steps = [(0.5, 1.0), (0.75, 1.0), (0.25 + seed / 4, 4.0 + 2 * seed)]  # reward, gradient norm
        rows = [{"step": i, "reward/mean": r, "policy/grad_norm": n} for i, (r, n) in enumerate(steps, 1)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    row = pipo.stability(folders).splitlines()[-1].split(" | ")
    # eta(p) of two responses is 1 / (2 p (1-p)): 2, 2.67, 2.67 and 2, 2.67, 2. Falls: 0.5 and 0.25.
    assert row[0] == "| grpo" and row[1] == "0.38, 0.54, 0.75"
    assert row[2] == "2.33" and row[3:] == ["1.000", "5.0", "0.375 |"]


def test_the_shared_part_of_a_wrong_trajectory():
    assert fpa._shared([1, 2, 3, 4], [[1, 2, 9], [7, 7, 3]]) == 0.75


def test_late_slips_change_the_last_step_alone():
    rows = [{"question": f"q{i}", "answer": f"1 (1) +1=2 (2) +{i}={2 + i}\n#### {2 + i}"} for i in range(8)] * 50
    wrong = 0
    for before, after in zip(rows, fpa.late_slips(rows, random.Random(0)), strict=True):
        value = int(before["answer"].rpartition(" ")[2])
        given = int(after["answer"].rpartition(" ")[2])
        wrong += given != value
        assert abs(given - value) <= 2 and given >= 0 and before["question"] == after["question"]
        assert after["answer"] == before["answer"].removesuffix(f"{value}\n#### {value}") + f"{given}\n#### {given}"
    assert 0.5 < wrong / 400 < 0.7


def test_one_reward_in_ten_is_the_other_way_round_and_the_accuracy_is_not():
    prompt = Prompt(index=0, token_ids=(0,), text="1+1", answer="2")
    scores = [flipped(prompt, f"{'x' * i} #### {2 + i % 2}") for i in range(400)]
    wrong = sum(score.reward != float(score.correct) for score in scores)
    assert 0.05 < wrong / 400 < 0.15 and sum(score.correct for score in scores) == 200
