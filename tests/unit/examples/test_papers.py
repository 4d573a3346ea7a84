"""The grids of the papers' tables and figures: every run's recipe, the commands, and tables made of real runs."""

import json
import shutil
from pathlib import Path

import pytest

from examples import papers
from examples.grids import collect, grid
from megatron_rft.config import load
from megatron_rft.config.resume import flat
from tests.integration.tiny import train, write_recipe

FILES = Path("FILES")
ALL = [(paper, name) for paper in grid.papers() for name in grid.read(paper)["tables"]]


def words(entry) -> str:
    return "-".join(entry)


@pytest.mark.parametrize("entry", ALL, ids=words)
def test_every_run_has_a_recipe_that_loads_and_knows_its_benchmarks(entry):
    for table in grid.tables(*entry, files=FILES):
        for run in table.all_runs():
            recipe = load(run.recipe, [*papers._keys(run, []), *papers._benchmarks(table)])
            assert recipe.model.path == run.model and recipe.run.output_dir == str(run.folder)
            known = {*recipe.evaluation.benchmarks, *(["test"] if recipe.data.test else [])}
            asked = {part for column in table.columns if column.domain == run.domain for part in column.parts}
            assert asked <= known, run.folder
            if run.store:
                assert load(run.store).trainer == "generate" and recipe.trainer == "offline"
            if steps := table.content.get("checkpoints"):
                assert steps[-1] == recipe.run.steps and len(steps) <= recipe.checkpoint.keep
                assert not any(step % recipe.checkpoint.every for step in steps)


@pytest.mark.parametrize("entry", ALL, ids=words)
def test_the_papers_numbers_fit_the_columns_and_a_mean_is_that_of_its_columns(entry):
    for table in grid.tables(*entry, files=FILES):
        for row in table.rows:
            cells = row.cells(table.model)
            assert not cells or len(cells) == len(table.columns), row
            since = []
            for column, cell in zip(table.columns, cells, strict=False):
                if cell == "-":
                    continue
                number = float(cell.partition("±")[0])
                if column.kind == "mean":
                    assert number == pytest.approx(sum(since) / len(since), abs=0.11), row
                since = [] if column.kind == "mean" else [*since, number]


@pytest.mark.parametrize("paper", grid.papers())
def test_options_that_a_model_has_are_in_its_recipes(paper):
    for name in grid.read(paper)["tables"]:
        for table in grid.tables(paper, name, files=FILES):
            for option in table.paper["models"][table.model].get("has", []):
                key, _, value = option.partition("=")
                rows = [row for row in table.rows if option in row.options]
                for row in rows:
                    recipe = load(table.run(row, "", 0).recipe)
                    assert flat(json.loads(recipe.model_dump_json()))[key] == float(value), row


def lines(capsys, *arguments: str) -> list[str]:
    assert papers.main([*arguments]) == 0
    return capsys.readouterr().out.splitlines()


def test_the_commands_of_a_table(capsys):
    """Trajectories come before the runs that train on them, each run once, evaluations last."""
    found = [line.split() for line in lines(capsys, "fpa", "table2", "--nodes", "2", "optimizer.lr=1e-7")]
    commands = [line[line.index("megatron-rft") + 1] for line in found if "megatron-rft" in line]
    assert commands == ["generate"] + 6 * ["train"] + 7 * ["evaluate"]
    assert "data.train=runs/fpa/qwen3_4b_base/trajectories" in found[2] and "optimizer.lr=1e-7" in found[2]
    assert found[1][:3] == ["srun", "--nodes=2", "--ntasks-per-node=1"] and found[1][-2:] == ["--nproc", "8"]
    assert "run.output_dir=runs/fpa/qwen3_4b_base/trajectories" in found[1]


def test_a_run_that_two_tables_need_is_one(capsys):
    folders = [
        {run.folder for table in grid.tables("pipo", name) for run in table.all_runs()} for name in ("table4", "table7")
    ]
    shared = Path("runs/pipo/qwen3_4b_base/seed_42")
    assert folders[0] & folders[1] == {shared / "grpo", shared / "grpo_pipo"}
    (model,) = grid.tables("fpa", "rates", "3b")
    row = next(row for row in model.rows if row.method == "FPA, 3e-6")  # what the model's recipes have already
    assert model.run(row, "", 42).folder.name == "fpa" and "optimizer.lr=3e-6" not in model.run(row, "", 42).options


def test_a_figure_evaluates_every_checkpoint_of_every_seed(capsys):
    found = lines(capsys, "pipo", "figure4", "--stage", "evaluate")
    assert sum(" evaluate " in line for line in found) == 6 * 3 * 7
    assert any(line.endswith("--model runs/pipo/qwen3_4b_base/seed_21/dapo/checkpoints/step_000175") for line in found)


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["pipo", "tabel1"], "there is no 'tabel1'. Did you mean 'table1'?"),
        (["pip", "table1"], "paper: there is no 'pip'. Did you mean 'pipo'?"),
        (["pipo", "table1", "--model", "32b"], "--model of pipo table1: there is no '32b'."),
        (["pipo"], "give a table or figure of pipo: table1"),
        (["pipo", "table3"], "--files: Table 3 reads files that no hub has"),
        (["pipo", "table1", "steps"], "'steps' is not an override"),
        (["pipo", "figure2", "--collect", "nowhere"], "none of the 8 runs has begun"),
        (["fpa", "table1", "--submit", "--detach"], "--detach: stages wait for each other"),
        (["pipo", "table1", "--submit", "--account", "me"], "no partition: --partition"),
    ],
)
def test_mistakes(capsys, arguments, said):
    assert papers.main(arguments) == 2
    message = capsys.readouterr().err
    assert said in message and message.count("\n") == 1


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A folder that a training run and its evaluation wrote; its benchmarks have the names of PIPO's table 1."""
    home = tmp_path_factory.mktemp("papers")
    names = ("math500", "aime25", "amc23", "minerva", "olympiadbench")
    recipe = write_recipe(
        home, evaluation={"samples": 8, "benchmarks": {name: str(home / "test.jsonl") for name in names}}
    )
    for command in ("train", "evaluate"):
        status, output = train(recipe, command=command)
        assert status == 0, output
    return home / "run"


@pytest.fixture
def runs(finished, tmp_path) -> Path:
    """GRPO for three seeds and GRPO+PIPO for one, with numbers that can be checked by hand."""
    for at, accuracy in (
        ("seed_6/grpo", 0.2),
        ("seed_21/grpo", 0.4),
        ("seed_42/grpo", 0.6),
        ("seed_42/grpo_pipo", 0.7),
    ):
        folder = tmp_path / "pipo/qwen3_4b_base" / at
        shutil.copytree(finished, folder)
        path = folder / "evaluation/export/results.json"
        results = json.loads(path.read_text())
        for each in results:
            each |= {"pass_at_1": accuracy, "standard_error": 0.05, "pass_at_k": {"1": accuracy, "8": 0.9}}
        path.write_text(json.dumps(results))
    return tmp_path


def rows_of(text: str) -> dict[str, list[str]]:
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")
    ]
    return {row[0]: row[1:] for row in cells}


def test_a_table_of_runs_with_what_is_missing(runs, capsys):
    text = "\n".join(lines(capsys, "pipo", "table1", "--model", "4b", "--collect", str(runs)))
    found = rows_of(text)
    assert found["GRPO"][0] == "60.0 ± 5.0 (79.3)" and found["GRPO"][5] == "60.0 ± 2.2 (43.9)"  # 5 / sqrt(5)
    assert found["GRPO+PIPO"][2] == "70.0 ± 5.0 (60.0)" and found["DAPO"][0] == "missing (81.3)"
    assert len(found) == 2 + 9 and f"Missing, 7 of 9 runs: {runs}/pipo/qwen3_4b_base/base," in text


def test_over_seeds_the_error_is_that_of_their_mean(runs, capsys):
    text = "\n".join(
        lines(capsys, "pipo", "table1", "--model", "4b", "--collect", str(runs), "--seeds", "6", "21", "42")
    )
    found = rows_of(text)
    assert found["GRPO"][0] == "40.0 ± 11.5 (79.3)"  # 20 / sqrt(3)
    assert found["GRPO+PIPO"][0] == "70.0 ± 5.0, 1 of 3 seeds (80.9)"


def test_pass_at_8_has_the_binomial_error(runs, capsys):
    found = rows_of("\n".join(lines(capsys, "pipo", "table6", "--collect", str(runs))))
    assert found["GRPO"][0] == "90.0 ± 9.5 (88.3)"  # sqrt(0.9 * 0.1 / 10 problems)


def test_a_column_of_two_benchmarks_counts_problems():
    parts = [
        {"pass_at_1": 0.5, "standard_error": 0.1, "problems": 40},
        {"pass_at_1": 1.0, "standard_error": 0.0, "problems": 10},
    ]
    assert collect.joined(parts, "pass@1") == pytest.approx((60.0, 8.0))


def test_hours_and_held_out_of_a_run(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    lines = [{"step": 0, "evaluation/pass@1": 0.3}, {"step": 1, "seconds/step": 1800, "evaluation/pass@1": 0.5}]
    lines += [{"step": 2, "seconds/step": 5400, "evaluation/pass@1": 0.6, "evaluation/pass@1_se": 0.01}]
    (tmp_path / "run/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    lines[-1] |= {"seconds/evaluation": 1800}  # which is no training
    (tmp_path / "run/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert collect.hours(tmp_path / "run") == (1.5, 0.0) and collect.held_out(tmp_path / "run") == (60.0, 1.0)
    assert collect.hours_to(tmp_path / "run", 50) == (0.5, 0.0) and collect.hours_to(tmp_path / "run", 60) == (1.5, 0)
    assert collect.hours_to(tmp_path / "run", 73) == (float("inf"), 0.0)
    shutil.rmtree(tmp_path / "run/export")  # not finished
    assert collect.hours(tmp_path / "run") is None and collect.held_out(tmp_path / "run") is None


def test_accuracy_over_hours_beside_the_papers(finished, tmp_path, capsys):
    for name, step_seconds, accuracy in (("fpa-validation_math500-patience_null", 3600, 0.74), ("grpo", 36000, 0.5)):
        folder = tmp_path / "fpa/qwen3_4b_base/seed_42" / name
        shutil.copytree(finished, folder)
        row = {"step": 1, "seconds/step": step_seconds, "evaluation/pass@1": accuracy}
        (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    out = tmp_path / "figure6.svg"
    text = "\n".join(lines(capsys, "fpa", "figure6", "--collect", str(tmp_path), "--out", str(out)))
    found = rows_of(text)
    assert found["FPA"] == ["74.0 ± 0.0", "1.0 (2)", "1.0"]
    assert found["GRPO"] == ["50.0 ± 0.0", "not reached (21)", "10.0"]
    assert text.endswith(str(out)) and "<svg" in out.read_text()


def test_other_sampling_has_results_of_its_own(runs, capsys):
    greedy = ("evaluation.samples=1", "evaluation.temperature=0.0")
    *rest, after = lines(capsys, "pipo", "table1", "--model", "4b", *greedy, "--runs", str(runs))
    trained, evaluated = ([line for line in rest if f"megatron-rft {each}" in line] for each in ("train", "evaluate"))
    assert not any("evaluation.samples" in line for line in trained) and greedy[0] in after
    name = "export-samples_1-temperature_0.0"
    assert all(f"evaluation/{name}" in line and "evaluation.samples=1" in line for line in evaluated)
    folder = runs / "pipo/qwen3_4b_base/seed_42/grpo/evaluation"
    shutil.copytree(folder / "export", folder / name)
    text = "\n".join(lines(capsys, "pipo", "table1", *greedy, "--model", "4b", "--collect", str(runs)))
    assert rows_of(text)["GRPO"][0] == "60.0 ± 5.0 (79.3)" and "Missing, 8 of 9" in text


def test_a_figure_of_what_is_there(runs, tmp_path, capsys):
    out = tmp_path / "figure.svg"
    (said, missing) = lines(capsys, "pipo", "figure4", "--collect", str(runs), "--out", str(out))
    assert said == str(out) and "<svg" in out.read_text() and missing.startswith("Missing, 14 of 18 runs: ")
    assert lines(capsys, "pipo", "figure3a", "--collect", str(runs), "--out", str(tmp_path / "a.png"))


def test_a_package_that_is_missing_is_named(monkeypatch, capsys):
    def gather(*_):
        raise ModuleNotFoundError(name="matplotlib")

    monkeypatch.setattr(papers, "gather", gather)
    assert papers.main(["pipo", "figure3a", "--collect", "runs"]) == 2
    assert capsys.readouterr().err.startswith("error: this needs matplotlib: ")
