"""A pretrained language model of 135 M parameters: training beside transformers, conversion, layouts, and a run's
memory beside its plan."""

import json
import re
from pathlib import Path

import psutil
import pytest

from examples.smollm2 import make_problems
from megatron_rft.commands import main
from megatron_rft.plan.vllm import unusable
from tests.integration.tiny import ROOT, kill, metrics, start, wait_until
from tests.parity.launch import EVERYTHING, run_ranks
from tests.smollm2 import smollm2

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model() -> Path:
    return smollm2()


def test_four_optimizer_steps_beside_transformers(model):
    cases, found = Path(__file__).with_name("smollm2_cases.py"), []
    for by in ("megatron", "transformers"):
        output = run_ranks(cases, 1, model, by)
        found.append([float(line.split()[1]) for line in output.splitlines() if line.startswith("LOSS")])
    ours, theirs = found
    assert len(theirs) == 4 and theirs[2] < theirs[0] - 0.02  # it learns
    # Beside transformers in fp64 ours differ by up to 2e-6; its own first loss in fp32 differs by 9e-6.
    assert ours == pytest.approx(theirs, abs=3e-5)


@pytest.mark.skipif(unusable() is not None, reason=str(unusable()))
def test_one_step_of_grpo_under_layouts_on_what_vllm_sampled(model, tmp_path):
    cases, found = Path(__file__).with_name("smollm2_cases.py"), {}
    for layout, ranks, pp in (("alone", 1, 1), ("pp 2", 2, 2), ("dp 2", 2, 1)):
        output = run_ranks(cases, ranks, model, "grpo", tmp_path / "step.pt", pp)
        (line,) = [line for line in output.splitlines() if line.startswith("FOUND ")]
        found[layout] = json.loads(line.removeprefix("FOUND "))
    for layout, each in found.items():
        assert each["vllm"] < 5e-4 and each["tensors"] == 272, found  # 5e-5
        assert max(each["norm"], each["loss"]) < 1e-5, (layout, found)
        assert each["gradient"] < 1e-4, (layout, found)  # 3e-5; of transformers, in fp32 and fp64, it is 9e-5
        assert each["after"] < 0.1 * each["moved"], (layout, found)  # of the log-probs by the step: it is the same
    print(found)


@pytest.mark.skipif(unusable() is not None, reason=str(unusable()))
@pytest.mark.parametrize("place", ["rank", *(("hf", "process", "server") if EVERYTHING else ())])
def test_truncated_sampling_is_replayed(model, tmp_path, place):
    """In bf16 the mismatch with top-k and top-p is at most twice that without, and far above it without the replay."""
    output = run_ranks(Path(__file__).with_name("smollm2_cases.py"), 1, model, "truncated", place, tmp_path / "run")
    (line,) = [line for line in output.splitlines() if line.startswith("FOUND ")]
    found = json.loads(line.removeprefix("FOUND "))
    print(place, found)
    for name in ("nucleus", "top_k"):
        assert found[name] < 2 * found["whole"] < found[f"{name}, not replayed"], found
    assert found["nucleus, bytes"] < 40, found
    assert found["top_k, longest support"] > 20 or place == "hf", "logits that are equal in bf16 are all kept"


@pytest.mark.skipif(unusable() is not None, reason=str(unusable()))
def test_the_example_stays_within_the_planned_memory(model, tmp_path):
    """On one rank, in bf16: the resident peak of the third step, and vLLM's log-probs beside the trainer's."""
    if psutil.virtual_memory().available < 8 << 30:
        pytest.skip("less than 8 GiB of memory is free")
    make_problems.main(tmp_path / "problems")
    options = [f"data.{part}={tmp_path}/problems/{part}.jsonl" for part in make_problems.SIZES]
    options += [f"model.path={model}", f"run.output_dir={tmp_path}/run", "run.steps=4", "evaluation.limit=2"]
    options += ["rollout.prompts_per_step=8", "batching.micro_batch_tokens=1024"]
    recipe, run = ROOT / "examples/smollm2/grpo_pipo.yaml", tmp_path / "run"
    process = start(recipe, "--nproc", "1", *options, forked=False)
    came = wait_until(lambda: (run / "metrics.jsonl").is_file() and len(metrics(run)) > 3, process, 1800)
    kill(process)  # its last checkpoint would take twice the memory
    output = process.communicate()[0]
    assert came, output[-3000:]
    planned = float(re.search(r"memory without a GPU: about ([\d.]+) GiB a rank", output)[1])
    third = metrics(run)[3]
    assert third["step"] == 3 and third["memory/peak_gib"] == pytest.approx(planned, rel=0.15), output[-2000:]
    assert third["mismatch/kl"] < 0.02, third


def test_to_torch_dist_and_back_bit_by_bit(model, tmp_path):
    assert main.main(["convert", str(model), str(tmp_path / "there")]) == 0
    assert main.main(["convert", str(tmp_path / "there"), str(tmp_path / "back")]) == 0
    assert (tmp_path / "back/model.safetensors").stat().st_size > 5e8
    assert tensors(tmp_path / "back") == tensors(model)


def tensors(folder: Path) -> dict[str, str]:
    from safetensors import safe_open

    from megatron_rft.conversion.convert import fingerprint

    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: fingerprint(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118  not a dict
