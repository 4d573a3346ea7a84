"""Creates run folders like a trainer's, with made-up numbers."""

import json
import math
from pathlib import Path

import yaml

from megatron_rft.tracking.metrics import Sample, StepFile, shortened

EVIL = '</script><script>document.title="taken over"</script><!--data--><b>'


def recipe(seed: int = 0, pipo: bool = False, **run) -> dict:
    found = {
        "trainer": "rl",
        "run": {"output_dir": f"runs/s{seed}/rl", "seed": seed, "steps": 30, "name": None, **run},
        "model": {"path": f"runs/s{seed}/sft/export", "precision": "fp32"},
        "rollout": {"prompts_per_step": 32, "group_size": 8, "max_response_tokens": 64, "temperature": 1.0},
        "algorithm": {"name": "grpo", "kl_coefficient": 0.001},
        "pipo": {"window": 8, "learning_rate": 1e-5} if pipo else None,
    }
    return found


def step_of(step: int, seed: int, pipo: bool) -> dict[str, float]:
    """Reward rises from 0.4 by 0.01 a step, and is 0.02 higher with the next seed."""
    found = {
        "reward/mean": 0.4 + 0.01 * step + 0.02 * seed,
        "policy/kl": 0.001 * step,
        "policy/entropy": 1 / (step + 1),
        "response/length_mean": 20.0,
        "response/length_max": 40.0,
        "policy/grad_norm": 1.0,
        "policy/loss": 0.0,
        "mismatch/kl": 1e-13,
        "mismatch/max": 1e-6,
        "tokens/generated": 5000.0,
        "tokens/per_second": 1000.0,
        "seconds/step": 2.0,
        "seconds/generation": 1.5,
        "seconds/training": 0.5,
    }
    if step % 10 == 0:
        found |= {"evaluation/pass@1": 0.3 + 0.01 * step, "evaluation/pass@1_se": 0.02}
    return found | ({"pipo/xi": math.sin(step), "pipo/phi": max(math.sin(step), 0.1 * math.sin(step))} if pipo else {})


def write_run(folder: Path, seed: int = 0, pipo: bool = False, steps: int = 30, **run) -> Path:
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe(seed, pipo, **run)))
    metrics, samples = StepFile(folder / "metrics.jsonl"), StepFile(folder / "samples.jsonl")
    metrics.write(0, {"evaluation/pass@1": 0.3, "evaluation/pass@1_se": 0.02, "seconds/step": 5.0})
    for step in range(1, steps + 1):
        metrics.write(step, step_of(step, seed, pipo))
        if step % 10 == 0:
            values = {"rollout_logprobs": [-0.1, -3.0], "old_logprobs": [-0.1, -3.01], "ref_logprobs": [-0.2, -1.0]}
            sample = Sample("2+2=", ["4", EVIL], 1.0, values, answer="4", reason="correct", problem=step)
            samples.write(step, {"samples": [shortened(sample)]})
    for step, accuracy in ((0, 0.31), (steps, 0.62)):
        result = folder / f"evaluation/test_step_{step:06d}/results.json"
        result.parent.mkdir(parents=True)
        result.write_text(json.dumps([{"pass_at_1": accuracy + 0.02 * seed, "standard_error": 0.01, "problems": 500}]))
    return folder
