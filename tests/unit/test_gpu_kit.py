"""tools/gpu_kit.py: no check stops the next, what was found is on the disk at once, only a GPU's figures count."""

import json
import struct
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from megatron_rft.config import load
from megatron_rft.plan.devices import DEVICES

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import gpu_kit  # noqa: E402
import gpu_predictions  # noqa: E402
from gpu_kit import Check  # noqa: E402

ROW = "print('| a | 1 ms | floor 2 ms |', flush=True)"


def called(tmp_path, limit: float, *checks: Check) -> list[dict]:
    gpu_kit.call(checks, tmp_path / "results", limit, [])
    return [json.loads(line) for line in (tmp_path / "results").read_text().splitlines()]


def test_checks_that_fail_die_and_hang_do_not_stop_the_next(tmp_path, capsys):
    left = tmp_path / "left"
    code = f"import time; time.sleep(3); open({str(left)!r}, 'w')"
    child = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {code!r}])"
    found = called(
        tmp_path,
        45,
        Check("fails", 9, ("-c", f"{ROW}; raise SystemExit(3)")),
        Check("dies", 9, ("-c", f"import os; {ROW}; os.kill(os.getpid(), 9)")),
        Check("hangs", 1.5, ("-c", f"{child}; {ROW}; import time; time.sleep(60)")),
        Check("lacks", 9, ("-c", f"{ROW}; print('no vllm'); raise SystemExit({gpu_kit.MISSING})")),
        Check("passes", 9, ("-c", ROW)),
    )
    failed = ["FAILED: exit status 3", "FAILED: exit status -9", "FAILED: killed after 2 s"]
    assert [each["status"] for each in found] == [*failed, "not run: no vllm", "passed"]
    assert all(each["rows"] == [["a", "1 ms", "floor 2 ms"]] for each in found)
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert printed == found
    time.sleep(3)
    assert not left.exists()  # the process that the third one had started is gone, too


def test_a_shorter_limit_cuts_the_end_and_a_longer_one_stretches_budgets(tmp_path):
    begin = time.monotonic()
    found = called(tmp_path, 36, *(Check(name, 99, ("-c", "import time; time.sleep(99)")) for name in "ab"))
    assert found[0]["status"].startswith("FAILED: killed after")
    assert found[1]["status"] == "not run: no time was left"
    assert time.monotonic() - begin < 26  # the rest is left of the limit
    slow = ("-c", "import time; time.sleep(2.5)")
    assert called(tmp_path, 10 * gpu_kit.LIMIT, Check("stretched", 1, slow))[-1]["status"] == "passed"
    for number in (1, 2):
        assert sum(check.budget for check in gpu_kit.CALLS[number]) <= gpu_kit.LIMIT - gpu_kit.RESERVE


def test_a_full_disk_leaves_the_lines_in_the_output(capsys):
    assert gpu_kit.call((Check("passes", 9, ("-c", ROW)),), Path("/dev/full"), 60, [])
    out = capsys.readouterr().out
    assert '"check": "passes", "status": "passed"' in out and "could not be written" in out


def test_the_report_has_the_newest_result_of_a_gpu_beside_its_prediction(tmp_path):
    page, results = tmp_path / "page.md", tmp_path / "results"
    page.write_text(f"above\n{gpu_kit.BEGIN}\nold\n{gpu_kit.END}\nbelow\n")
    record = {"check": "ceilings", "status": "passed", "seconds": 1, "date": "2026-01-02", "versions": "torch 2.11.0"}
    record |= {"rows": [["matrix product", "700 TFLOP/s", "bf16"]], "command": "call 1"}
    results.write_text(json.dumps(record | {"device": ""}) + "\n")
    with pytest.raises(SystemExit, match="no line that was measured on a GPU"):
        gpu_kit.report(results, page)
    assert "old" in page.read_text()
    with results.open("a") as file:
        for change in ({"status": "FAILED: exit status 1", "rows": []}, {}, {"device": ""}):
            file.write(json.dumps(record | {"device": "NVIDIA H100 80GB HBM3"} | change) + "\n")
    gpu_kit.report(results, page)
    text = page.read_text()
    assert text.startswith("above\n") and text.endswith("below\n") and "old" not in text and "FAILED" not in text
    assert "| what | measured | plan and floors | beside |" in text and "torch 2.11.0: passed" in text
    assert "| matrix product | 700 TFLOP/s | 643 TFLOP/s | bf16 |" in text and "torch 2.11.0: passed" in text
    assert gpu_kit.BEGIN in gpu_kit.PAGE.read_text()


@pytest.mark.parametrize("name", ["H100", "H200"])
def test_predictions_are_those_of_the_plan(name):
    table = json.loads(gpu_kit.PREDICTED.read_text())
    assert table[name] == gpu_predictions.planned(DEVICES[name.lower()])
    figures = table[name]["slice of Qwen3-8B"].keys() - {"layers", "optimizer's step"}
    for rehearsed in table.get(f"{name} rehearsed", {}).values():
        assert rehearsed.keys() == {what for what in figures if what.endswith("peak memory")}
    assert len(figures) == 3 * len(gpu_predictions.CASES)


def test_a_deeper_slice_would_not_fit():
    chip = DEVICES["h100"]
    layers = gpu_predictions.depth(chip.usable)
    for more, fits in ((0, True), (1, False)):
        plans = [gpu_predictions.memory(case, gpu_predictions.shape(layers + more)) for case in gpu_predictions.CASES]
        assert (max(plan.phases["training"] for plan in plans) <= chip.usable - gpu_predictions.SLACK) == fits


def fat_binary(*codes: tuple[int, int, bytes]) -> bytes:
    entries = b"".join(struct.pack("<HHIQ12xI32x", kind, 0, 64, len(c), chip) + c for kind, chip, c in codes)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries


def test_a_cut_wheel_keeps_the_code_of_one_chip_and_all_else(tmp_path):
    codes = [(1, 90, b"ptx" * 9), (2, 80, b"other" * 9), (2, 90, b"wanted" * 9), (2, 100, b"later" * 9)]
    library = b"code" + fat_binary(*codes) + b"between" + fat_binary((2, 75, b"old" * 5), (2, 90, b"also" * 5)) + b"end"
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as wheel:
        wheel.writestr("a/lib.so", library)
        wheel.writestr("a/text.py", fat_binary(*codes))
    gpu_kit.cut(tmp_path / "a.whl")
    with zipfile.ZipFile(tmp_path / "a.whl") as wheel:
        for gone in (b"ptx" * 9, b"other" * 9, b"later" * 9, b"old" * 5):
            library = library.replace(gone, bytes(len(gone)))
        library = library.replace(
            struct.pack("<HHIQ12xI", 1, 0, 64, 27, 90), struct.pack("<HHIQ12xI", 1, 0, 64, 27, 120)
        )
        assert wheel.read("a/lib.so") == library and b"wanted" * 9 in library
        assert wheel.read("a/text.py") == fat_binary(*codes)


def made_wheel(folder: Path, name: str, *requirements: str) -> Path:
    made = folder / f"{name}-1-py3-none-any.whl"
    lines = "".join(f"Requires-Dist: {each}\n" for each in requirements)
    with zipfile.ZipFile(made, "w") as wheel:
        wheel.writestr("made.py", "value = 7\n")
        wheel.writestr("made-1.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n{lines}")
        wheel.writestr("made-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("made-1.dist-info/RECORD", "made.py,,\n")
    return made


def test_what_packed_wheels_need_is_packed_too_or_comes_with_torch(tmp_path):
    made_wheel(tmp_path, "made_first", "numpy", "Made.Second>=1", "torch; extra == 'gpu'", "absent; extra == 'all'")
    assert gpu_kit.needed(tmp_path) == {"made-second"}
    made_wheel(tmp_path, "made_second", "typing-extensions", 'old; python_version < "3.12"')
    assert gpu_kit.needed(tmp_path) == set()


def test_wheels_are_installed_for_the_checks(tmp_path):
    made = made_wheel(tmp_path, "made")
    check = Check("uses it", 20, ("-c", "import made; print('| value |', made.value, '| |')"))
    assert gpu_kit.call((check,), tmp_path / "results", 90, [made])
    assert json.loads((tmp_path / "results").read_text())["rows"] == [["value", "7", ""]]


def test_the_packed_folder_runs_alone(tmp_path):
    """With this environment's packages in place of the wheels; a check of torch's layers and one that lacks its GPU."""
    assert gpu_kit.pack(1, tmp_path / "packed", wheels=False) < 10 << 20
    command = [sys.executable, "-P", str(tmp_path / "packed/tools/gpu_kit.py"), "call", "1", "2", "--limit", "600"]
    command += ["--results", str(tmp_path / "found"), "--only", "slice of", "mixture layer"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads(line) for line in (tmp_path / "found").read_text().splitlines()]
    slice_of_8b = {what: value for what, value, _ in found[0]["rows"]}
    assert sum(what.endswith("tokens/s") for what in slice_of_8b) == 8 and "optimizer's step" in slice_of_8b
    assert [each["status"].split(": ")[0] for each in found] == ["passed", "not run"]


def test_recipes_take_the_options_of_the_checks_and_checks_exist():
    every = [check for checks in gpu_kit.CALLS.values() for check in checks]
    trained = [check for check in every if "train" in check.arguments]
    assert len(trained) == 11
    for check in trained:
        recipe, *options = check.arguments[3:]
        load(ROOT / recipe, [option.format(state="runs") for option in options])
    parts = (ROOT / "tools" / "gpu_checks.py").read_text()
    for check in (check for check in every if "tools/gpu_checks.py" in check.arguments):
        assert f'"{check.name}": ' in parts


def test_a_check_has_the_time_that_earlier_ones_left(tmp_path):
    found = called(tmp_path, 40, Check("early", 4, ("-c", "")), Check("late", 3, ("-c", "import time; time.sleep(5)")))
    assert [each["status"] for each in found] == ["passed", "passed"]


def test_checks_import_ahead_and_begin_in_turn(tmp_path):
    """The second process is there while the first works, and reads its line only after it."""
    code = "import sys, time; from pathlib import Path; Path('{state}/%s').touch(); sys.stdin.readline(); %s"
    work = ("time.sleep(2); assert Path('{state}/b').exists()", "assert Path('{state}/done').exists()")
    both = (
        Check("a", 9, ("-c", f"{code % ('a', work[0])}; Path('{{state}}/done').touch()"), waits=True),
        Check("b", 9, ("-c", code % ("b", work[1])), waits=True),
    )
    assert [each["status"] for each in called(tmp_path, 60, *both)] == ["passed", "passed"]
