"""Alarms in real runs that have their failures. That of FPA's weights is in test_offline.py."""

import pytest

from megatron_rft.tracking.metrics import NOTES_FILE
from megatron_rft.utils.files import read_json_lines
from tests.integration.test_online_algorithms import PIPO, recipe_of
from tests.integration.tiny import train

pytestmark = pytest.mark.slow
REWARDS = """
calls = 0


def zeros(prompt, response):
    return float(response.count("0"))


def nothing(prompt, response):
    return 0.0


def falling(prompt, response):
    global calls
    calls += 1
    return -float(calls)
"""
PPO = {"name": "ppo", "mini_batch_prompts": 8, "kl_in": "loss", "kl_estimator": "exact", "kl_coefficient": 1e-6}
RUNS = {
    "a policy that learns, too fast, to write nothing but zeros": (
        {
            "run": {"steps": 56, "seed": 3},
            "algorithm": PPO,
            "critic": {"lr": 1e-2, "warmup_steps": 20},
            "optimizer": {"lr": 3e-2},
            "rollout": {"group_size": 1, "prompts_per_step": 16, "max_response_tokens": 24},
            "reward": {"function": "zeros"},
        },
        ("the entropy has collapsed", "the responses explode", "far from the reference"),
    ),
    "problems that nobody solves, nor the refiner": (
        {
            "run": {"steps": 10, "seed": 3},
            "algorithm": {"name": "grpo"},
            "constraint": {"kind": "dynamic", "eta": 0.1},
            "reward": {"function": "nothing"},
        },
        ("in every group all responses have the same reward", "the refiner has improved no response"),
    ),
    "a reward that falls whatever the policy does": (
        {
            "run": {"steps": 14, "seed": 3},
            "algorithm": {"name": "grpo"},
            "pipo": PIPO,
            "reward": {"function": "falling"},
        },
        ("PIPO has suppressed every step",),
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_the_run_has_its_alarms(name, tmp_path):
    sections, alarms = RUNS[name]
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "refine.txt").write_text("{question}{response}\n")
    reward = {"kind": "own", "function": f"{tmp_path}/rewards.py:{sections['reward']['function']}"}
    changed = {"reward": reward}
    if "constraint" in sections:
        changed["constraint"] = sections["constraint"] | {"template": str(tmp_path / "refine.txt")}
    status, output = train(recipe_of(tmp_path, sections | changed))
    assert status == 0, output[-3000:]
    notes = [note["note"] for note in read_json_lines(tmp_path / "run" / NOTES_FILE)]
    for alarm in alarms:
        assert len([note for note in notes if alarm in note]) == 1, (alarm, notes)
