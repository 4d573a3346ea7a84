"""One evaluation: completions from an engine, scores from a reward, and metrics and tables.

It loads no model and forms no process group: `rank`, `world` and `gather` divide the problems. The result is the same
for every layout, because a completion depends only on (seed, name, problem, its number).
"""

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from megatron_rft.evaluation import passk
from megatron_rft.inference.engine import Engine, Request, Sampling, request_seed
from megatron_rft.records import Prompt, Response, Score
from megatron_rft.rewards.base import Reward, check_finite, scored
from megatron_rft.utils.errors import ConfigError, RunFailed
from megatron_rft.utils.files import read_json, read_json_lines, write_atomically

CONDITIONS = "conditions.json"
Row = dict[str, Any]  # a graded completion, with its `problem`


@dataclass(frozen=True)
class Completion:
    """One graded response, as it is stored. If the grader failed, `reward` is None and `error` has the reason."""

    problem: int
    sample: int
    prompt: str
    text: str
    reference: str
    answer: str | None
    reward: float | None
    correct: float | None  # for pass@1: the verifier's verdict as 1 or 0, else the reward
    error: str | None
    tokens: int
    finish_reason: str
    subject: str | None = None
    level: str | None = None


@dataclass(frozen=True)
class EvalResult:
    """The numbers of one evaluation. `majority` counts a problem without any answer as wrong."""

    name: str
    problems: int
    samples: int
    pass_at_1: float
    standard_error: float
    pass_at_k: dict[int, float]
    majority: float  # of all samples
    errors: int  # completions on which the grader failed; no accuracy includes them
    truncated: float  # share of completions that hit the token limit
    mean_tokens: float
    temperature: float
    seed: int
    completions: list[Completion]
    left_out: dict[str, int] = field(default_factory=dict)  # reason -> problems that were not evaluated
    first_error: str | None = None

    def summary(self) -> dict[str, Any]:
        """Everything but the completions, ready for JSON."""
        return {name: value for name, value in self.__dict__.items() if name != "completions"}


@dataclass(frozen=True)
class GradedSampler:
    """Samples responses and grades them. (seed, name, problem, number) determine a response."""

    engine: Engine
    sampling: Sampling
    tokenizer: Any
    reward: Reward
    samples: int = 1  # per problem
    seed: int = 0

    def __call__(self, prompts: list[Prompt], name: str) -> list[tuple[Prompt, int, Response, str, Score]]:
        """Return the responses to each prompt, with their number, the text that was judged, and its score, in the order
        in which the engine finishes them."""
        by_index = {prompt.index: prompt for prompt in prompts}
        seed = partial(request_seed, self.seed, name)
        requests = [Request(p.index, p.token_ids, self.samples, seed(p.index), problem=p) for p in prompts]
        answered = [
            (by_index[group.id], number, response.joined())
            for group in self.engine.generate(requests, self.sampling)
            for number, response in enumerate(group.responses)
        ]
        texts = [self.decode(each.last_turn) for _, _, each in answered]
        scores = scored(self.reward, [prompt for prompt, _, _ in answered], texts, [each for _, _, each in answered])()
        graded = [(*each, text, score) for each, text, score in zip(answered, texts, scores, strict=True)]
        for prompt, number, _, text, score in graded:
            check_finite(score, name, prompt, number, text)
        return graded

    def decode(self, ids: tuple[int, ...]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)


@dataclass
class EvaluationCache:
    """Stores completions while an evaluation runs: a killed one continues where it stopped, a finished one is not
    repeated.

    NAME.jsonl has the completions, `conditions.json` everything that they depend on (weights, problems, sampling,
    verifier), by name. If any of it, `depends_on` (JSON), has changed, the stored completions are discarded. A problem
    counts when it is complete and its grader has not failed. `note` is called with the number of answered problems
    whenever it grows."""

    folder: Path
    name: str
    depends_on: dict[str, Any]
    samples: int
    note: Callable[[int], None] = lambda _: None
    completions: dict[int, list[Row]] = field(default_factory=dict)  # by problem

    def __post_init__(self):
        self.depends_on = json.loads(json.dumps(self.depends_on))  # tuples become lists, as in the file
        known, path = conditions(self.folder), completions_file(self.folder, self.name)
        if self.name not in known and path.is_file() and path.stat().st_size:  # it may be the data set
            raise ConfigError(f"out: {path} is there, and no evaluation has written it: name another folder")
        self.completions = self._read() if known.get(self.name) == self.depends_on else {}
        # Rewritten, without an incomplete last line and without completions of another evaluation.
        write_atomically(path, lines(each for many in self.completions.values() for each in many))
        write_atomically(self.folder / CONDITIONS, json.dumps(known | {self.name: self.depends_on}, indent=1))

    def add(self, completions: list[Row]) -> None:
        """Store all completions of some problems. They are on disk when this returns."""
        for each in completions:
            self.completions.setdefault(each["problem"], []).append(each)
        with completions_file(self.folder, self.name).open("a", encoding="utf-8") as file:
            file.write(lines(completions))
        self.note(len(self.completions))

    def _read(self) -> dict[int, list[Row]]:
        by_problem: dict[int, list[Row]] = {}
        for row in read_json_lines(completions_file(self.folder, self.name)):
            by_problem.setdefault(row["problem"], []).append(row)
        return {
            problem: many
            for problem, many in by_problem.items()
            if len(many) == self.samples and not any(row.get("error") for row in many)
        }


def evaluate(
    sampler: GradedSampler,
    prompts: list[Prompt],
    gather: Callable[[list], list] = lambda mine: mine,
    *,
    rank: int | None = 0,
    world: int = 1,
    batch: int = 64,
    name: str = "test",
    cache: EvaluationCache | None = None,
) -> EvalResult:
    """Evaluate on `prompts`.

    Args:
        gather: concatenates all ranks' lists, on every rank.
        rank: None if this rank has no engine.
        batch: prompts that are submitted to the engine together.
        cache: completions of an earlier start; stores the new ones.

    Raises:
        RunFailed: the grader failed on every response.
    """
    mine = [] if rank is None else prompts[rank::world]
    done = cache.completions if cache else {}
    completions = [Completion(**row) for prompt in mine for row in done.get(prompt.index, [])]
    todo = [prompt for prompt in mine if prompt.index not in done]
    most = len(todo) if cache else -(-len(prompts) // world)
    for start in range(0, most, batch):  # equally often on every rank: replacing a lost engine is collective
        new = [_completion(sampler, *each) for each in sampler(todo[start : start + batch], name)]
        if cache:
            cache.add([asdict(each) for each in new])
        completions += new
    everything = sorted(gather(completions), key=lambda each: (each.problem, each.sample))
    samples = sampler.samples
    assert len(everything) == len(prompts) * samples, f"{len(everything)} completions of {len(prompts)} x {samples}"
    result = summarise(everything, name, samples, sampler.sampling.temperature, sampler.seed)
    if result.errors == len(everything) > 0:
        fix = "Correct the benchmark's reward, else reward or environment.score, and run the same command again"
        raise RunFailed(f"{unjudged(result.summary())}. {fix}")
    return result


def unjudged(summary: dict[str, Any]) -> str:
    """The note about an evaluation whose grader failed on some responses."""
    name, failed, count = summary["name"], summary["errors"], summary["problems"] * summary["samples"]
    return f"{name}: {failed} of {count} answers could not be judged; no accuracy has them. {summary['first_error']}"


def summarise(completions: list[Completion], name: str, samples: int, temperature: float, seed: int) -> EvalResult:
    """The result of completions that are sorted by problem and sample, `samples` of each problem."""
    problems = [completions[i : i + samples] for i in range(0, len(completions), samples)]
    correct = [[each.correct for each in problem] for problem in problems]
    mean, standard_error = passk.pass_at_1(correct)
    answers = [[each.answer for each in problem] for problem in problems]
    return EvalResult(
        name=name,
        problems=len(problems),
        samples=samples,
        pass_at_1=mean,
        standard_error=standard_error,
        pass_at_k={k: passk.mean_pass_at_k(correct, k) for k in passk.ks_up_to(samples)},
        majority=passk.mean_majority(answers, correct),
        errors=sum(each.reward is None for each in completions),
        truncated=fmean(each.finish_reason == "length" for each in completions),
        mean_tokens=fmean(each.tokens for each in completions),
        temperature=temperature,
        seed=seed,
        completions=completions,
        first_error=next((f"Problem {each.problem}: {each.error}" for each in completions if each.error), None),
    )


def _completion(
    sampler: GradedSampler, prompt: Prompt, number: int, response: Response, text: str, score: Score
) -> Completion:
    return Completion(
        problem=prompt.index,
        sample=number,
        prompt=prompt.text,
        text=sampler.decode(response.token_ids) if len(response.turns) > 1 else text,
        reference=prompt.answer,
        answer=sampler.reward.answer(prompt, text),
        reward=None if score.error else score.reward,
        correct=None if score.error else float(score.reward if score.correct is None else score.correct),
        error=score.error,
        tokens=response.length,
        finish_reason=response.finish_reason,
        **{name: str(prompt.fields[name]) for name in ("subject", "level") if prompt.fields.get(name) is not None},
    )


def table(results: list[EvalResult]) -> str:
    """A markdown table, one row per benchmark."""
    ks = sorted({k for result in results for k in result.pass_at_k if k > 1})
    head = ["benchmark", "problems", "n", "pass@1", *(f"pass@{k}" for k in ks), "maj@n", "truncated", "errors"]
    head += ["left out"] if any(result.left_out for result in results) else []
    rows = [
        [
            each.name,
            str(each.problems),
            str(each.samples),
            passk.with_error(each.pass_at_1, each.standard_error),
            *(f"{each.pass_at_k[k]:.3f}" if k in each.pass_at_k else "" for k in ks),
            f"{each.majority:.3f}",
            f"{each.truncated:.1%}",
            str(each.errors),
            *([", ".join(f"{count} {why}" for why, count in each.left_out.items())] if "left out" in head else []),
        ]
        for each in results
    ]
    written = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in written)


def write(results: list[EvalResult], folder: Path) -> None:
    """`results.json`, `results.md`, and `<name>.jsonl` with every completion, into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for result in results:
        completions_file(folder, result.name).write_text(lines(map(asdict, result.completions)), encoding="utf-8")
    (folder / "results.json").write_text(json.dumps([_finite(each.summary()) for each in results], indent=2) + "\n")
    (folder / "results.md").write_text(table(results) + "\n", encoding="utf-8")


def reread(folder: Path, name: str) -> EvalResult | None:
    """A result that `write` has written; None if there is none, or its completions have changed."""
    summaries = [each for each in read_json(folder / "results.json") or [] if each["name"] == name]
    rows = read_json_lines(completions_file(folder, name))
    if not summaries or len(rows) != summaries[0]["problems"] * summaries[0]["samples"]:
        return None
    parts = (summaries[0][key] for key in ("samples", "temperature", "seed"))
    return replace(summarise([Completion(**row) for row in rows], name, *parts), left_out=summaries[0]["left_out"])


def _finite(value: Any) -> Any:
    """NaN as null: a JSON file that every reader takes."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def conditions(folder: Path) -> dict[str, Any]:
    """What the completions in `folder` depend on, by the name of their evaluation."""
    return read_json(folder / CONDITIONS) or {}


def completions_file(folder: Path, name: str) -> Path:
    return folder / f"{name}.jsonl"


def lines(rows: Iterable[Row]) -> str:
    """As JSON lines."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
