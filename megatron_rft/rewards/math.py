"""The mathematics verifier gives 1 if the final answer is equivalent to the reference, else 0.

`answers.py` reads the answer and detects answers that only repeat the question. Integers and equal texts are compared
here, thousands per second; `equivalence` compares the rest, in separate processes with a hard time limit, because
nothing else stops sympy. An answer that takes longer than the limit, or on which the grader dies twice, is wrong; a
reference on which it dies is an error.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue

import megatron_rft
from megatron_rft.records import Prompt, Score
from megatron_rft.rewards.answers import compare_exactly, final_answer, is_echo, repeated, vote
from megatron_rft.rewards.base import Reward
from megatron_rft.rewards.equivalence.worker import judge
from megatron_rft.utils.errors import ConfigError

LONGEST = 1000  # characters of an answer that may be right, or four times its reference: 10^6 digits are not compared
WORKER = "megatron_rft.rewards.equivalence.worker"
ROOT = Path(megatron_rft.__file__).parents[1]
NOTHING = "the response marks no answer"
TOO_LONG = "grading took longer than reward.timeout_s="
TAIL = 400  # last characters of the problem, which contain the question
Question = tuple[str, ...]  # reference, answer, problem, formulas of the problem that stand in the answer


class MathReward(Reward):
    """`answer`: where an answer is read (answers.py). `workers=0` grades in this process, without a time limit.
    Processes start when the first answer needs one."""

    maximum = 1.0

    def __init__(self, timeout_s: float = 5.0, workers: int = 1, answer: str = "marked"):
        if importlib.util.find_spec("latex2sympy2_extended") is None:
            raise ConfigError("reward.kind=math needs the package math-verify: pip install math-verify")
        self.timeout_s, self.workers, self.how = timeout_s, workers, answer
        self._idle: SimpleQueue[VerifyProcess] = SimpleQueue()
        self._threads: ThreadPoolExecutor | None = None

    def __call__(self, prompts: list[Prompt], texts: list[str]) -> list[Score]:
        assert len(prompts) == len(texts), f"{len(prompts)} prompts, {len(texts)} texts"
        asked = [self._read(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
        # Equal questions are asked once: a group's responses often end in the same answer.
        verdicts = self._judge_all(sorted({each for each in asked if isinstance(each, tuple)}))
        return [verdicts[each] if isinstance(each, tuple) else each for each in asked]

    def answer(self, prompt: Prompt, text: str) -> str | None:
        """Return the response's answer, in the same form for equal answers."""
        found = final_answer(text, self.how, problem(prompt))
        if found is None or len(found) > LONGEST or is_echo(found, reference_form(prompt.answer), problem(prompt)):
            return None
        return vote(found)

    def _read(self, prompt: Prompt, text: str) -> Score | Question:
        """Return the score if texts decide it, else the question for the algebra."""
        reference, asked = reference_form(prompt.answer), problem(prompt)
        answer = final_answer(text, self.how, asked)
        if answer is None:
            return Score(0.0, NOTHING)
        if len(answer) > max(LONGEST, 4 * len(reference)):
            return Score(0.0, f"an answer of {len(answer)} characters")
        same = compare_exactly(reference, answer)
        if same is not None:
            return verdict(same)
        if is_echo(answer, reference, asked):
            return Score(0.0, "the answer repeats the question or leaves a sum to be done")
        return reference, answer, asked[-TAIL:], *repeated(answer, reference, asked)

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None
        while not self._idle.empty():
            self._idle.get().close()

    def _judge_all(self, questions: list[Question]) -> dict[Question, Score]:
        if self.workers == 0:
            return {each: _graded(_judge_here, each) for each in questions}
        if questions and self._threads is None:
            self._threads = ThreadPoolExecutor(self.workers, thread_name_prefix="math-reward")
            for _ in range(self.workers):
                self._idle.put(VerifyProcess(self.timeout_s))
        return dict(zip(questions, self._threads.map(self._judge, questions), strict=True)) if questions else {}

    def _judge(self, asked: Question) -> Score:
        process = self._idle.get()
        try:
            return _graded(process.ask, asked)
        finally:
            self._idle.put(process)


class VerifyProcess:
    """A grading process. A dead one is replaced at the next question."""

    def __init__(self, timeout_s: float):
        self.timeout_s = timeout_s
        self.process: subprocess.Popen | None = None

    def ask(self, *question: str) -> Score:
        try:
            if self.process is None:
                self.process = self._start()
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            return Score(0.0, error=self._cause_of_death())
        result = json.loads(line)
        return Score(0.0, error=result["error"]) if "error" in result else verdict(result["correct"])

    def _start(self) -> subprocess.Popen:
        command = [sys.executable, "-P", "-m", WORKER, str(self.timeout_s)]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        pipe, errors = subprocess.PIPE, subprocess.DEVNULL
        environment = os.environ | {"PYTHONPATH": path}
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, text=True, env=environment)

    def _cause_of_death(self) -> str:
        code = self.process.wait()
        self.close()
        if code in (-signal.SIGPROF, -signal.SIGALRM):
            return f"{TOO_LONG}{self.timeout_s:g}"
        return f"the grading process ended with status {code}"

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            with suppress(BrokenPipeError):  # a question that a dead process never took is still in the buffer
                self.process.stdin.close()
            self.process.stdout.close()
            self.process = None


def reference_form(reference: str) -> str:
    """Return the answer of a worked reference: its last box or the text after "####"."""
    marked = final_answer(reference) if "boxed" in reference or "####" in reference else None
    return marked or reference.strip()


def problem(prompt: Prompt) -> str:
    return prompt.question or prompt.text


def verdict(correct: bool) -> Score:
    return Score(1.0, "correct") if correct else Score(0.0, "wrong answer")


def _graded(ask: Callable[..., Score], question: Question) -> Score:
    """Ask the algebra, after an error once more, unless it ran out of time, which it would again. If it fails and
    grades another answer to the same reference, the answer is at fault and wrong: as an error, 9^(9^9) would be a way
    out of training."""
    reference, _, text, *_ = question
    score = ask(*question)
    if score.error is not None and not score.error.startswith(TOO_LONG):
        score = ask(*question)
    if score.error is not None and ask(reference, "0", text).error is None:
        return Score(0.0, f"the answer cannot be graded: {score.error}")
    return score


def _judge_here(*question: str) -> Score:
    try:
        return verdict(judge(*question))
    except Exception as error:
        return Score(0.0, error=f"{type(error).__name__}: {error}")
