"""tools/first_hour.py: what a part brings arrives, a failure does not stop the rest, only a GPU's figures count.

The slow test runs the checks of a part on the CPU at their smallest size.
"""

import json
import random
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import first_hour  # noqa: E402


@pytest.fixture
def hour(tmp_path, monkeypatch):
    monkeypatch.setattr(first_hour, "ROOT", tmp_path)
    monkeypatch.setattr(first_hour, "PACKED", tmp_path / "packed")
    monkeypatch.setattr(first_hour, "STATE", tmp_path / "state")
    return first_hour


def test_pieces_of_a_wheel_are_installed_once_all_are_there(hour, tmp_path, monkeypatch):
    data = random.Random(0).randbytes(1500)
    (tmp_path / "packed" / "downloads").mkdir(parents=True)
    with zipfile.ZipFile(tmp_path / "packed" / "downloads" / "made==1.whl", "w") as wheel:
        wheel.writestr("made/data", data)
        wheel.writestr("made-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: made\nVersion: 1\n")
        wheel.writestr("made-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(
            "made-1.dist-info/RECORD", "made/data,,\nmade-1.dist-info/METADATA,,\nmade-1.dist-info/WHEEL,,\n"
        )
    (tmp_path / "packed" / "downloads" / "made==1.name").write_text("made-1-py3-none-any.whl")
    for name, value in {"WHEELS": {}, "LARGE": {"made==1": range(2, 5)}, "FIRST_PIECE": {2: 500}}.items():
        monkeypatch.setattr(hour, name, value)
    monkeypatch.setattr(hour, "PIECE", 1000)
    with pytest.raises(SystemExit, match="too large for parts 2 to 3"):
        monkeypatch.setattr(hour, "LARGE", {"made==1": range(2, 4)})
        hour.pack(3)
    monkeypatch.setattr(hour, "LARGE", {"made==1": range(2, 5)})
    for part in (2, 3, 4):
        hour.pack(part)
        assert not (tmp_path / "state" / "site").exists()
        hour.unpack(part, {})
    assert (tmp_path / "state" / "site" / "made" / "data").read_bytes() == data
    monkeypatch.setattr(hour, "LARGEST", 900)
    with pytest.raises(SystemExit, match="part 3 brings 0.0 MB, more than 0"):
        hour.pack(3)


def test_a_part_that_fails_does_not_stop_the_next(hour, tmp_path, monkeypatch, capsys):
    table = "print('| a | b |'); print('| --- | --- |'); print('| 1 | 2 |')"
    checks = {"fails": ["-c", f"{table}; raise SystemExit(3)"], "passes": ["-c", table], "hangs": ["-c", "input()"]}
    slow = "import time; print('| before |', flush=True); time.sleep(60)"
    monkeypatch.setattr(hour, "CHECKS", {3: checks | {"hangs": ["-c", slow], "late": ["-c", table]}})
    results = tmp_path / "runs" / "first_hour.jsonl"
    assert not hour.run(3, results, 5)
    records = [json.loads(line) for line in results.read_text().splitlines()]
    assert [record["status"] for record in records] == [
        "FAILED: exit status 3",
        "passed",
        "FAILED: no time was left",
        "not run: no time was left",
    ]
    assert records[1]["table"] == ["| a | b |", "| --- | --- |", "| 1 | 2 |"] and records[2]["table"] == ["| before |"]
    assert "part 3 runs with what is installed" in capsys.readouterr().out


def test_the_report_has_the_newest_result_of_a_gpu(hour, tmp_path):
    page, results = tmp_path / "page.md", tmp_path / "results.jsonl"
    page.write_text(f"above\n{hour.BEGIN}\nold\n{hour.END}\nbelow\n")
    record = {"part": 1, "check": "parity", "status": "passed", "seconds": 1, "date": "2026-01-02", "table": ["| x |"]}
    record |= {"versions": "torch 2.11.0"}
    results.write_text(json.dumps(record | {"device": ""}) + "\n")
    with pytest.raises(SystemExit, match="no line that was measured on a GPU"):
        hour.report(results, page)
    assert "old" in page.read_text()
    with results.open("a") as file:
        for line in ({"status": "FAILED: exit status 1", "table": []}, {}, {"device": ""}):
            file.write(json.dumps(record | {"device": "a GPU"} | line) + "\n")
    hour.report(results, page)
    text = page.read_text()
    assert text.startswith("above\n") and text.endswith("below\n") and "old" not in text and "FAILED" not in text
    assert text.count("| x |") == 1 and "2026-01-02, a GPU, torch 2.11.0: passed." in text
    assert hour.BEGIN in (ROOT / "docs" / "gpu_results.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("part", [2])
def test_a_part_runs_on_a_cpu(part, tmp_path, monkeypatch):
    monkeypatch.setenv("FIRST_HOUR_STATE", str(tmp_path / "state"))
    (tmp_path / "state").mkdir()
    command = [sys.executable, "tools/first_hour.py", str(part), "--results", str(tmp_path / "results")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    records = [json.loads(line) for line in (tmp_path / "results").read_text().splitlines()]
    assert [record["check"] for record in records] == list(first_hour.CHECKS[part])
    assert all(record["table"] for record in records if "quickstart" not in record["check"])
