"""Whole runs with a dynamic constraint: killed and resumed, with and without skipping, and with eta 0."""

import pytest

from megatron_rft.utils.files import read_json_lines
from tests.integration.test_kill_and_resume import assert_same_run, killed, numbers
from tests.integration.test_online_algorithms import recipe_of
from tests.integration.tiny import metrics, train

pytestmark = pytest.mark.slow
SECTIONS = {
    "algorithm": {"name": "dapo", "max_rounds": 2},
    "constraint": {
        "kind": "dynamic",
        "eta": 0.1,
        "temperature": 1.0,
        "kl_every": 2,
        "norms_every": 3,
    },
    "pipo": {"window": 2, "learning_rate": 1e-2},
    "checkpoint": {"every": 2, "asynchronous": False},
}
# The requested digit, as in the reward of the tiny recipe.
REWARD = """
def grade(prompt, response):
    return float(response[:1] == prompt.answer)
"""


@pytest.fixture
def recipe(tmp_path):
    """The recipe of SECTIONS, with some replaced."""

    def write(name: str, **sections):
        (tmp_path / name).mkdir()
        (tmp_path / name / "refine.txt").write_text("{question}{response}\n")
        constraint = SECTIONS["constraint"] | {"template": str(tmp_path / name / "refine.txt")}
        merged = SECTIONS | {"constraint": constraint} | sections
        return recipe_of(tmp_path / name, {key: value for key, value in merged.items() if value is not None})

    return write


def test_killed_and_resumed_it_is_the_same_run(recipe):
    path = recipe("run")
    status, output = train(path)
    assert status == 0, output[-3000:]
    lines = metrics(path.parent / "run")
    assert sum("constraint/cross_entropy" in line for line in lines) > 2, "no pairs: this proves little"
    assert any("verification/grad_norm" in line for line in lines)
    assert any("constraint/grad_norm_constraint" in line for line in lines)

    out = path.parent / "killed"
    killed(path, out, step=4)
    status, output = train(path, f"run.output_dir={out}")
    assert status == 0 and "resumed after step" in output, output[-3000:]
    assert_same_run(out, path.parent / "run")
    shown = [read_json_lines(each / "samples.jsonl") for each in (out, path.parent / "run")]
    pairs = [[(line["step"], s["tokens"], s["values"]) for line in lines for s in line["samples"]] for lines in shown]
    kinds = [sample["kind"] for line in shown[0] for sample in line["samples"]]
    assert pairs[0] == pairs[1] and kinds.count("to be refined") == kinds.count("refined") > 0


def weights(path) -> bytes:
    return (path.parent / "run" / "export" / "model.safetensors").read_bytes()


def test_skipping_responses_at_the_maximum_changes_only_time(recipe, tmp_path):
    """Compares the same reward with a maximum of 1 and without a maximum."""
    (tmp_path / "reward.py").write_text(REWARD)
    found = []
    for maximum in (1.0, None):
        reward = {"kind": "own", "function": f"{tmp_path}/reward.py:grade"} | ({"maximum": maximum} if maximum else {})
        path = recipe(f"maximum_{maximum}", reward=reward, algorithm={"name": "grpo"}, pipo=None)
        status, output = train(path, "run.steps=4")
        assert status == 0, output[-3000:]
        lines = metrics(path.parent / "run")[1:]
        counted = [sum(line[f"constraint/{name}"] for line in lines) for name in ("skipped", "refined", "pairs")]
        found.append((weights(path), counted))
    (skipped, with_skip), (whole, without) = found
    assert (
        with_skip[0] > 0 == without[0] and with_skip[1] + with_skip[0] == without[1] and with_skip[2] == without[2] > 0
    )
    assert skipped == whole


def test_with_eta_0_training_is_unchanged(recipe):
    """Equals the run without a constraint bit for bit."""
    paths = []
    for name, constraint in (("none", {"kind": "none"}), ("measured", None)):
        sections = {"constraint": constraint} if constraint else {}
        paths.append(recipe(name, algorithm={"name": "grpo", "mini_batch_prompts": 2}, pipo=None, **sections))
    for path, overrides in zip(paths, ([], ["constraint.eta=0", "constraint.norms_every=0"]), strict=True):
        status, output = train(path, "run.steps=4", *overrides)
        assert status == 0, output[-3000:]
    assert weights(paths[0]) == weights(paths[1])
    plain, measured = (numbers(path.parent / "run") for path in paths)
    assert all(line.items() <= other.items() for line, other in zip(plain, measured, strict=True))
    assert any(line.get("constraint/improved") for line in measured)
    found = [line.get("constraint/cross_entropy", 0) > 0 for line in measured]
    assert found == [line.get("constraint/pairs", 0) > 0 for line in measured]
