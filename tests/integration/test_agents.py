"""Whole runs with an environment: every algorithm's parts, ahead of training, killed and resumed."""

import hashlib
import json
import re
from collections.abc import Iterable
from itertools import permutations
from pathlib import Path

import pytest

from examples.agents import make_numbers, make_products, number_game
from megatron_rft.environments import Prompt
from megatron_rft.plan.vllm import unusable
from megatron_rft.tracking.metrics import SAMPLES_FILE
from megatron_rft.utils import products
from megatron_rft.utils.files import read_json_lines
from tests.integration.test_kill_and_resume import killed
from tests.integration.tiny import ROOT, metrics, train, write_recipe
from tests.smollm2 import smollm2

WORLD = Path(__file__).with_name("world.py")
ENVIRONMENT = {"kind": "own", "episode": f"{WORLD}:Repeat", "max_turns": 3, "turn_tokens": 2, "processes": 2}
ROLLOUT = {"max_response_tokens": 6}


def write(folder: Path, **sections) -> Path:
    sections["rollout"] = ROLLOUT | sections.get("rollout", {})
    return write_recipe(folder, **{"environment": ENVIRONMENT, "run": {"steps": 4}} | sections)


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / "run/export/model.safetensors").read_bytes()).hexdigest()


PARTS = {
    "pipo": {"pipo": {"window": 2, "learning_rate": 1e-2}, "algorithm": {"old_logprobs": "recompute"}},
    "ppo": {"algorithm": {"name": "ppo"}, "critic": {"lr": 1e-3}},
    "sdpo": {
        "algorithm": {
            "name": "sdpo",
            "mini_batch_prompts": None,
            "feedback": ["error"],
            "error_template": "{}",
            "teacher_template": "{feedback}{prompt}",
            "max_feedback_tokens": 16,
        }
    },
    "ahead": {
        "rollout": ROLLOUT | {"placement": "process", "staleness": 1},
        "algorithm": {"importance": "truncated"},
    },
    "verifier": {"environment": ENVIRONMENT | {"episode": f"{WORLD}:Silent"}},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Name of PARTS -> folder of the finished run; each runs once."""
    done: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in done:
            done[name] = tmp_path_factory.mktemp(name)
            sections = {"algorithm": {}} | PARTS[name]
            if sections["algorithm"].get("name") in ("sdpo", "ppo"):
                sections["algorithm"] = {"kl_coefficient": None} | sections["algorithm"]
            status, output = train(write(done[name], **sections))
            assert status == 0, output[-3000:]
        return done[name]

    return of


@pytest.mark.parametrize("name", PARTS)
def test_runs_to_its_end(run, name):
    last = check_turns(metrics(run(name) / "run"))
    if name != "ahead":
        assert abs(last.get("mismatch/kl", 0.0)) < 1e-8


def check_turns(lines: list[dict]) -> dict:
    """Returns the last of the lines of a whole run."""
    assert [line["step"] for line in lines] == list(range(5))
    last = lines[-1]
    assert last["environment/turns_max"] == 2 and 1 < last["environment/turns_mean"] <= 2
    assert last["environment/errors"] == 0 and 0 < last["environment/tokens_share"] < 0.4
    assert 0 < last["response/length_mean"] <= 4, "only the policy's tokens count"
    return last


def test_samples_have_the_turns(run):
    samples = [sample for line in read_json_lines(run("pipo") / "run" / SAMPLES_FILE) for sample in line["samples"]]
    several = [sample for sample in samples if len(sample["turns"]) == 2]
    assert several
    for sample in several:
        (_, end, reward), (first, last, _) = sample["turns"]
        assert first == end + 1 and last == len(sample["tokens"]) and reward in (0.0, 0.5)


def test_kill_9_and_resume_to_the_same_bits(run, tmp_path):
    recipe = write(tmp_path, **PARTS["pipo"])
    killed(recipe, tmp_path / "run", step=3)
    status, output = train(recipe)
    assert status == 0 and "resumed after step" in output, output[-3000:]
    assert digest(tmp_path) == digest(run("pipo"))


@pytest.mark.slow
@pytest.mark.skipif(unusable() is not None, reason=str(unusable()))
def test_each_episode_at_its_own_pace_on_a_vllm_server(tmp_path):
    """Above one step of staleness an episode waits for no other: a request to the server has one episode's turn."""
    options = {"engine": "vllm", "placement": "server", "staleness": 2}
    recipe = write(tmp_path, rollout=options, algorithm={"importance": "truncated"})
    config = tmp_path / "model/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"head_dim": 32}))
    status, output = train(recipe)
    assert status == 0, output[-3000:]
    check_turns(metrics(tmp_path / "run"))


def best_of(world: type[number_game.Guess], policies: Iterable[dict[str, str]]) -> float:
    """The best policy's share of numbers found in three guesses. A policy: what was heard so far -> the next guess."""

    def found(policy: dict[str, str], number: int) -> bool:
        game, heard = world(), ""
        game.reset(Prompt(0, (), "?", str(number)), seed=0)
        for _ in range(3):
            turn = game.step(policy[heard])
            if turn.done:
                break
            heard += turn.text
        return game.score().right

    return max(sum(found(policy, number) for number in range(7)) / 7 for policy in policies)


@pytest.fixture(scope="module")
def learned(tmp_path_factory) -> tuple[Path, str]:
    """The folder and the output of two fifths of the number game's 200 steps, from random weights."""
    folder = tmp_path_factory.mktemp("learned")
    make_numbers.main(folder)
    options = [f"data.{part}={folder}/numbers.jsonl" for part in ("train", "test")]
    options += [f"model.path={folder}/model", f"run.output_dir={folder}/run", "run.steps=80"]
    status, output = train(ROOT / "examples/agents/number_game.yaml", *options)
    assert status == 0, output[-3000:]
    return folder, output


@pytest.mark.slow
def test_the_number_game_is_learned_by_reading_the_answers(learned):
    """Who does not read them finds three of seven."""
    blind = [dict(zip(("", "?", "??"), guesses, strict=True)) for guesses in permutations("0123456", 3)]
    bisects = {"": "3", "<": "1", ">": "5", "<<": "0", "<>": "2", "><": "4", ">>": "6"}
    assert best_of(number_game.Silent, blind) == 3 / 7 and best_of(number_game.Guess, [bisects]) == 1
    after = float(re.search(r"pass@1 [\d.]+ ± [\d.]+ -> ([\d.]+)", learned[1])[1])
    assert after >= 0.55, learned[1][-2000:]


@pytest.mark.slow
def test_a_program_with_plain_chat_requests_ends_with_the_same_weights(learned, tmp_path):
    """The number game as an environment and as a program, bit for bit."""
    pytest.importorskip("aiohttp")
    folder, _ = learned
    options = [f"data.train={folder}/numbers.jsonl", "data.test=null"]
    options += [f"model.path={folder}/run/export", "model.initialise=pretrained", "run.steps=2"]
    options += ["rollout.prompts_per_step=4", "rollout.group_size=8"]
    runs = []
    for name in ("number_game", "number_program"):
        folder = tmp_path / name
        status, output = train(ROOT / f"examples/agents/{name}.yaml", *options, f"run.output_dir={folder}")
        assert status == 0, output[-3000:]
        lines = [(line["reward/mean"], line["environment/turns_mean"]) for line in metrics(folder)]
        assert not any(line["environment/errors"] for line in metrics(folder))
        runs.append((lines, (folder / "export/model.safetensors").read_bytes()))
    assert runs[0] == runs[1]
    assert all(reward > 0 and turns > 1 for reward, turns in runs[0][0]), runs[0][0]


@pytest.mark.slow
@pytest.mark.skipif(unusable() is not None, reason=str(unusable()))
@pytest.mark.skipif(not products.has_instructions(), reason="a CPU without bf16 instructions takes minutes for a step")
def test_smollm2_learns_to_use_a_calculator(tmp_path):
    """Two of the example's ten steps."""
    make_products.main(tmp_path)
    options = [f"data.{part}={tmp_path}/{part}.jsonl" for part in make_products.SIZES]
    options += [f"model.path={smollm2()}", f"run.output_dir={tmp_path}/run", "run.steps=2", "evaluation.limit=32"]
    recipe = ROOT / "examples/agents/calculator.yaml"
    status, output = train(recipe, *options, timeout=7200)
    assert status == 0, output[-3000:]
    assert not any(line.get("environment/errors") for line in metrics(tmp_path / "run"))
    before, after = re.search(r"pass@1 ([\d.]+) ± [\d.]+ -> ([\d.]+)", output).groups()
    assert float(after) > float(before) + 0.2, output[-2000:]
