"""Whole runs of the five algorithms with PIPO: after kill -9 and a resume they end with the same weights, bit for bit.
The cheap variants run once."""

import math
import random

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests.integration.test_kill_and_resume import assert_same_run, killed
from tests.integration.tiny import metrics, train, write_recipe

slow = pytest.mark.slow
PIPO = {"window": 2, "learning_rate": 1e-2}
CLOSED = {
    "ppo": {
        "algorithm": {"name": "ppo", "mini_batch_prompts": 8},
        "critic": {"lr": 1e-2, "warmup_steps": 1},
        "rollout": {"group_size": 1, "prompts_per_step": 16, "max_response_tokens": 2},
        "pipo": PIPO,
    },
    "grpo": {"algorithm": {"name": "grpo", "kl_estimator": "exact"}, "pipo": PIPO | {"optimizer_state": "own"}},
    "gspo": {"algorithm": {"name": "gspo"}, "pipo": PIPO},
    "dapo": {"algorithm": {"name": "dapo", "max_rounds": 3}, "pipo": PIPO},
    "sdpo": {
        "algorithm": {
            "name": "sdpo",
            "mini_batch_prompts": 2,
            "feedback": ["sibling", "solution"],
            "solution_field": "answer",
            "solution_template": "{}",
            "teacher_template": "{feedback}{prompt}",
            "teacher_rate": 0.5,
            "max_feedback_tokens": 8,
        },
        "pipo": PIPO,
    },
}
OTHERS = {
    "dr_grpo": {"algorithm": {"name": "dr_grpo", "dual_clip": 3.0, "mini_batch_prompts": 2}},
    "cispo": {"algorithm": {"name": "cispo", "importance": "masked"}},
    "rloo": {"algorithm": {"name": "rloo"}},
    "reinforce_plus_plus": {"algorithm": {"name": "reinforce_plus_plus"}, "rollout": {"group_size": 1}},
    "reinforce_plus_plus_baseline": {"algorithm": {"name": "reinforce_plus_plus_baseline", "importance": "truncated"}},
}


def recipe_of(folder, sections):
    """The tiny recipe without its own algorithm's options."""
    sections = {name: dict(value) for name, value in sections.items()}
    sections["rollout"] = {"prompts_per_step": 4, "max_response_tokens": 2} | sections.get("rollout", {})
    path = write_recipe(folder, **{k: v for k, v in sections.items() if k != "algorithm"})
    recipe = yaml.safe_load(path.read_text())
    recipe["algorithm"] = sections["algorithm"]
    path.write_text(yaml.safe_dump(recipe))
    return path


@pytest.mark.parametrize("name", [each if each == "sdpo" else pytest.param(each, marks=slow) for each in CLOSED])
def test_killed_and_resumed_it_is_the_same_run(name, tmp_path):
    recipe = recipe_of(tmp_path, CLOSED[name])
    status, output = train(recipe)
    assert status == 0, output[-3000:]
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == list(range(7))
    assert any("verification/grad_norm" in line for line in lines), "nothing was verified: this proves little"

    out, rng = tmp_path / "killed", random.Random(name)
    killed(recipe, out, step=rng.randint(3, 5), delay=rng.uniform(0, 0.3))
    status, output = train(recipe, f"run.output_dir={out}")
    assert status == 0 and "resumed after step" in output, output[-3000:]
    assert_same_run(out, tmp_path / "run")


TRUNCATED = {"top_k": 3, "top_p": 0.6, "min_p": 0.05}
ADAPTED = {"gspo", "dapo", *OTHERS}  # test_lora.py trains adapters with the others


@slow
@pytest.mark.parametrize("name", CLOSED | OTHERS)
def test_truncated_sampling_is_replayed_exactly(name, tmp_path):
    """fp32 on both sides: what the engine and the trainer compute over the engine's supports differs by rounding. Over
    the whole vocabulary the trainer's log-probs would be lower, since the supports hold less than all of it. Adapters
    are merged for the engine."""
    sections = (CLOSED | OTHERS)[name] | ({"lora": {"rank": 4, "alpha": 8.0}} if name in ADAPTED else {})
    status, output = train(recipe_of(tmp_path, sections | {"rollout": sections.get("rollout", {}) | TRUNCATED}))
    assert status == 0, output[-3000:]
    lines = metrics(tmp_path / "run")[1:]
    assert all(line["mismatch/kl"] < 1e-10 and line.get("mismatch/max", 0.0) < 1e-4 for line in lines), lines
    assert all(1 < line["rollout/support"] < 3 and line.get("policy/entropy", 0.0) < math.log(3) for line in lines), (
        lines
    )
    assert any("verification/grad_norm" in line for line in lines) == ("pipo" in sections)
    assert ("3712 parameters are trained" in output) == (name in ADAPTED)


SDPO = {key: value for key, value in CLOSED["sdpo"]["algorithm"].items() if key != "mini_batch_prompts"}
NEVER_VERIFIED = {
    "grpo": {"algorithm": {"name": "grpo", "old_logprobs": "rollout"}},
    "gspo_recomputed": {"algorithm": {"name": "gspo", "importance": "truncated", "mini_batch_prompts": 2}},
    "sdpo": {"algorithm": SDPO | {"importance_cap": 2.0, "old_logprobs": "rollout"}},
}


@slow
@pytest.mark.parametrize("name", NEVER_VERIFIED)
def test_a_window_that_never_verifies_gives_the_bases_run(name, tmp_path):
    """Bit for bit, with the trainer's and the engine's log-probs as the ratio's denominator. Responses come from older
    weights, so the ratio is not 1."""
    rollout = {"placement": "process", "staleness": 1, "group_size": 8}
    sections = NEVER_VERIFIED[name] | {"run": {"steps": 4, "seed": 3}, "rollout": rollout}
    found = []
    for pipo in (None, {"window": 100}):
        folder = tmp_path / str(bool(pipo))
        folder.mkdir()
        status, output = train(recipe_of(folder, sections | ({"pipo": pipo} if pipo else {})))
        assert status == 0, output[-3000:]
        found.append((load_file(folder / "run/export/model.safetensors"), metrics(folder / "run")))
    (weights, lines), (with_pipo, with_lines) = found
    assert all(torch.equal(value, with_pipo[key]) for key, value in weights.items())
    for key in ("policy/ratio_mean", "policy/clip_fraction", "policy/importance_mean", "policy/loss"):
        assert [line.get(key) for line in lines] == [line.get(key) for line in with_lines], key
    if name == "grpo":
        assert any(line.get("policy/ratio_mean", 1.0) != 1.0 for line in lines), "on-policy: this proves little"


@slow
def test_responses_without_a_gradient_are_left_out(tmp_path):
    """Same weights, to rounding, as with all responses computed; two ranks, a policy and a verification step."""
    sections = {"algorithm": {"name": "grpo", "kl_coefficient": 0.0}, "pipo": PIPO}
    recipe, found = recipe_of(tmp_path, sections), {}
    for option in ("auto", "off"):
        out, more = tmp_path / option, (f"batching.skip_zero_advantages={option}", "run.steps=4")
        status, output = train(recipe, "--nproc", "2", f"run.output_dir={out}", *more)
        assert status == 0, output[-3000:]
        found[option] = metrics(out)[1:], load_file(out / "export/model.safetensors")
    (some, weights), (every, expected) = found["auto"], found["off"]
    assert min(line["policy/computed_share"] for line in some) < 1
    assert any(line.get("verification/computed_share", 1) < 1 for line in some)
    assert all(line["policy/computed_share"] == 1 for line in every)
    for mine, other in zip(some, every, strict=True):
        assert mine["policy/grad_norm"] == pytest.approx(other["policy/grad_norm"], rel=1e-3)
        assert mine["reward/mean"] == other["reward/mean"]
        ratios = [value for name, value in mine.items() if name.endswith("/ratio_mean")]
        assert ratios == pytest.approx([1.0] * len(ratios), abs=0.2)  # a mean over all would be at most the share
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-3, atol=1e-4)


@slow
@pytest.mark.parametrize("name", OTHERS)
def test_the_cheap_variants_run(name, tmp_path):
    status, output = train(recipe_of(tmp_path, OTHERS[name]), "run.steps=3")
    assert status == 0, output[-3000:]
    assert all(line["policy/grad_norm"] >= 0 for line in metrics(tmp_path / "run")[1:])


@slow
def test_a_step_says_when_its_groups_run_out(tmp_path):
    """Here one round does not give DAPO four groups with unequal rewards."""
    sections = CLOSED["dapo"] | {"algorithm": {"name": "dapo", "max_rounds": 1}}
    status, output = train(recipe_of(tmp_path, sections), "run.steps=2")
    assert status == 0, output[-3000:]
    assert "of 4 groups have unequal rewards after 1 rounds of sampling" in output
