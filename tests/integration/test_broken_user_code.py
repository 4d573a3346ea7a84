"""A run with a user's code that is wrong ends with one sentence that names the value, the place and the fix."""

import re

import pytest

from megatron_rft.commands.main import main
from megatron_rft.utils.checkpoint_files import complete
from tests.integration.tiny import metrics, train, write_recipe

WORLDS = """
import os
from megatron_rft.environments import Environment, Turn

class World(Environment):
    def reset(self, prompt, seed):
        self.seed = seed

    def score(self):
        return float(self.seed % 2)

class Text(World):
    def step(self, text):
        return "text"

class Surrogate(World):
    def step(self, text):
        return Turn("\\ud800 x")

class Exits(World):
    def step(self, text):
        os._exit(7)

class Closes(World):
    def step(self, text):
        os.closerange(3, 4096)

class Interrupts(World):
    def step(self, text):
        raise KeyboardInterrupt

class Rare(World):
    def step(self, text):
        if self.seed % 4 == 0:
            raise LookupError("no such place")
        return Turn(done=True)
"""


@pytest.fixture
def play(tmp_path, capfd):
    """A function: the name of a class and more options -> the exit status and what was printed."""

    def run(name: str, *options: str) -> tuple[int, str]:
        (tmp_path / "worlds.py").write_text(WORLDS)
        world = {"kind": "own", "episode": f"{tmp_path}/worlds.py:{name}", "max_turns": 4, "processes": 1}
        sections = {"run": {"steps": 1, "seed": 3}, "data": {"test": None}, "rollout": {"max_response_tokens": 24}}
        recipe = write_recipe(tmp_path, environment=world, **sections)
        return train(recipe, *options)

    return run


@pytest.mark.parametrize(
    ("name", "status", "message"),
    [
        ("Text", 2, r"step \(worlds.py, line 13\) returned 'text': return a Turn\(text, reward=..., done=...\)"),
        (
            "Surrogate",
            2,
            r"step \(worlds.py, line 17\) returned Turn\(text='\\ud800 x', .*: it has half of a surrogate",
        ),
        ("Exits", 3, r"failed on \d\d of 32 responses .* its process ended with status 7"),
        ("Closes", 3, r"failed on \d\d of 32 responses .* its process ended with status"),
        ("Interrupts", 3, r"failed on \d\d of 32 responses .*KeyboardInterrupt:  \(worlds.py, line 30\)"),
    ],
)
def test_an_environment_that_is_wrong_ends_the_run(play, name, status, message):
    ended, output = play(name)
    error = output.strip().splitlines()[-1]
    assert (ended, error.startswith("error: ")) == (status, True) and re.search(message, error), output
    assert re.search(rf"environment {name}, problem \d+, turn 1: ", error) and "Traceback" not in output


def test_few_failed_episodes_are_left_out_up_to_a_share(play, tmp_path):
    status, output = play("Rare")
    assert status == 0, output
    assert 0 < metrics(tmp_path / "run")[-1]["reward/grader_errors"] < 16
    status, output = play("Rare", "reward.max_error_share=0.01", f"run.output_dir={tmp_path}/strict")
    assert status == 3, output
    assert re.search(r"of 32 responses \(reward.max_error_share=0.01\), first on problem \d+ .*LookupError", output)


JUDGE = """
import pathlib

def judge(prompt, text):
    return 1.0 / (prompt.answer not in pathlib.Path(__file__).with_name("skipped").read_text())
"""


def test_an_evaluation_says_how_many_answers_could_not_be_judged(tmp_path, capfd):
    (tmp_path / "judge.py").write_text(JUDGE)
    reward = {"kind": "own", "function": f"{tmp_path}/judge.py:judge"}
    recipe = write_recipe(tmp_path, reward=reward, run={"steps": 1, "seed": 3}, evaluation={"samples": 2})
    (tmp_path / "skipped").write_text("4")
    status, output = train(recipe)
    note = r"test: 4 of 20 answers could not be judged; no accuracy has them. Problem \d: .*ZeroDivisionError"
    assert status == 0 and len(re.findall(note, output)) == 2, output
    capfd.readouterr()
    for skipped, status in (("4", 0), ("01234", 3)):
        (tmp_path / "skipped").write_text(skipped)
        assert main(["evaluate", str(recipe), "--out", str(tmp_path / skipped)]) == status
        assert re.search(note.replace("4 of", f"{4 * len(skipped)} of"), "".join(capfd.readouterr()))


REWARDS = """
import signal, sys
from megatron_rft.responses import Score

def exits(prompt, text):
    sys.exit()

def words(prompt, text):
    return Score("1.0")

def alarms(prompt, text):
    signal.alarm(20)
    signal.alarm(0)
    return prompt.answer in text
"""


@pytest.mark.parametrize(
    ("name", "status", "message"),
    [
        ("exits", 3, r"error: step 1: the grader failed on 32 of 32 responses .*: SystemExit:  \(rewards.py, line 6\)"),
        ("words", 2, r"error: .*rewards.py:words: problem \d+, response '.*': Score: '1.0' is no number"),
        ("alarms", 0, "model in Hugging Face format"),
    ],
)
def test_rewards(tmp_path, name, status, message):
    (tmp_path / "rewards.py").write_text(REWARDS)
    reward = {"kind": "own", "function": f"{tmp_path}/rewards.py:{name}"}
    recipe = write_recipe(tmp_path, reward=reward, run={"steps": 1, "seed": 3}, data={"test": None})
    ended, output = train(recipe)
    assert ended == status and re.search(message, output) and "Traceback" not in output, output


FAILING = """
import os
from megatron_rft.objectives.grpo import GRPO

class Failing(GRPO):
    steps = 0

    def prepare(self, batch, state):
        self.steps += 1
        if self.steps == 2 and os.environ["RANK"] in "{ranks}":
            raise LookupError("no such place")
        return super().prepare(batch, state)
"""


@pytest.mark.parametrize("ranks", ["1", "01"])
def test_an_error_ends_the_run_while_a_checkpoint_is_being_written(tmp_path, ranks):
    """One rank does not wait for others that wait for it in the step. If all ranks fail, the checkpoint is finished."""
    (tmp_path / "failing.py").write_text(FAILING.format(ranks=ranks))
    algorithm = {"name": "own", "objective": f"{tmp_path}/failing.py:Failing", "kl_coefficient": 0.0}
    more = {"data": {"test": None}, "checkpoint": {"every": 1}}
    recipe = write_recipe(tmp_path, algorithm=algorithm | {"mini_batch_prompts": None}, **more)
    status, output = train(recipe, "--nproc", "2", timeout=900)  # and not after an hour, when gloo gives up
    assert status == 3 and re.search(r"error: rank \d failed: LookupError: no such place", output), output[-3000:]
    assert [path.name for path in complete(tmp_path / "run/checkpoints")] == ["step_000001"] * (ranks == "01")
