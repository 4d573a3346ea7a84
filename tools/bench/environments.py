"""Measures what environments add to generation: the seconds in which nothing is generated because they answer, what
vLLM's prefix cache saves and changes when it lives from turn to turn, and what waves cost beside episodes that go on at
their own pace.

    OMP_NUM_THREADS=1 python tools/bench/environments.py [--episodes 1000 --size 20m --processes 4 16]

Episodes of a model with random weights in vLLM, in a process: `--turns` turns whose lengths are geometric, with a mean
of 32 tokens, each followed by 16 tokens of an environment that takes `--answer-ms` for each answer, the first and
the score included. The wait is `environment/wait_seconds` of a run, the steps are those of vLLM. After the rows with
numbers of processes come the first one's episodes with an empty cache in each turn, and at their own pace.
"""

import argparse
import importlib
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from rollout_vllm import random_weights
from setups import DTYPES, SIZES, qwen3
from transformers import ByT5Tokenizer

from megatron_rft.environments.player import Episodes
from megatron_rft.environments.process import EnvironmentProcesses
from megatron_rft.environments.template import Template
from megatron_rft.inference.engine import Engine, Group, Request, Sampling
from megatron_rft.inference.pool import EnginePool
from megatron_rft.inference.process import EngineProcess
from megatron_rft.inference.vllm.engine import VLLMEngine
from megatron_rft.records import Prompt, Response

SMALLEST = "--episodes 8 --size 1m --processes 1 --prompt 32"  # tests/bench
SLOW = """
import time
from megatron_rft.environments import Environment, Turn

class Slow(Environment):
    def reset(self, prompt, seed):
        self.seconds = prompt.fields["seconds"]
        time.sleep(self.seconds)

    def step(self, text):
        time.sleep(self.seconds)
        return Turn("abcdefghijklmnop")

    def score(self):
        time.sleep(self.seconds)
        return 0.0
"""


class Counted(VLLMEngine):
    """Returns the number of its steps in place of checksums, which nothing needs here."""

    steps = 0

    def _step(self) -> list:
        self.steps += 1
        return super()._step()

    def checksums(self) -> dict[str, int]:
        return {"steps": self.steps}


def forgetful(engine: Engine, requests: list[Request], sampling: Sampling) -> Iterator[Group]:
    """Generates with an empty cache in each turn."""
    return EngineProcess.generate(engine, requests, replace(sampling, continues=False))


def played(engine: EngineProcess, requests: list[Request], folder: Path, processes: int, turns: int, **options):
    """Returns the responses, the seconds, the engine's steps, and the seconds in which it waited."""
    vocabulary = options.pop("vocabulary")
    sampling = Sampling(turns * 512, stop_token_ids=tuple(range(0, vocabulary, 32)))
    world = {"kind": "own", "episode": f"{folder}/slow.py:Slow"}
    environments = EnvironmentProcesses(world, processes, 30.0, folder / "log")
    problem = {"index": 0, "text": "", "answer": "", "fields": {"seconds": 0.0}}
    for _ in range(processes):
        environments.new().ask("reset", prompt=problem, seed=0)  # starts the process: its imports are not measured
    template, pool = Template(ByT5Tokenizer(), sampling.stop_token_ids), EnginePool([engine], engine.dtype)
    player = Episodes(pool, environments, template, str, "slow", turns, **options)
    before, start = engine.checksums()["steps"], time.perf_counter()
    groups = sorted(player.generate(requests, sampling), key=lambda group: group.id)
    seconds, steps = time.perf_counter() - start, engine.checksums()["steps"] - before
    waited = player.statistics()["environment/wait_seconds"]
    player.close()
    return [response for group in groups for response in group.responses], seconds, steps, waited


def difference(first: list[Response], second: list[Response]) -> str:
    """How many of the responses have other tokens, and how much the log-probs of the others differ."""
    same = [pair for pair in zip(first, second, strict=True) if pair[0].token_ids == pair[1].token_ids]
    far = max((abs(a - b) for one, other in same for a, b in zip(one.logprobs, other.logprobs, strict=True)), default=0)
    equal = sum(one.logprobs == other.logprobs for one, other in same)
    return f"{len(first) - len(same)} of {len(first)} other tokens, {equal} bit-equal, others by up to {far:.1g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=256, help="tokens of each prompt")
    parser.add_argument("--answer-ms", type=float, default=10.0)
    parser.add_argument("--processes", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--size", choices=SIZES, default="20m")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16")
    arguments = parser.parse_args()
    config, rng = qwen3(arguments.size), random.Random(0)
    dtype = DTYPES[arguments.dtype]
    here = importlib.import_module("environments")  # this file, by a name that the engine's process knows, too
    build = partial(here.Counted, config, dtype, max_model_len=arguments.prompt + arguments.turns * 512)
    log, path = Path(tempfile.mkdtemp()) / "log", {"PYTHONPATH": str(Path(__file__).parent)}
    engine = EngineProcess(build, "the engine", log, environment=path)
    engine.load_weights(random_weights(config, dtype).items(), version=0)
    requests = []
    for number in range(arguments.episodes // 4):
        ids = tuple(rng.randrange(1, config.vocab_size) for _ in range(arguments.prompt))
        problem = Prompt(number, ids, "", "", {"seconds": arguments.answer_ms / 1e3})
        requests.append(Request(number, ids, 4, seed=number, problem=problem))
    list(engine.generate(requests[:4], Sampling(4)))  # the first steps are slow
    print(
        "| processes | cache | seconds | steps | wait, s | share | beside the first row |\n"
        "|---|---|---|---|---|---|---|"
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "slow.py").write_text(SLOW)
        first: list[Response] = []
        rows: list[tuple[int, str, dict]] = [(count, "kept", {}) for count in arguments.processes]
        rows.append((arguments.processes[0], "reset each turn", {}))
        rows.append((arguments.processes[0], "kept, own pace", {"at_once": 256}))
        for processes, kind, options in rows:
            engine.generate = partial(forgetful if "reset" in kind else EngineProcess.generate, engine)
            options |= {"vocabulary": config.vocab_size}
            found, seconds, steps, waited = played(engine, requests, folder, processes, arguments.turns, **options)
            assert not any(response.score.error for response in found)
            first = first or found
            print(
                f"| {processes} | {kind} | {seconds:.1f} | {steps} | {waited:.2f} | {waited / seconds:.1%} | "
                f"{difference(first, found)} |",
                flush=True,
            )
    engine.close()


if __name__ == "__main__":
    main()
