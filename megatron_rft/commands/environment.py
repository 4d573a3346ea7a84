"""`megatron-rft environment check`: plays a recipe's environment twice with the same turns and compares its answers."""

import argparse
import json
import random
import shutil
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from megatron_rft.config.environment import AnyEnvironment
from megatron_rft.environments.script import Script, scripted
from megatron_rft.environments.tools import schemas
from megatron_rft.records import Prompt, Response
from megatron_rft.training import build
from megatron_rft.training.engines import EngineBuilder
from megatron_rft.training.episodes import around
from megatron_rft.training.problems import Problems
from megatron_rft.utils.errors import FINISHED, ConfigError, DataError, RunFailed

SAMPLES = {"integer": 7, "number": 2.5, "string": "a", "boolean": True, "array": [1, 2], "object": {}}


def run(args: argparse.Namespace) -> int:
    """Returns the exit status.

    Raises:
        RunFailed: an episode failed, or was not the same the second time.
    """
    recipe, options = args.loaded, args.loaded.environment
    if options is None:
        raise ConfigError("environment: the recipe has none")
    tokenizer = build.load_tokenizer(recipe.model)
    problems = Problems(recipe.data, options).prompts("train", tokenizer).prompts[: args.episodes]
    turns = recorded(args.turns) if args.turns else [invented(options, problem) for problem in problems]
    episodes = list(zip(problems, turns, strict=False))
    folder = tempfile.mkdtemp(prefix="megatron-rft-check-")  # not run.output_dir, which a run wants for itself
    section = recipe.run.model_copy(update={"output_dir": folder})
    builder = EngineBuilder(recipe.model_copy(update={"run": section}))
    start, plays = time.perf_counter(), []
    for _ in range(2):
        with ExitStack() as stack:
            player = around(Script(list, []), builder, tokenizer, stack)
            plays.append(scripted(player, episodes, recipe.rollout.max_response_tokens))
    seconds = (time.perf_counter() - start) / 2 / len(episodes)
    turns = sum(len(part.turns) for each in plays[0] for part in (*each.segments, each))
    segments = sum(1 + len(each.segments) for each in plays[0])
    counted = f"{len(episodes)} episodes, {turns} turns in {segments} segments, {seconds:.3f} s each"
    print(f"{options.name}: {counted}", flush=True)
    first = plays[0][0]
    ids = [*(first.prompt_ids or problems[0].token_ids), *first.token_ids]
    print(f"the first one, as the policy reads it:\n{tokenizer.decode(ids)}", flush=True)
    for each in plays[0]:
        if (score := each.score) and not score.error:
            print(f"reward {each.total(score).reward:g}, score {score.reward:g} {score.reason}".rstrip(), flush=True)
    faults = [fault for (problem, _), *both in zip(episodes, *plays, strict=True) if (fault := wrong(problem, *both))]
    if faults:
        raise RunFailed("\n".join(faults))
    shutil.rmtree(folder)  # else its messages name the log
    print("the second time it was the same", flush=True)
    return FINISHED


def wrong(problem: Prompt, first: Response, second: Response) -> str | None:
    """The line about an episode that failed or was not the same twice."""
    for number, (one, other) in enumerate(zip(first.said, second.said, strict=False), 1):
        if one != other:
            return f"problem {problem.index}, answer {number}: {one!r:.200}, the second time {other!r:.200}"
    if error := next((each.score.error for each in (first, second) if each.score and each.score.error), None):
        return error
    return None if first == second else f"problem {problem.index}: it went otherwise the second time"


def recorded(path: Path) -> list[list[str]]:
    try:
        turns = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise DataError(f"--turns: {path} cannot be read: {error}") from None
    if not turns or not all(isinstance(each, list) and {*map(type, each)} == {str} for each in turns):
        raise DataError(f"--turns: {path}: each line must be a JSON list of texts, the policy's turns of an episode")
    return turns


def invented(environment: AnyEnvironment, problem: Prompt) -> list[str]:
    """Turns for one problem: calls of the functions with made-up arguments, digits, words, and at last its answer."""
    rng, calls = random.Random(problem.index), []
    for tool in (each["function"] for each in schemas(environment)):
        kinds = {name: about.get("type") for name, about in tool["parameters"]["properties"].items()}  # or a list
        given = {name: SAMPLES.get(k[0] if isinstance(k, list) else k, "a") for name, k in kinds.items()}
        given |= {"code": "print(6 * 7)"} if tool["name"] == "python" else {}
        calls.append("<tool_call>" + json.dumps({"name": tool["name"], "arguments": given}) + "</tool_call>")
    words = [str(rng.randint(0, 9)), problem.question[:20] or "?", *calls]
    return [rng.choice(calls or words) for _ in range(environment.max_turns - 1)] + [problem.answer]
