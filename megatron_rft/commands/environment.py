"""`megatron-rft environment check`: plays a recipe's environment twice with the same turns and compares its answers."""

import argparse
import json
import random
import shutil
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rft.config import Recipe
from megatron_rft.config.environment import AnyEnvironment, Program
from megatron_rft.environments.process import EnvironmentProcesses, EpisodeEnvironment, EpisodeFailed, shown
from megatron_rft.environments.template import Template
from megatron_rft.environments.tools import schemas
from megatron_rft.records import Prompt
from megatron_rft.training import build
from megatron_rft.training.problems import Problems
from megatron_rft.utils.errors import FINISHED, ConfigError, DataError, RunFailed

SAMPLES = {"integer": 7, "number": 2.5, "string": "a", "boolean": True, "array": [1, 2], "object": {}}


@dataclass(frozen=True)
class Transcript:
    """What an environment said in an episode, and the seconds of its slowest answer."""

    said: list[Any]
    fault: str | None
    slowest: float


def run(recipe: Recipe, args: argparse.Namespace) -> int:
    """Returns the exit status.

    Raises:
        RunFailed: an environment failed, or answered otherwise the second time.
    """
    options = recipe.environment
    if options is None:
        raise ConfigError("environment: the recipe has none")
    tokenizer = build.load_tokenizer(recipe.model)
    problems = Problems(recipe.data, options).prompts("train", tokenizer).prompts[: args.episodes]
    turns = recorded(args.turns) if args.turns else [invented(options, problem) for problem in problems]
    folder = tempfile.mkdtemp(prefix="megatron-rft-check-")  # not run.output_dir, which a run wants for itself
    if isinstance(options, Program):
        stops = build.stop_token_ids(recipe.rollout.stop, tokenizer)
        template = Template(tokenizer, stops, recipe.data.chat_template_kwargs)
        longest, episodes = recipe.rollout.max_response_tokens, list(zip(problems, turns, strict=False))
        return check_programs(options, template, episodes, longest, Path(folder))
    plays = []
    for _ in range(2):
        processes = EnvironmentProcesses(
            options.own_options(), options.processes, options.turn_timeout_s, Path(folder) / "log"
        )
        with closing(processes):
            jobs = [
                (environment := processes.new()).submit(play, environment, problem, seed, texts[: options.max_turns])
                for seed, (problem, texts) in enumerate(zip(problems, turns, strict=False))
            ]
            plays.append([job.result() for job in jobs])
    faults = [line for problem, *both in zip(problems, *plays, strict=False) if (line := difference(problem, *both))]
    slowest = max(each.slowest for each in plays[0])
    print(f"{options.name}: {len(plays[0])} episodes, the slowest answer took {slowest:.3f} s", flush=True)
    if faults:
        raise RunFailed("\n".join(faults))
    shutil.rmtree(folder)  # else its messages name the log
    print("the second time it said the same", flush=True)
    return FINISHED


def check_programs(
    options: Program, template: Template, episodes: list[tuple[Prompt, list[str]]], longest: int, folder: Path
) -> int:
    """The same for programs, which run one after the other."""
    from megatron_rft.environments.programs import scripted  # needs aiohttp

    plays = [scripted(options, template, episodes, longest, folder / "log") for _ in range(2)]
    faults = []
    for (problem, _), one, other in zip(episodes, *plays, strict=True):
        error = (one.score and one.score.error) or (other.score and other.score.error)
        if error or one != other:
            faults.append(error or f"problem {problem.index}: the program asked otherwise the second time")
    turns = sum(len(part.turns) for each in plays[0] for part in (*each.segments, each))
    segments = sum(1 + len(each.segments) for each in plays[0])
    print(f"{options.name}: {len(episodes)} episodes, {turns} turns in {segments} segments", flush=True)
    for each in plays[0]:
        if each.score and not each.score.error:
            print(f"score {each.score.reward:g} {each.score.reason}".rstrip(), flush=True)
    if faults:
        raise RunFailed("\n".join(faults))
    shutil.rmtree(folder)
    print("the second time it was the same", flush=True)
    return FINISHED


def play(environment: EpisodeEnvironment, problem: Prompt, seed: int, texts: list[str]) -> Transcript:
    said, slowest, fault = [], 0.0, None
    calls = [("reset", {"prompt": shown(problem), "seed": seed})]
    calls += [("step", {"text": text}) for text in texts] + [("end", {})]
    try:
        for call, arguments in calls:
            if call == "step" and len(said) > 1 and said[-1]["done"]:
                continue
            start = time.perf_counter()
            said.append(environment.ask(call, **arguments))
            slowest = max(slowest, time.perf_counter() - start)
    except EpisodeFailed as error:
        fault = str(error)
    return Transcript(said, fault, slowest)


def difference(problem: Prompt, first: Transcript, second: Transcript) -> str | None:
    """The line about an episode that failed or was not the same twice."""
    for number, (one, other) in enumerate(zip(first.said, second.said, strict=False)):
        if one != other:
            return f"problem {problem.index}, call {number}: said {one!r:.200}, the second time {other!r:.200}"
    fault = first.fault or second.fault
    return fault and f"problem {problem.index}, call {len(first.said)}: {fault}"


def recorded(path: Path) -> list[list[str]]:
    try:
        turns = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise DataError(f"--turns: {path} cannot be read: {error}") from None
    if not turns or not all(isinstance(each, list) and all(isinstance(t, str) for t in each) for each in turns):
        raise DataError(f"--turns: {path}: each line must be a JSON list of texts, the policy's turns of an episode")
    return turns


def invented(environment: AnyEnvironment, problem: Prompt) -> list[str]:
    """Turns for one problem: calls of the functions with made-up arguments, digits, words, and at last its answer."""
    rng, calls = random.Random(problem.index), []
    for tool in (each["function"] for each in schemas(environment)):
        given = {name: SAMPLES.get(about.get("type"), "a") for name, about in tool["parameters"]["properties"].items()}
        given |= {"code": "print(6 * 7)"} if tool["name"] == "python" else {}
        calls.append("<tool_call>" + json.dumps({"name": tool["name"], "arguments": given}) + "</tool_call>")
    words = [str(rng.randint(0, 9)), problem.question[:20] or "?", *calls]
    return [rng.choice(calls or words) for _ in range(environment.max_turns - 1)] + [problem.answer]
