"""tools/gpu_kit.py: no check stops the next, what was found is on the disk at once, only a GPU's figures count."""

import json
import sys
import time
import zipfile
from pathlib import Path

import pytest

from megatron_rft.config import load
from megatron_rft.plan.devices import DEVICES, Efficiency

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import gpu_kit  # noqa: E402
from gpu_kit import Check  # noqa: E402

ROW = "print('| | a | 1 ms | floor 2 ms |', flush=True)"


def lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def called(tmp_path, limit: float, *checks: Check) -> list[dict]:
    gpu_kit.call(checks, tmp_path / "results", limit, tmp_path / "none")
    return lines(tmp_path / "results")


def test_checks_that_fail_die_and_hang_do_not_stop_the_next(tmp_path, capsys):
    left = tmp_path / "left"
    code = f"import time; time.sleep(3); open({str(left)!r}, 'w')"
    child = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {code!r}])"
    found = called(
        tmp_path,
        60,
        Check("fails", 9, ("-c", f"{ROW}; raise SystemExit(3)")),
        Check("dies", 9, ("-c", f"import os; {ROW}; os.kill(os.getpid(), 9)")),
        Check("hangs", 1.5, ("-c", f"{child}; {ROW}; import time; time.sleep(60)")),
        Check("passes", 9, ("-c", ROW)),
    )
    assert [each["status"] for each in found] == [
        "FAILED: exit status 3",
        "FAILED: exit status -9",
        "FAILED: killed after 2 s",
        "passed",
    ]
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
    assert sum(check.budget for check in gpu_kit.CHECKS) <= gpu_kit.LIMIT - gpu_kit.RESERVE


def test_a_full_disk_leaves_the_lines_in_the_output(tmp_path, capsys):
    assert gpu_kit.call((Check("passes", 9, ("-c", ROW)),), Path("/dev/full"), 60, tmp_path / "none")
    out = capsys.readouterr().out
    assert '"check": "passes", "status": "passed"' in out and "could not be written" in out


def test_the_report_has_the_newest_result_of_a_gpu_beside_its_prediction(tmp_path):
    page, results = tmp_path / "page.md", tmp_path / "results"
    page.write_text(f"above\n{gpu_kit.BEGIN}\nold\n{gpu_kit.END}\nbelow\n")
    record = {"check": "ceilings", "status": "passed", "seconds": 1, "date": "2026-01-02", "versions": "torch 2.11.0"}
    record |= {"rows": [["matrix product", "700 TFLOP/s", "bf16"]]}
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
    assert "| matrix product | 700 TFLOP/s | 643 TFLOP/s | bf16 |" in text and "torch 2.11.0: passed." in text
    assert gpu_kit.BEGIN in (ROOT / "docs" / "gpu_results.md").read_text()


def test_predictions_are_those_of_the_plan():
    """Of what the plan has constants for: rates of products and of memory, and the log-probs' floors by them."""
    tables, share = json.loads(gpu_kit.PREDICTED.read_text()), Efficiency()
    assert tables.keys() == {"H100", "H200"}
    for name, table in tables.items():
        chip = DEVICES[name.lower()]
        rate, product = chip.flops * share.compute, 2 * 8192 * 151936 * 4096
        assert table["ceilings"] == {
            "matrix product": f"{rate / 1e12:.0f} TFLOP/s",
            "copy on the device": f"{chip.bandwidth * share.memory / 1e9:.0f} GB/s",
        }
        for what, predicted in table["log-probs: time and memory"].items():
            products = 4 if what.endswith("backward") else 1
            memory = f"{(8192 + 151936) * 4096 * 2 / 2**20:.0f} MiB"
            assert predicted == (memory if "memory" in what else f"{products * product / rate * 1e3:.1f} ms")


def test_wheels_are_installed_for_the_checks(tmp_path):
    (tmp_path / "packed").mkdir()
    with zipfile.ZipFile(tmp_path / "packed" / "made-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("made.py", "value = 7\n")
        wheel.writestr("made-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: made\nVersion: 1\n")
        wheel.writestr("made-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("made-1.dist-info/RECORD", "made.py,,\n")
    check = Check("uses it", 20, ("-c", "import made; print('| | value |', made.value, '| |')"))
    assert gpu_kit.call((check,), tmp_path / "results", 90, tmp_path / "packed")
    assert lines(tmp_path / "results")[0]["rows"] == [["value", "7", ""]]


def test_recipes_take_the_options_of_the_checks_and_parts_exist():
    trained = [check for check in gpu_kit.CHECKS if "train" in check.arguments]
    assert len(trained) == 3
    for check in trained:
        recipe, *options = check.arguments[3:]
        load(ROOT / recipe, [option.format(state="runs") for option in options if option != "{few}"])
    names = (ROOT / "tools" / "gpu_checks.py").read_text() + (ROOT / "tools" / "gpu_checks_rollout.py").read_text()
    for check in gpu_kit.CHECKS:
        if "--only" in check.arguments:
            parts = check.arguments[check.arguments.index("--only") + 1 :]
            assert all(part in names for part in parts), check
