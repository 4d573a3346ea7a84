"""One rank hangs: the launcher names it with its node and phase, writes a report and ends the run. One is slow: the run
says which."""

from pathlib import Path

import pytest

from megatron_rft.tracking.metrics import NOTES_FILE
from megatron_rft.utils.errors import FAILED
from megatron_rft.utils.files import read_json_lines
from tests.integration.tiny import kill, start, train, wait_until, write_recipe

HANGING = str(Path(__file__).with_name("hanging.py"))
SPLIT = {
    "one": {},
    "tp": {"tensor_model_parallel_size": 2},
    "pp": {"pipeline_model_parallel_size": 2},
    "dp": {},
}
TOLD = {
    "stop": "is stopped",
    "loop": "has not come to",
    "other": "wait for each other in different collectives: rank 0 on node",
    "engine": "waits for a process of its own that is stopped (pid",
    "grader": "has not come to",
}


def hang(folder: Path, layout: str, rank: int, phase: str, kind: str, hang_s: float = 12.0) -> tuple[int, str]:
    """Exit status and output of a run of two ranks, or one, in which `rank` hangs in its second step."""
    recipe = write_recipe(
        folder,
        run={"steps": 3},
        megatron=SPLIT[layout],
        data={"max_prompt_tokens": 8, "validation": str(folder / "test.jsonl")},
        evaluation={"every": 1},
        checkpoint={"every": 1},
        faults={"hang_s": hang_s} | ({"engine_silence_s": 600.0} if kind == "engine" else {}),
        rollout={"placement": "process", "processes": 2} if kind == "engine" else {},
    )
    case = {"HANG": f"{rank} {phase} 2 {kind}", "HANG_MARK": str(folder / "hangs")}
    return train(recipe, "--nproc", "1" if layout == "one" else "2", program=(HANGING,), **case)


def check(folder: Path, layout: str, rank: int, phase: str, kind: str, status: int, output: str) -> None:
    """Checks that the message names the right rank, its node, phase and step, and that there are stacks of all ranks
    that can write one."""
    told = next((line for line in output.splitlines() if "the run hangs" in line), output[-3000:])
    alone, stopped = layout == "one", kind == "stop"
    why = "does not move" if alone and not stopped else TOLD[kind]
    assert status == FAILED and "the run hangs: " in told and why in told, told
    if kind == "other":  # of two ranks nothing says which one is wrong
        assert f"rank {rank} on node" in told and "in barrier no." in told and f"(step 2, {phase}" in told, told
    else:
        assert f"the run hangs: rank {rank} on node" in told and f"it is in step 2, {phase}" in told, told
    report = next((folder / "run/launch").glob("hang_*.txt")).read_text()
    stacks = report.partition("---- rank")[2]
    assert "rank 0 (node" in report and ("rank 1 (node" in report) != alone
    assert ("most recent call first" in stacks) != (alone and stopped)
    assert (" in loop\n" in stacks or " in hang\n" in stacks) == (kind in ("loop", "grader", "other"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout, rank, phase, kind",
    [
        ("tp", 1, "training", "stop"),
        ("pp", 0, "logprobs", "loop"),
        ("dp", 1, "sync", "other"),
        ("dp", 0, "generation", "engine"),
        ("one", 0, "training", "loop"),
    ],
)
def test_the_rank_that_hangs_is_named(tmp_path, layout, rank, phase, kind):
    check(tmp_path, layout, rank, phase, kind, *hang(tmp_path, layout, rank, phase, kind, hang_s=20.0))


@pytest.mark.slow
def test_the_rank_that_is_slow_is_named(tmp_path):
    recipe = write_recipe(tmp_path, run={"steps": 1000}, checkpoint={"every": 0})
    case = {"HANG": "1 logprobs 2 slow", "HANG_MARK": str(tmp_path / "hangs")}
    process = start(recipe, "--nproc", "2", program=(HANGING,), **case)

    def told() -> bool:
        notes = [note["note"] for note in read_json_lines(tmp_path / "run" / NOTES_FILE)]
        return any("rank 1 on node" in note and "has been the slowest for 10 steps" in note for note in notes)

    try:
        assert wait_until(told, process)
    finally:
        kill(process)
        output = process.communicate()[0]
    assert "slowest rank 1: " in output and "most of the difference is in logprobs" in output, output[-3000:]
