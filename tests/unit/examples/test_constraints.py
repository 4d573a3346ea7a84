"""The figure that compares runs under different constraints."""

import json

import pytest
import yaml

from examples.dynamic.constraints import lines_of
from examples.figures import main


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
    main(["constraints", *map(str, folders), "--out", str(tmp_path / "figure.svg")])
    text = (tmp_path / "figure.svg").read_text()
    assert "<svg" in text and "figure.svg" in capsys.readouterr().out


@pytest.mark.parametrize(
    "run, out, words",
    [("nowhere", "x.png", "there is no folder"), ("a", "x.docx", "docx"), ("a", "no/x.png", "No such file")],
)
def test_what_cannot_be_drawn(folders, tmp_path, capsys, run, out, words):
    with pytest.raises(SystemExit) as caught:
        main(["constraints", str(tmp_path / run), "--out", str(tmp_path / out)])
    assert caught.value.code == 2 and words in capsys.readouterr().err
