"""tools/gpu_kit.py: no check stops the next, what was found is on the disk at once, only a GPU's figures count."""

import inspect
import io
import json
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_rft.config import load
from megatron_rft.plan.devices import DEVICES
from megatron_rft.utils.files import read_json_lines
from megatron_rft.utils.processes import started
from tests.integration.tiny import wait_until
from tools import gpu_kit, gpu_predictions

ROW = """end = float(input()); print('["a", "1 ms", "floor 2 ms"]', flush=True)"""


def called(tmp_path: Path, limit: float, packages: str = "none", **checks: tuple[float, str]) -> dict[str, dict]:
    """Call with checks of (budget, Python code). Returns the results by name."""
    gpu_kit.call(checks, tmp_path / "results", limit, tmp_path / packages, "-c")
    return {record["check"]: record for record in read_json_lines(tmp_path / "results")}


def statuses(results: dict[str, dict]) -> list[str]:
    return [record["status"] for record in results.values()]


def test_checks_that_fail_die_and_hang_do_not_stop_the_next(tmp_path, capsys):
    left = tmp_path / "left"
    child = f"import faulthandler, subprocess, time; {ROW}; pid = subprocess.Popen(['sleep', '600']).pid; "
    where = "faulthandler.dump_traceback_later(max(0.1, end - time.monotonic() - 1)); time.sleep(600)"
    found = called(
        tmp_path,
        330,
        fails=(99, f"{ROW}; raise SystemExit(3)"),
        dies=(99, f"import os; {ROW}; print('[1, '); os.kill(os.getpid(), 9)"),
        hangs=(9, f"{child}open({str(left)!r}, 'w').write(str(pid)); {where}"),
        lacks=(300, f"{ROW}; print('no vllm'); raise SystemExit({gpu_kit.MISSING})"),
        passes=(0.1, ROW),
    )
    assert statuses(found)[:2] == ["FAILED: exit status 3", "FAILED: exit status -9"]
    assert found["hangs"]["status"].startswith("FAILED: killed after ")
    assert statuses(found)[3:] == ["not run: no vllm", "passed"]  # with time that others left
    assert all(each["rows"] == [["a", "1 ms", "floor 2 ms"]] for each in found.values())
    out = capsys.readouterr().out
    assert [json.loads(line) for line in out.splitlines() if line.startswith("{")] == [*found.values()]
    assert "most recent call first" in out  # of the one that hangs
    assert wait_until(lambda: not started(int(left.read_text())), seconds=60)  # the third one's process has ended, too


def test_a_shorter_limit_cuts_the_end(tmp_path):
    begin, sleeps = time.monotonic(), (600, "import time; time.sleep(600)")
    first, second = statuses(called(tmp_path, 36, a=sleeps, b=sleeps))
    assert first.startswith("FAILED: killed after") and second == "not run: no time was left"
    assert time.monotonic() - begin < 90  # and not 600
    for number in (1, 2):
        assert sum(seconds for seconds, *_ in gpu_kit.CALLS[number].values()) <= gpu_kit.LIMIT - gpu_kit.RESERVE


def test_a_full_disk_leaves_the_lines_in_the_output(tmp_path, capsys):
    assert gpu_kit.call({"passes": (9, ROW)}, Path("/dev/full"), 60, tmp_path / "none", "-c")
    out = capsys.readouterr().out
    assert '"check": "passes", "status": "passed"' in out and "could not be written" in out


def test_checks_import_ahead_and_begin_in_turn(tmp_path):
    """The second process is there while the first works, and reads its line only after it."""
    code = "import sys, time; from pathlib import Path; at = Path(sys.argv[2]); (at / sys.argv[1]).touch(); input(); "
    wait = "[time.sleep(0.1) for _ in range(200) if not (at / 'b').exists()]; assert (at / 'b').exists(); "
    first, second = f"{code}{wait}(at / 'done').touch()", f"{code}assert (at / 'done').exists()"
    assert statuses(called(tmp_path, 90, a=(30, first), b=(9, second))) == ["passed"] * 2


def test_steps_of_a_run_are_rows_also_without_a_number(tmp_path):
    (tmp_path / "run").mkdir()
    step = {"step": 1, "seconds/step": 1.5, "mismatch/kl": None, "reward/mean": 0.5, "other": 1}
    (tmp_path / "run" / "metrics.jsonl").write_text(json.dumps(step) + "\n")
    assert [*gpu_kit.rows(tmp_path / "run.log")] == [["step 1", "reward/mean 0.5, mismatch/kl nan", "1.50 s"]]


def test_the_page_is_what_the_report_makes_of_the_results(tmp_path):
    page = shutil.copy(gpu_kit.PAGE, tmp_path / "page.md")
    gpu_kit.report(gpu_kit.MEASURED, Path(page))
    assert Path(page).read_text() == gpu_kit.PAGE.read_text()


def test_the_report_has_the_newest_result_of_a_gpu_beside_its_prediction(tmp_path):
    page, results = tmp_path / "page.md", tmp_path / "results"
    page.write_text(f"above\n{gpu_kit.BEGIN}\nold\n{gpu_kit.END}\nbelow\n")
    record = {"check": "ceilings", "status": "passed", "seconds": 1, "date": "2026-01-02", "versions": "torch 2.11.0"}
    record |= {"rows": [["matrix product", "1 TFLOP/s", "fp32"]], "command": "call 1", "device": ""}
    gpu_kit.write(results, record)
    with pytest.raises(SystemExit, match="no line that was measured on a GPU"):
        gpu_kit.report(results, page)
    assert "old" in page.read_text()
    record |= {"rows": [["matrix product", "700 TFLOP/s", "bf16"]], "device": "NVIDIA H100 80GB HBM3"}
    gpu_kit.write(results, record | {"status": "FAILED: exit status 1", "rows": []})
    gpu_kit.write(results, record)
    gpu_kit.report(results, page)
    text = page.read_text()
    assert text.startswith("above\n") and text.endswith("below\n") and "old" not in text and "FAILED" not in text
    assert "| what | measured | plan and floors | on a CPU | beside |" in text and "torch 2.11.0: passed" in text
    assert "| matrix product | 700 TFLOP/s | 643 TFLOP/s | 1 TFLOP/s, fp32 | bf16 |" in text


@pytest.mark.parametrize("name", ["H100", "H200"])
def test_predictions_are_those_of_the_plan(name):
    table, chip = json.loads(gpu_kit.PREDICTED.read_text())[name], DEVICES[name.lower()]
    assert table["plan and floors"] == gpu_predictions.planned(chip)
    figures = table["plan and floors"]["slice of Qwen3-8B"].keys() - {"layers", "optimizer's step"}
    assert len(figures) == 3 * len(gpu_predictions.cases())
    peaks = {what for what in figures if what.endswith("peak memory")}
    assert table["rehearse"]["slice of Qwen3-8B"].keys() == peaks
    assert gpu_predictions.needed(gpu_predictions.depth(chip.usable) + 1) > chip.usable - gpu_predictions.SLACK


def fat_binary(*codes: tuple[int, int, bytes]) -> bytes:
    entries = b"".join(struct.pack("<HHIQ12xI32x", kind, 0, 64, len(c), chip) + c for kind, chip, c in codes)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries


def test_what_is_packed_is_there_in_a_call_with_the_code_of_one_chip(tmp_path):
    codes = [(1, 90, b"ptx" * 9), (2, 80, b"other" * 9), (2, 90, b"wanted" * 9), (2, 100, b"later" * 9)]
    kept = [(1, 120, bytes(27)), (2, 80, bytes(45)), codes[2], (2, 100, bytes(45))]
    (tmp_path / "site/vllm/benchmarks").mkdir(parents=True)
    (tmp_path / "site/vllm/benchmarks/left_out.py").touch()
    (tmp_path / "site/made.py").write_text(f"text = {codes[1][2]}")
    (tmp_path / "site/lib.so").write_bytes(b"code" + fat_binary(*codes) + b"between" + fat_binary(*codes[1:3]) + b"end")
    gpu_kit.archive(tmp_path / "site", tmp_path / "packed.tar.xz")
    expected = b"code" + fat_binary(*kept) + b"between" + fat_binary(*kept[1:3]) + b"end"
    code = "import made; from pathlib import Path; at = Path(made.__file__).parent; assert not (at / 'vllm').exists(); "
    code += f"assert made.text == {codes[1][2]}; assert (at / 'lib.so').read_bytes() == {expected!r}"
    assert statuses(called(tmp_path, 90, "packed.tar.xz", uses_it=(20, code))) == ["passed"]


def test_the_packed_folder_runs_alone(tmp_path):
    """With this environment's packages: a check of torch's layers passes, and one lacks its GPU."""
    assert gpu_kit.pack(1, tmp_path / "packed", packages=False) < 10 << 20
    kit = str(tmp_path / "packed/tools/gpu_kit.py")
    subprocess.run([sys.executable, "-SP", kit, "--help"], check=True, stdout=subprocess.DEVNULL)  # needs no package
    command = [sys.executable, "-P", kit, "call", "1", "2", "--limit", "600", "--results", str(tmp_path / "found")]
    command += ["--only", "slice of", "mixture layer"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = read_json_lines(tmp_path / "found")
    slice_of_8b = {what: value for what, value, _ in found[0]["rows"]}
    assert sum(what.endswith("tokens/s") for what in slice_of_8b) == 8 and "optimizer's step" in slice_of_8b
    assert [each["status"].split(": ")[0] for each in found] == ["passed", "not run"]


def test_every_check_exists_and_recipes_take_the_options_of_the_runs(monkeypatch):
    monkeypatch.syspath_prepend(gpu_kit.ROOT / "tools")
    monkeypatch.syspath_prepend(gpu_kit.ROOT / "tools" / "bench")
    import gpu_checks

    monkeypatch.setattr(sys, "stdin", io.StringIO())  # the call was killed before this check's turn
    assert gpu_checks.main("ceilings", "ceilings", "runs") == 1
    for name, (_, function, *given) in ((n, each) for call in gpu_kit.CALLS.values() for n, each in call.items()):
        if function == "run":
            _, recipe, *options = gpu_checks.arguments(*given, name, "runs")
            load(recipe, options)
        else:
            inspect.signature(getattr(gpu_checks, function)).bind(*given)
