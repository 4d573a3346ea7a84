import json
import math

import pytest

from megatron_rft.tracking.metrics import HEAD, TAIL, Sample, StepFile, due, read_metrics, short, shortened


def write(file: StepFile, step: int, *samples: Sample) -> None:
    file.write(step, {"samples": [shortened(sample) for sample in samples]})


def of_length(tokens: int, **rest) -> Sample:
    numbers = [-0.123456] * tokens
    return Sample("2+2=", ["x"] * tokens, 1.0, {"rollout_logprobs": numbers}, **rest)


@pytest.mark.parametrize("total", [1, 3, 40, 41, 79, 1000, 100_000])
def test_a_bounded_number_of_steps_with_both_ends(total):
    steps = [step for step in range(1, total + 1) if due(step, total, 40)]
    assert steps[0] == 1 and steps[-1] == total
    assert min(total, 20) <= len(steps) <= 42
    assert not any(due(step, total, 0) for step in range(1, total + 1))


def test_a_long_response_keeps_its_ends(tmp_path):
    tokens = [str(i) for i in range(10_000)]
    numbers = [float(i) for i in range(10_000)]
    write(StepFile(tmp_path / "samples.jsonl"), 1, Sample("p" * 9000, tokens, 0.5, {"rollout_logprobs": numbers}))
    (line,) = read_metrics(tmp_path / "samples.jsonl")
    (kept,) = line["samples"]
    assert kept["tokens"] == tokens[:HEAD] + tokens[-TAIL:] and kept["omitted"] == 10_000 - HEAD - TAIL
    assert kept["values"]["rollout_logprobs"] == numbers[:HEAD] + numbers[-TAIL:]
    assert len(kept["prompt"]) < 4100 and short("as it is") == "as it is"


def test_numbers_are_short_and_valid(tmp_path):
    file = StepFile(tmp_path / "samples.jsonl")
    write(file, 1, of_length(1), Sample("", ["a", "b"], None, {"advantages": [math.nan, None]}))
    first, second = json.loads((tmp_path / "samples.jsonl").read_text())["samples"]
    assert first["values"]["rollout_logprobs"] == [-0.1235] and second["values"]["advantages"] == [None, None]


def test_a_resume_writes_each_step_once(tmp_path):
    path = tmp_path / "samples.jsonl"
    for first, last in ((0, 6), (3, 8)):
        file = StepFile(path, resume_step=first)
        for step in range(first, last):
            write(file, step, of_length(2, answer=f"begun at {first}"))
        file.close()
    lines = read_metrics(path)
    assert [line["step"] for line in lines] == list(range(8))
    assert [line["samples"][0]["answer"][-1] for line in lines] == list("00033333")
