"""Runs under different constraints in one figure, and the page of what a refiner changed."""

import json

import pytest
import yaml

from megatron_rft.commands.main import main
from megatron_rft.report.constraints import lines_of
from megatron_rft.report.refinements import render


def run(folder, constraint, reward=0.5):
    folder.mkdir()
    (folder / "recipe.yaml").write_text(yaml.safe_dump({"trainer": "rl", "constraint": constraint}))
    lines = [{"step": step, "reward/mean": reward} for step in range(1, 31)]
    for line in lines[::2]:
        line["constraint/kl"] = line["step"] / 100
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture
def folders(tmp_path):
    dynamic = {"kind": "dynamic", "eta": 0.1}
    return [
        run(tmp_path / "a", {"kind": "none"}, 0.2),
        run(tmp_path / "b", {"kind": "none"}, 0.6),
        run(tmp_path / "c", dynamic),
        run(tmp_path / "d", dynamic | {"eta": 0.01}),
        run(tmp_path / "e", dynamic | {"filter": False}),
        run(tmp_path / "f", None),
    ]


def test_runs_of_one_constraint_are_one_line(folders):
    lines = lines_of(folders)
    names = ["none", "dynamic, eta 0.1", "dynamic, eta 0.01", "dynamic, eta 0.1, no filter", "the algorithm's own"]
    assert [line.name for line in lines] == names
    steps, means, lowest, highest = lines[0].of("reward/mean")
    assert steps == list(range(1, 31)) and means[3] == pytest.approx(0.4)
    assert (lowest[3], highest[3]) == pytest.approx((0.2, 0.6))
    assert lines[0].of("constraint/kl")[0] == list(range(1, 31, 2)) and lines[0].of("nothing")[0] == []
    assert [line.name for line in lines_of(folders[:3])] == ["none", "dynamic"]


def test_the_command(folders, tmp_path, capsys):
    assert main(["constraints", *map(str, folders), "--out", str(tmp_path / "figure.svg")]) == 0
    text = (tmp_path / "figure.svg").read_text()
    assert "<svg" in text and "figure.svg" in capsys.readouterr().out
    assert main(["constraints", str(tmp_path / "nowhere")]) == 2


EXAMPLE = {
    "problem": 4,
    "prompt": "Is <b> & 'c' fine?",
    "response": "no",
    "refined": "<script>",
    "reward": -0.3,
    "refined_reward": 1.0,
    "response_tokens": ["n", "o"],
    "response_cross_entropy": [0.0, 2.5],
    "refined_tokens": ["<scr", "ipt>"],
    "refined_cross_entropy": [0.1, 9.0],
}


def test_a_page_of_tokens_by_how_unlikely_they_were():
    page = render("my <run>", [{"step": 3, "examples": [EXAMPLE]}])
    assert "Step 3, problem 4" in page and "my &lt;run&gt;" in page
    assert "Is &lt;b&gt; &amp; &#x27;c&#x27; fine?" in page and "&lt;scr" in page and "<script" not in page
    assert 'rgba(213,94,0,0.50)" title="2.50 nats">o<' in page and 'rgba(213,94,0,1.00)" title="9.00 nats"' in page
    assert "reward -0.3" in page and "http" not in page and "src=" not in page


def test_the_page_of_a_run(tmp_path, capsys):
    assert main(["heatmap", str(tmp_path)]) == 2 and "refinements.jsonl" in capsys.readouterr().err
    torn = json.dumps({"step": 1, "examples": [EXAMPLE]}) + "\n" + '{"step": 2, "exam'
    (tmp_path / "refinements.jsonl").write_text(torn)
    assert main(["heatmap", str(tmp_path)]) == 0
    assert "Step 1" in (tmp_path / "refinements.html").read_text()
