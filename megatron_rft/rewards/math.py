"""The mathematics verifier: 1 where the final answer is equivalent to the reference, 0 where it is not.

Equality of integers and of equal texts is decided here, thousands in a second. The rest is math-verify's (sympy), in
processes of its own with a hard time limit: its built-in limits are signals, which work in a main thread only. A
response on which the grader dies twice gets a Score with an error, not a 0.
"""

import importlib.util
import json
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue

from megatron_rft.records import Prompt, Score
from megatron_rft.rewards.answers import as_latex, compare_exactly, final_answer, normalise
from megatron_rft.rewards.verify_worker import judge
from megatron_rft.utils.errors import ConfigError

TAIL = 2000  # characters of an unmarked response that are searched for an answer
LONGEST = 1000  # characters of an answer that may be right, or four times its reference: 10^6 digits are not compared
WORKER = Path(__file__).with_name("verify_worker.py")


class MathReward:
    """`workers=0` grades in this process, without a time limit. Processes start when the first answer needs one."""

    maximum = 1.0

    def __init__(self, timeout_s: float = 5.0, workers: int = 1):
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError("reward.kind=math needs the package math-verify: pip install math-verify")
        self.timeout_s, self.workers = timeout_s, workers
        self._idle: SimpleQueue[VerifyProcess] = SimpleQueue()
        self._threads: ThreadPoolExecutor | None = None

    def __call__(self, prompts: list[Prompt], texts: list[str]) -> list[Score]:
        assert len(prompts) == len(texts), f"{len(prompts)} prompts, {len(texts)} texts"
        references = {answer: reference_form(answer) for answer in {prompt.answer for prompt in prompts}}
        scores = [score_exactly(references[prompt.answer], text) for prompt, text in zip(prompts, texts, strict=True)]
        # Equal questions are asked once: a group's responses often end in the same answer.
        hard = [place for place, score in enumerate(scores) if score is None]
        questions = {place: question(references[prompts[place].answer], texts[place]) for place in hard}
        verdicts = self._judge_all(sorted(set(questions.values())))
        return [score or verdicts[questions[place]] for place, score in enumerate(scores)]

    def answer(self, text: str) -> str | None:
        return final_answer(text)

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None
        while not self._idle.empty():
            self._idle.get().close()

    def _judge_all(self, questions: list[tuple[str, str]]) -> dict[tuple[str, str], Score]:
        if self.workers == 0:
            return {each: _judge_here(*each) for each in questions}
        if questions and self._threads is None:
            self._threads = ThreadPoolExecutor(self.workers, thread_name_prefix="math-reward")
            for _ in range(self.workers):
                self._idle.put(VerifyProcess(self.timeout_s))
        return dict(zip(questions, self._threads.map(self._judge, questions), strict=True)) if questions else {}

    def _judge(self, asked: tuple[str, str]) -> Score:
        process = self._idle.get()
        try:
            score = process.ask(*asked)
            return score if score.error is None else process.ask(*asked)
        finally:
            self._idle.put(process)


class VerifyProcess:
    """One grading process; a dead one is replaced when the next question comes."""

    def __init__(self, timeout_s: float):
        self.timeout_s = timeout_s
        self.process: subprocess.Popen | None = None

    def ask(self, reference: str, answer: str) -> Score:
        try:
            if self.process is None:
                self.process = self._start()
            self.process.stdin.write(json.dumps([reference, answer]) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            return Score(0.0, error=self._cause_of_death())
        result = json.loads(line)
        return Score(0.0, error=result["error"]) if "error" in result else verdict(result["correct"])

    def _start(self) -> subprocess.Popen:
        # -P: the folder of the file has modules named like those of the standard library.
        command = [sys.executable, "-P", str(WORKER), str(self.timeout_s)]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)

    def _cause_of_death(self) -> str:
        code = self.process.wait()
        self.close()
        if code in (-signal.SIGPROF, -signal.SIGALRM):
            return f"grading took longer than reward.timeout_s={self.timeout_s:g}"
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
    """A reference answer as `final_answer` would give it; a worked reference counts by its own last marker."""
    return final_answer(reference) or normalise(reference)


def score_exactly(reference: str, text: str) -> Score | None:
    """The score where equality of texts or integers settles it, or their lengths, else None."""
    answer = final_answer(text)
    if answer is None:
        return None
    if len(answer) > max(LONGEST, 4 * len(reference)):
        return Score(0.0, f"an answer of {len(answer)} characters")
    same = compare_exactly(reference, answer)
    return None if same is None else verdict(same)


def question(reference: str, text: str) -> tuple[str, str]:
    """What the algebra is asked: the marked answer, or for an unmarked response its end, searched for an answer."""
    answer = final_answer(text)
    return as_latex(reference), text[-TAIL:] if answer is None else as_latex(answer)


def verdict(correct: bool) -> Score:
    return Score(1.0, "correct") if correct else Score(0.0, "wrong answer")


def _judge_here(reference: str, answer: str) -> Score:
    try:
        return verdict(judge(reference, answer))
    except Exception as error:
        return Score(0.0, error=f"{type(error).__name__}: {error}")
