"""The report without a browser: reading runs, grouping them, computing numbers, and what the page must not contain."""

import json
import math
import re

import pytest
import yaml

from megatron_rft.commands import main
from megatron_rft.report import page
from megatron_rft.report.groups import MOST_POINTS, differing, grouped, mean_and_error
from megatron_rft.report.page import CHARTS, phases, shown
from megatron_rft.report.runs import read_all
from megatron_rft.tracking.metrics import NOTES_FILE, add_note
from megatron_rft.utils.errors import UserError
from tests.unit.report.made import recipe, write_run


@pytest.fixture
def four(tmp_path):
    """Two seeds with PIPO and two without."""
    return [
        write_run(tmp_path / f"seed{seed}/{name}", seed, pipo)
        for name, pipo in (("pipo", True), ("grpo", False))
        for seed in (1, 0)
    ]


def html_of(folders) -> str:
    runs, notices = read_all(folders)
    return page.html(grouped(runs), notices)


class TestGroups:
    def test_seeds_are_joined_wherever_they_lie(self, four):
        groups = grouped(read_all(four)[0])
        assert [(group.name, [run.seed for run in group.runs]) for group in groups] == [
            ("GRPO + PIPO", [0, 1]),
            ("GRPO", [0, 1]),
        ]
        assert differing(groups) == [("pipo.learning_rate", [1e-5, None]), ("pipo.window", [8, None])]

    def test_one_seed_twice_is_two_groups(self, tmp_path):
        folders = [write_run(tmp_path / name, seed=3) for name in ("first", "second")]
        groups = grouped(read_all(folders)[0])
        assert [(group.name, len(group.runs)) for group in groups] == [("first", 1), ("second", 1)]

    def test_mean_and_standard_error(self, four):
        (pipo, _) = grouped(read_all(four)[0])
        series = pipo.series("reward/mean")
        assert pipo.steps == list(range(31)) and series.mean[0] is None
        assert series.mean[1:] == pytest.approx([0.41 + 0.01 * step for step in range(1, 31)])
        assert series.error[5] == pytest.approx(0.01)  # of 0.45 and 0.47: std 0.02/sqrt(2), over sqrt(2)
        assert mean_and_error([]) == (None, None) and mean_and_error([2.0]) == (2.0, None)
        assert mean_and_error([1.0, 2.0, 3.0]) == (2.0, pytest.approx(1 / math.sqrt(3)))

    def test_a_single_seed_has_the_error_of_its_evaluation(self, tmp_path):
        (group,) = grouped(read_all([write_run(tmp_path / "one")])[0])
        series = group.series("evaluation/pass@1")
        assert [(m, e) for m, e in zip(series.mean, series.error, strict=True) if m is not None] == [
            (0.3, 0.02), (0.4, 0.02), (0.5, 0.02), (pytest.approx(0.6), 0.02),
        ]  # fmt: skip
        assert group.series("reward/mean").error is None

    def test_long_runs_are_binned(self, tmp_path):
        (group,) = grouped(read_all([write_run(tmp_path / "long", steps=1000)])[0])
        assert group.width == 3 and len(group.steps) <= MOST_POINTS + 1
        assert group.steps[:3] == [0, 2, 5]
        assert group.series("reward/mean").mean[1] == pytest.approx(0.42)  # of steps 1, 2 and 3
        assert group.so_far("seconds/step")[-1] == pytest.approx(2005)

    def test_a_phase_that_few_steps_have_does_not_fill_its_bins(self, tmp_path):
        """An evaluation of 6 s in one of the three steps of a bin is 2 s a step."""
        run = write_run(tmp_path / "long", steps=1000)
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        lines = [line | ({"seconds/evaluation": 6.0} if line["step"] == 2 else {}) for line in lines]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (group,) = grouped(read_all([run])[0])
        assert group.width == 3 and group.series("seconds/evaluation").mean[:3] == [0.0, 2.0, 0.0]
        assert group.series("evaluation/pass@1").mean[1] is None, "only time is 0 where it is absent"

    def test_names_fall_back_to_the_folders(self, tmp_path):
        folders = []
        for seed in (0, 1):
            for rate in (1e-4, 1e-5):
                folder = write_run(tmp_path / f"lr{rate:g}_seed{seed}", seed)
                content = recipe(seed) | {"optimizer": {"lr": rate}}
                (folder / "recipe.yaml").write_text(yaml.safe_dump(content))
                folders.append(folder)
        groups = grouped(read_all(folders)[0])
        assert [group.name for group in groups] == ["lr0.0001", "lr1e-05"]
        assert differing(groups) == [("optimizer.lr", [1e-4, 1e-5])]

    def test_equal_folders_are_named_by_their_paths(self, tmp_path):
        runs, _ = read_all([write_run(tmp_path / name / "run") for name in ("monday", "tuesday")])
        assert [group.name for group in grouped(runs)] == ["monday/run", "tuesday/run"]

    def test_a_run_that_has_a_name_is_called_by_it(self, tmp_path):
        (group,) = grouped(read_all([write_run(tmp_path / "x", name="the first try")])[0])
        assert group.name == "the first try"


class TestCards:
    def test_alarms_stand_at_the_top(self, tmp_path):
        run = write_run(tmp_path / "run")
        add_note(run / NOTES_FILE, "resumed after step 3")
        for number in range(7):
            add_note(run / NOTES_FILE, f"step {number}: the <entropy> has collapsed", alarm=True)
        page = html_of([run])
        first = page.index("step 0: the &lt;entropy&gt; has collapsed")
        assert page.index("<h2>") < first < page.index('class="folders"') and "resumed after" not in page
        assert "and 2 more alarms" in page


class TestCharts:
    def test_follow_the_metrics(self, four, tmp_path):
        groups = grouped(read_all(four)[0])
        assert [chart["title"] for chart in shown(groups)] == [
            "Reward", "Held-out accuracy", "PIPO's improvement", "KL to the reference", "Entropy", "Response length",
            "Gradient norm", "Engine against trainer", "Tokens per second",
        ]  # fmt: skip
        assert phases(groups) == ["seconds/generation", "seconds/training"]
        ids = [chart["id"] for chart in page.data(groups)["charts"]]
        assert len(set(ids)) == len(ids) == 9 and ids[:3] == ["reward", "held_out_accuracy", "pipo_s_improvement"]

    def test_metrics_are_documented(self):
        """Their names are those of docs/metrics.md."""
        text = (page.HERE / "../../docs/metrics.md").read_text()
        named = set(re.findall(r"`([a-z]+/[\w@*]+)`", text))
        families = {name.removesuffix("*") for name in named if name.endswith("*")}
        for chart in CHARTS:
            for metric in chart["lines"]:
                assert metric in named or metric.startswith(tuple(families)), metric


class TestPage:
    def test_whatever_a_run_wrote_stays_text(self, four):
        text = page.html(grouped(read_all(four)[0]), ["<i>a notice</i>"])
        assert text.count("<script") == 2 and text.count("</script>") == 2
        assert "<i>a notice" not in text and "&lt;i&gt;a notice" in text
        found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)[1]
        data = json.loads(found)
        assert "</script>" in data["samples"][0]["steps"][0]["samples"][0]["tokens"][1]
        assert [run["run"] for run in data["samples"]] == [
            "GRPO + PIPO, seed 0", "GRPO + PIPO, seed 1", "GRPO, seed 0", "GRPO, seed 1",
        ]  # fmt: skip

    def test_it_loads_nothing(self, four):
        text = page.html(grouped(read_all(four)[0]), [])
        assert "default-src 'none'" in text
        assert not re.search(r"<(link|img|iframe)|src=|@import|url\(|fetch\(|XMLHttp", text)
        assert set(re.findall(r"https?://[^\"' <]*", text)) == {"http://www.w3.org/2000/svg"}

    def test_samples_are_bounded(self, tmp_path):
        (group,) = grouped(read_all([write_run(tmp_path / "long", steps=600)])[0])
        (found,) = page.samples([group])
        steps = [line["step"] for line in found["steps"]]
        assert len(steps) == page.MOST_LINES and steps[0] == 10 and steps[-1] == 600


class TestCommand:
    def test_writes_the_page(self, four, tmp_path, capsys):
        out = tmp_path / "out"
        assert main.main(["report", *map(str, four), "--out", str(out)]) == 0
        assert str(out / "report.html") in capsys.readouterr().out
        assert [file.name for file in out.iterdir()] == ["report.html"]

    def test_of_one_run_it_lies_in_its_folder(self, tmp_path):
        run = write_run(tmp_path / "run")
        (run / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 2.0}\n')
        assert main.main(["report", str(run)]) == 0 and (run / "report/report.html").is_file()

    def test_a_torn_line_and_a_run_without_recipe(self, tmp_path):
        run = write_run(tmp_path / "run")
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 31, "reward/me')
        with (run / "samples.jsonl").open("ab") as file:
            file.write(b'{"step": 40, "samples": [{"prompt": "\xff')
        (run / "recipe.yaml").unlink()
        (run / "evaluation/test_step_000030/results.json").write_text("[")
        (read_again,) = read_all([run])[0]
        assert read_again.steps == 30 and len(read_again.samples) == 3
        assert "2+2" in html_of([run])

    def test_runs_of_different_kinds(self, tmp_path):
        rl, sft = write_run(tmp_path / "rl"), write_run(tmp_path / "sft")
        (sft / "recipe.yaml").write_text(yaml.safe_dump(recipe() | {"trainer": "sft", "algorithm": {"name": "sft"}}))
        (sft / "metrics.jsonl").write_text('{"step": 1, "policy/loss": 2.0}\n')
        assert "Runs of different kinds (rl, sft)" in html_of([rl, sft])

    @pytest.mark.parametrize(
        ("make", "problem"),
        [
            (lambda folder: None, "there is no folder"),
            (lambda folder: folder.mkdir(), "it has no metrics.jsonl"),
            (lambda folder: folder.touch(), "is not the folder of a run: it has no metrics.jsonl"),
            (lambda folder: write_run(folder / "inside"), "There are runs in it: "),
            (lambda folder: (folder.mkdir(), (folder / "index.json").write_text("{}")), "a store of trajectories"),
            (lambda folder: (folder.mkdir(), (folder / "metrics.jsonl").touch()), "no finished step yet"),
            (lambda folder: (write_run(folder) / "recipe.yaml").write_text("a: [1"), "recipe.yaml is not valid YAML"),
        ],
    )
    def test_what_is_no_run(self, make, problem, tmp_path, capsys):
        make(tmp_path / "run")
        assert main.main(["report", str(tmp_path / "run")]) == 2
        assert problem in capsys.readouterr().err

    def test_an_empty_run_among_others_is_a_notice(self, tmp_path):
        run, empty = write_run(tmp_path / "run"), tmp_path / "empty"
        empty.mkdir()
        (empty / "metrics.jsonl").touch()
        assert "no finished step yet" in html_of([run, empty])

    def test_a_run_given_twice_and_a_place_that_cannot_be_written(self, tmp_path):
        run = write_run(tmp_path / "run")
        with pytest.raises(UserError, match="given twice"):
            read_all([run, run / "../run"])
        (tmp_path / "file").touch()
        with pytest.raises(UserError, match="--out: .* cannot be written"):
            page.write([run], tmp_path / "file")
